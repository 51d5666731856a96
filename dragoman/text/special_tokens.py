"""The four pieces that stand for no text. Their numbers are the same in every vocabulary."""

from __future__ import annotations

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Padding, start of sentence, end of sentence, unknown piece."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
"""How the special pieces are shown to people, by number."""
