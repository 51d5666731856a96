"""Stems of English words, by a few suffixes: enough to see that "plays" and "playing" match."""

from __future__ import annotations

MIN_STEM = 3  # letters that are left of a word
# Longest first; the last column replaces the suffix.
_SUFFIXES = (
    ("ingly", ""),
    ("edly", ""),
    ("ings", ""),
    ("ies", "y"),
    ("ied", "y"),
    ("ing", ""),
    ("ers", ""),
    ("ed", ""),
    ("es", ""),
    ("er", ""),
    ("ly", ""),
    ("s", ""),
)


def stem(word: str) -> str:
    """Return a word in lower case without its inflection: "Riding", "rides" and "ride" are "rid".

    It is for comparing words, not for display.
    """
    word = word.lower()
    for suffix, replacement in _SUFFIXES:
        rest = len(word) - len(suffix)
        if rest >= MIN_STEM and word.endswith(suffix) and not word.endswith("ss"):
            word = word[:rest] + replacement
            break
    if len(word) > MIN_STEM and word[-1] == word[-2] and word[-1] not in "aeiou":
        word = word[:-1]  # running, runn, run
    return word[:-1] if len(word) > MIN_STEM and word.endswith("e") else word
