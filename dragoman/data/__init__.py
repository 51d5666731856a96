"""Corpora, the tokenized data on disk, batching and data checks."""
