"""The four special tokens, whose ids are the same in every vocabulary, and language tags.

`Tokenizer.tagged` in sentencepiece_tokenizer.py puts a tag before the source.
"""

from __future__ import annotations

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Padding, start of sentence, end of sentence, unknown token."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
"""Special tokens by id."""


def language_tag(language: str) -> str:
    """Return the token before sources that are translated into a language, such as <2en>."""
    return f"<2{language}>"
