"""Unicode normalization: equal characters must become equal tokens."""

from __future__ import annotations

import unicodedata
from typing import Literal

from dragoman.errors import DataError, suggest_name

NORMALIZATION_FORMS = ("none", "nfc", "nfkc")
"""`none` keeps text, `nfc` composes accents, `nfkc` also replaces compatibility characters."""


_MAX_FAST_CHARACTERS = 4096  # characters up to which `unicodedata` is fast for any input


def normalize(text: str, form: str) -> str:
    """Return text in a Unicode normalization form; idempotent."""
    if form == "none" or text.isascii():
        return text
    if len(text) > _MAX_FAST_CHARACTERS:
        text = _order_marks(text, "NFKD" if form == "nfkc" else "NFD")
    if form == "nfc":
        return (
            text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
        )
    if form == "nfkc":
        return unicodedata.normalize("NFKC", text)
    raise DataError(
        "the normalization form must be known",
        found=repr(form),
        fix=suggest_name(form, NORMALIZATION_FORMS),
    )


def _order_marks(text: str, form: Literal["NFD", "NFKD"]) -> str:
    """Decompose text and put its combining marks into canonical order, in O(n log n).

    `unicodedata.normalize` inserts one mark after the other, which takes minutes for a letter with
    200,000 of them.
    """
    decomposed = "".join([unicodedata.normalize(form, char) for char in text])
    ordered, marks = list[str](), list[str]()
    for char in decomposed:
        if unicodedata.combining(char):
            marks.append(char)
            continue
        if marks:
            ordered += sorted(marks, key=unicodedata.combining) if len(marks) > 1 else marks
            marks = []
        ordered.append(char)
    return "".join([*ordered, *sorted(marks, key=unicodedata.combining)])
