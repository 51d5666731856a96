"""Precision, recall and F1 of chunks and entities by the rules of conlleval.

Conlleval is the scorer of the CoNLL shared tasks (Tjong Kim Sang and Buchholz 2000). A span is
right if its first and last token and its type are. Illegal tags are repaired, in references and
predictions alike, as `dragoman.text.tag_schemes.find_spans` defines; stricter scorers, such as
seqeval in its strict mode, drop such spans and return other scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.text.tag_schemes import find_spans


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Numbers of spans: right, predicted and in the reference."""

    right: int
    predicted: int
    reference: int

    @property
    def precision(self) -> float:
        """The fraction of predicted spans that are right; 0 without any."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The fraction of the reference's spans that were found; 0 without any."""
        return self.right / self.reference if self.reference else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 where both are."""
        both = self.predicted + self.reference
        return 2 * self.right / both if both else 0.0


@dataclass(slots=True)
class SpanScorer:
    """Counts tokens and spans, sentence by sentence."""

    tokens: int = 0
    right_tokens: int = 0
    right: int = 0
    predicted: int = 0
    reference: int = 0

    def add(self, reference: Sequence[str], predicted: Sequence[str]) -> None:
        """Compare the tags of one sentence; spans never cross sentences."""
        self.tokens += len(reference)
        self.right_tokens += sum(a == b for a, b in zip(reference, predicted, strict=True))
        expected, found = set(find_spans(reference)), set(find_spans(predicted))
        self.right += len(expected & found)
        self.predicted += len(found)
        self.reference += len(expected)

    @property
    def accuracy(self) -> float:
        """The fraction of tokens with the right tag."""
        return self.right_tokens / self.tokens if self.tokens else 0.0

    def overall(self) -> SpanCounts:
        """Return the counts of all types together: the scores that papers report."""
        return SpanCounts(self.right, self.predicted, self.reference)


def span_signature(unit: str) -> str:
    """Return the signature of a span score: the counted units, and how they are counted."""
    return f"{unit}:exact|illegal:repaired|rules:conlleval"
