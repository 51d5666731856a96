"""Why a text got its label: the effect of leaving out each word and each sentence.

Attention weights alone are no explanation: a word may get much weight and change nothing (Jain and
Wallace, 2019, "Attention is not Explanation"). So each word and each sentence is left out of the
text in turn, the model predicts again, and the drop in the label's probability is reported.
`classification_occlusion_report.py` renders the result for the terminal and as HTML.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_LEFT_OUT = 512  # words of a text that are left out in turn; the model runs once for each
MAX_RUN_WORDS = 1 << 19  # of all those runs together: fewer words of a long text are left out
MIN_SCALE = 0.1  # a text whose words all change less than this is drawn in pale colors
_MAX_SKIPPED = 256  # characters, such as markup, that a tokenizer may drop between two tokens
_SPACES = re.compile(r"[ \t\r\n]+")


class CharacterSpan(NamedTuple):
    """A part of a text: characters from `start` up to `end`."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceSpans:
    """The words of one sentence with the model's attention weights."""

    words: Sequence[CharacterSpan]
    word_weights: Sequence[float] | None = None  # sum to 1 in the sentence; None without attention
    weight: float | None = None  # of the sentence; None without a second level of attention


@dataclass(frozen=True, kw_only=True, slots=True)
class WordEffect:
    """A word, its attention weight, and the drop in probability without it."""

    text: str
    span: CharacterSpan
    weight: float | None  # None for a model without attention weights over words
    drop: float | None  # p(label | text) - p(label | text without the word); None if not computed

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, rounded to six decimals."""
        return {
            "word": self.text,
            "start": self.span.start,
            "end": self.span.end,
            "weight": round_or_none(self.weight),
            "drop": round_or_none(self.drop),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceEffect:
    """A sentence with its words, its attention weight, and the drop in probability without it."""

    text: str
    words: list[WordEffect]
    weight: float | None  # None for a model without attention weights over sentences
    drop: float | None  # None for the only sentence of a text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "sentence": self.text,
            "weight": round_or_none(self.weight),
            "drop": round_or_none(self.drop),
            "words": [word.to_dict() for word in self.words],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class OcclusionExplanation:
    """The label of a text, and the effect of each of its words and sentences on it."""

    text: str
    label: str
    probability: float
    probabilities: dict[str, float]  # of every label, most probable first
    sentences: list[SentenceEffect]
    notes: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[WordEffect]:
        """All words in the order of the text."""
        return [word for sentence in self.sentences for word in sentence.words]

    @property
    def has_word_weights(self) -> bool:
        """Whether the model has attention weights over words."""
        return any(word.weight is not None for word in self.words)

    @property
    def has_sentence_weights(self) -> bool:
        """Whether the model has attention weights over sentences too: two levels."""
        return any(sentence.weight is not None for sentence in self.sentences)

    @property
    def scale(self) -> float:
        """The drop that is drawn at full strength: the largest, and at least MIN_SCALE."""
        return max([MIN_SCALE, *(abs(word.drop or 0.0) for word in self.words)])

    def ranked_words(self) -> list[WordEffect]:
        """Return the words by the size of their effect, then by weight; undecided ones last."""
        return sorted(
            self.words,
            key=lambda word: (
                word.drop is None,
                -abs(word.drop or 0.0),
                -(word.weight or 0.0),
                word.span,
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "text": self.text,
            "label": self.label,
            "probability": round(self.probability, 6),
            "probabilities": {
                label: round(value, 6) for label, value in self.probabilities.items()
            },
            "sentences": [sentence.to_dict() for sentence in self.sentences],
            "notes": self.notes,
        }


def explain_text(
    text: str,
    sentences: Sequence[SentenceSpans],
    probabilities: dict[str, float],
    label: str,
    predict: Callable[[Sequence[str]], Sequence[float]],
    *,
    max_left_out: int = MAX_LEFT_OUT,
) -> OcclusionExplanation:
    """Explain a label of a text by leaving out each word, and each sentence, in turn.

    `predict` returns the label's probability for each of several texts. Of more than `max_left_out`
    words, those with the largest weights are left out, or the first ones without weights; of a
    text of thousands of words fewer, so that the model reads at most MAX_RUN_WORDS.
    """
    words = [
        (span, None if sentence.word_weights is None else sentence.word_weights[at], sentence)
        for sentence in sentences
        for at, span in enumerate(sentence.words)
    ]
    max_left_out = min(max_left_out, max(1, MAX_RUN_WORDS // max(1, len(words))))
    chosen = sorted(
        range(len(words)), key=lambda at: (-_joint_weight(words[at][1], words[at][2].weight), at)
    )[:max_left_out]
    # A text of one sentence without it is empty, which says nothing about the sentence.
    whole = [_hull(sentence) for sentence in sentences if sentence.words]
    num_sentences = len(whole)
    whole = whole[:max_left_out] if num_sentences > 1 else []
    changed = [leave_out(text, words[at][0]) for at in chosen]
    changed += [leave_out(text, span) for span in whole]
    left = list(predict(changed)) if changed else []
    probability = probabilities[label]
    word_drops = {
        words[at][0]: probability - value for at, value in zip(chosen, left, strict=False)
    }
    sentence_drops = {
        span: probability - value for span, value in zip(whole, left[len(chosen) :], strict=True)
    }
    notes = []
    if len(chosen) < len(words):
        notes.append(
            f"{len(chosen):,} of {len(words):,} words were left out in turn: those with the "
            "largest weights"
            if any(weight is not None for _, weight, _ in words)
            else f"the first {len(chosen):,} of {len(words):,} words were left out in turn"
        )
    if 0 < len(whole) < num_sentences:
        notes.append(
            f"the first {len(whole):,} of {num_sentences:,} sentences were left out in turn"
        )
    return OcclusionExplanation(
        text=text,
        label=label,
        probability=probability,
        probabilities=probabilities,
        sentences=[
            SentenceEffect(
                text=text[_hull(sentence).start : _hull(sentence).end],
                weight=sentence.weight,
                drop=sentence_drops.get(_hull(sentence)),
                words=[
                    WordEffect(
                        text=text[span.start : span.end],
                        span=span,
                        weight=None if sentence.word_weights is None else sentence.word_weights[at],
                        drop=word_drops.get(span),
                    )
                    for at, span in enumerate(sentence.words)
                ],
            )
            for sentence in sentences
            if sentence.words
        ],
        notes=notes,
    )


def leave_out(text: str, span: CharacterSpan) -> str:
    """Return a text without a part; the spaces around it become one, or none at the ends."""
    before, after = text[: span.start], text[span.end :]
    if before[-1:].isspace() and after[:1].isspace():
        after = _SPACES.sub("", after, count=1)
    return (before.rstrip() if not after.strip() else before) + (
        after.lstrip() if not before.strip() else after
    )


def find_spans(text: str, tokens: Sequence[str]) -> list[CharacterSpan | None]:
    """Return where each token is found in a text, one after the other; None if it is not there.

    Case is ignored, as a tokenizer may lowercase.
    """
    # Lowercasing may change the length of a text ("İ"), and then its positions.
    lowered = "".join(char.lower() if len(char.lower()) == 1 else char for char in text)
    spans = list[CharacterSpan | None]()
    at = 0
    for token in tokens:
        wanted = token.lower()
        found = lowered.find(wanted, at, at + _MAX_SKIPPED + len(wanted)) if wanted else -1
        spans.append(None if found < 0 else CharacterSpan(found, found + len(wanted)))
        at = at if found < 0 else found + len(wanted)
    return spans


def merge_into_words(
    text: str, spans: Sequence[CharacterSpan], weights: Sequence[float] | None
) -> SentenceSpans:
    """Return subwords or characters merged into words, whose weights are the sums of theirs.

    A word is a run of letters and digits without a space; other characters stand alone.
    """
    words, sums = list[CharacterSpan](), list[float]()
    for at, span in enumerate(spans):
        part = text[span.start : span.end]
        stripped = CharacterSpan(
            span.start + len(part) - len(part.lstrip()),
            span.end - len(part) + len(part.rstrip()),
        )
        weight = 0.0 if weights is None else weights[at]
        if stripped.start >= stripped.end:  # only a space: its weight goes to the word before it
            if sums:
                sums[-1] += weight
            continue
        if words and words[-1].end >= stripped.end:  # another byte of the same character
            sums[-1] += weight
        elif (
            words
            and words[-1].end == stripped.start
            and _is_word_char(text[stripped.start - 1])
            and _is_word_char(text[stripped.start])
        ):
            words[-1] = CharacterSpan(words[-1].start, stripped.end)
            sums[-1] += weight
        else:
            words.append(stripped)
            sums.append(weight)
    return SentenceSpans(words=words, word_weights=None if weights is None else sums)


def _is_word_char(char: str) -> bool:
    """Whether a character belongs to a word of a script with spaces."""
    return (char.isalnum() or char in "'’_-") and not "\u2e80" <= char <= "\u9fff"


def _joint_weight(word: float | None, sentence: float | None) -> float:
    """Return a word's weight in its text: that in its sentence times the sentence's."""
    return (0.0 if word is None else word) * (1.0 if sentence is None else sentence)


def _hull(sentence: SentenceSpans) -> CharacterSpan:
    """Return the part of the text from the sentence's first word to its last."""
    return CharacterSpan(sentence.words[0].start, sentence.words[-1].end)


def round_or_none(value: float | None) -> float | None:
    """Return a number rounded to six decimals; None stays None."""
    return None if value is None else round(float(value), 6)
