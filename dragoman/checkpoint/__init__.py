"""Checkpoints: file format, run directory, retention and averaging."""
