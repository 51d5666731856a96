"""The four special tokens. Their ids are the same in every vocabulary."""

from __future__ import annotations

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Padding, start of sentence, end of sentence, unknown token."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
"""Special tokens by id."""
