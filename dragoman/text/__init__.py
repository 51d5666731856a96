"""Tokenizers, Unicode normalization, sentence splitting and language tags."""
