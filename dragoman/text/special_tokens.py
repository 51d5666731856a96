"""The four special tokens, whose ids are the same in every vocabulary, and language tags.

`Tokenizer.tagged` in sentencepiece_tokenizer.py puts a tag before the source.
"""

from __future__ import annotations

import re

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Padding, start of sentence, end of sentence, unknown token."""

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
"""Special tokens by id."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def language_tag(language: str) -> str:
    """Return the token before sources that are translated into a language, such as <2en>."""
    return f"<2{language}>"


def byte_of_token(token: str) -> int | None:
    """Return the byte that a token such as <0xE4> stands for; None for other tokens."""
    found = _BYTE_TOKEN.fullmatch(token)
    return None if found is None else int(found[1], 16)
