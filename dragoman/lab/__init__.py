"""Experiments built on the public functions of the library: hyperparameter search."""
