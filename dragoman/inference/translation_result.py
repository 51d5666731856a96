"""Translation of a line: the result type, and how those of its segments are joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.evaluate.confidence_calibration import ConfidenceMap

MAX_ALIGNMENT_CELLS = 1 << 22  # of a line in several segments: most cells are zero
_OPTIONAL_FIELDS = (  # left out if empty
    "constraints",
    "utility",
    "confidence",
    "source_language",
    "target_language",
)
_NOTED_FIELDS = ("other_language",)  # in a note, and not in JSON
_ALTERNATIVE_FIELDS = ("text", "score", "tokens", "log_probs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """The translation of one line."""

    text: str
    score: float = 0.0  # log-probability under the length penalty; closer to 0 is likelier
    tokens: list[str] = field(default_factory=list)
    # One log-probability per token, and one for EOS if the output is finished.
    log_probs: list[float] = field(default_factory=list)
    src_tokens: list[str] = field(default_factory=list)  # with `</s>`, which is attended to as well
    # (T, S): cross-attention weights averaged over layers and heads; a row sums to 1. None unless
    # requested, and for models without cross-attention.
    alignment: NDArray[np.float32] | None = None
    alternatives: Sequence[Translation] = ()  # the n best, this one first; without alternatives
    notes: Sequence[str] = ()  # anything unusual: split, truncated, retried
    constraints: Sequence[str] = ()  # those that were applied
    utility: float | None = None  # expected, of 100: only from minimum Bayes risk decoding
    # Probability that the translation is good, calibrated on validation data; None if the model
    # has no calibration, for samples, and without log-probabilities.
    confidence: float | None = None
    # Of a model of several directions; empty for others.
    source_language: str = ""
    target_language: str = ""
    other_language: str = (
        ""  # that the text clearly is in instead; empty if `source_language` is named
    )

    def __repr__(self) -> str:
        """Return text, score and number of tokens in one line."""
        counts = [f"{len(self.alternatives)} alternatives"] * (len(self.alternatives) > 1) + [
            f"notes={list(self.notes)}"
        ] * bool(self.notes)
        parts = [truncate_repr(self.text), f"score={self.score:.4f}", f"{len(self.tokens)} tokens"]
        return f"Translation({', '.join([*parts, *counts])})"

    def to_dict(self) -> dict[str, Any]:
        """Return the translation as JSON values, with numbers rounded to six decimals."""
        values: dict[str, Any] = {}
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if name in _NOTED_FIELDS:
                continue
            if name in _OPTIONAL_FIELDS and value in (None, "", (), []):
                continue
            if name == "alternatives":
                values[name] = [
                    {key: _round_values(getattr(other, key)) for key in _ALTERNATIVE_FIELDS}
                    | ({} if other.utility is None else {"utility": round(other.utility, 6)})
                    for other in value
                ]
            else:
                values[name] = _round_values(value)
        return values


def add_confidence(translation: Translation, calibration: ConfidenceMap) -> Translation:
    """Return a translation with its confidence; unchanged without log-probabilities."""
    confidence = calibration.confidence(
        tokens=translation.tokens,
        log_probs=translation.log_probs,
        src_tokens=translation.src_tokens,
    )
    return translation if confidence is None else replace(translation, confidence=confidence)


def truncate_repr(text: str, longest: int = 60) -> str:
    """Return the repr of a text, truncated if it is long."""
    return repr(text) if len(text) <= longest else f"{text[: longest - 1]!r}…"


def join_translations(
    segments: Sequence[Translation], gaps: Sequence[str], notes: Sequence[str]
) -> Translation:
    """Join the translations of a line's segments: texts with separators, scores added."""
    text = "".join(segment.text + gap for segment, gap in zip(segments, [*gaps, ""], strict=True))
    ranks = min((len(segment.alternatives) for segment in segments), default=0)
    blocks = [segment.alignment for segment in segments if segment.alignment is not None]
    rows, columns = sum(block.shape[0] for block in blocks), sum(block.shape[1] for block in blocks)
    if rows * columns > MAX_ALIGNMENT_CELLS:
        blocks = []
        notes = [
            *notes,
            f"its alignment is left out: {rows:,} by {columns:,} is more than "
            f"{MAX_ALIGNMENT_CELLS:,} numbers",
        ]
    return Translation(
        text=text,
        score=sum(segment.score for segment in segments),
        tokens=[token for segment in segments for token in segment.tokens],
        log_probs=[number for segment in segments for number in segment.log_probs],
        src_tokens=[token for segment in segments for token in segment.src_tokens],
        alignment=_block_diagonal(blocks),
        alternatives=[
            join_translations([segment.alternatives[rank] for segment in segments], gaps, ())
            for rank in range(ranks)
        ],
        notes=[*notes, *_count_notes([note for segment in segments for note in segment.notes])],
        utility=_mean_utility(segments),
    )


def _mean_utility(segments: Sequence[Translation]) -> float | None:
    """Return the mean of the segments' utilities, None if there are none."""
    known = [segment.utility for segment in segments if segment.utility is not None]
    return sum(known) / len(known) if known else None


def _count_notes(notes: Sequence[str]) -> list[str]:
    """Return each distinct note once, with the number of segments that have it."""
    return [
        note if times == 1 else f"{note} ({times} segments)"
        for note, times in Counter(notes).items()
    ]


def _block_diagonal(blocks: Sequence[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    """Return the block-diagonal alignment: segments do not attend to one another."""
    if not blocks:
        return None
    whole = np.zeros(
        (sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks)), dtype=np.float32
    )
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


def _round_values(value: Any) -> Any:
    """Round the numbers in nested lists, tensors and arrays to six decimals."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, (list, tuple)):
        return [_round_values(each) for each in value]
    return value
