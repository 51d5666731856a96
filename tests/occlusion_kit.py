"""Explanations of a logistic bag of words, whose leave-one-out effects have a closed form."""

from __future__ import annotations

import math
import re

from dragoman.explain.classification_occlusion import (
    CharacterSpan,
    OcclusionExplanation,
    SentenceSpans,
    explain_text,
)

VALUES = {"wonderful": 2.0, "great": 1.0, "boring": -1.5, "not": -0.7}
TEXT = "A wonderful <b>film</b>.<br />It is boring, though not slow & long.  The end is great!"


def positive(text: str) -> float:
    """A logistic bag of words, whose leave-one-out drops have a closed form."""
    return 1 / (1 + math.exp(-sum(VALUES.get(word, 0.0) for word in re.findall(r"\w+", text))))


def sentences(text: str, *, weights: bool = True, levels: int = 2) -> list[SentenceSpans]:
    found = []
    for match in re.finditer(r"[^.!]+[.!]?", text.replace("<br />", "      ")):
        words = [
            CharacterSpan(match.start() + word.start(), match.start() + word.end())
            for word in re.finditer(r"\w+|[^\w\s]", match.group())
        ]
        if words:
            found.append(
                SentenceSpans(
                    words=words,
                    word_weights=[1 / len(words)] * len(words) if weights else None,
                    weight=0.5 if levels == 2 else None,
                )
            )
    return found


def explanation(text: str = TEXT, **options) -> OcclusionExplanation:
    value = positive(text)
    return explain_text(
        text,
        sentences(text, **options),
        {"positive": value, "negative": 1 - value},
        "positive",
        lambda texts: [positive(each) for each in texts],
    )
