"""Hyperparameter search, built on the public functions of the library."""
