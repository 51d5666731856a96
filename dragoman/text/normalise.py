"""Unicode normalisation: two spellings of one character must not become two pieces."""

from __future__ import annotations

import unicodedata

from dragoman.errors import DataError, nearest

FORMS = ("none", "nfc", "nfkc")
"""Names of the forms: `none` leaves text alone, `nfc` composes accents, `nfkc` also replaces compatibility characters."""


def normalise(text: str, form: str) -> str:
    """Put text into a Unicode form; doing it twice changes nothing more."""
    if form == "none" or text.isascii():
        return text
    if form == "nfc":
        return text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
    if form == "nfkc":
        return unicodedata.normalize("NFKC", text)
    raise DataError("the normal form must be one that is known", found=repr(form), fix=nearest(form, FORMS))
