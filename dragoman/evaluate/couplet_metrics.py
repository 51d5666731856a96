"""Couplets: violated constraints, equal length, character BLEU and perplexity per character."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.bleu import BLEU

from dragoman.decoding.output_constraint_definitions import (
    Constraint,
    EqualLength,
    Mirror,
    NoCopy,
    Punctuation,
)
from dragoman.evaluate.translation_metrics import MetricScore, check_aligned

COUPLET_CONSTRAINTS: tuple[Constraint, ...] = (EqualLength(), Mirror(), NoCopy(), Punctuation())


@dataclass(frozen=True, kw_only=True, slots=True)
class CoupletScores:
    """How well second lines answer their first lines."""

    lines: int
    violations: dict[str, int]  # lines that violate each constraint
    any_violation: int  # lines that violate at least one
    bleu: MetricScore  # of the corpus, over characters
    sentence_bleu: MetricScore  # mean over the lines, smoothed

    @property
    def equal_length(self) -> float:
        """The fraction of lines as long as their first line."""
        return 1 - self.violations[EqualLength.name] / self.lines

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        bleu = {"score": self.bleu.value, "signature": self.bleu.signature}
        sentence = {"score": self.sentence_bleu.value, "signature": self.sentence_bleu.signature}
        return {
            "lines": self.lines,
            "equal_length": self.equal_length,
            "violations": self.violations,
            "any_violation": self.any_violation,
            "bleu": bleu,
            "sentence_bleu": sentence,
        }


def score_couplets(
    first_lines: Sequence[str],
    outputs: Sequence[str],
    references: Sequence[str],
    *,
    constraints: Iterable[Constraint] = (),
) -> CoupletScores:
    """Score second lines against their first lines and one reference each.

    The four constraints of couplets are always counted, and others if given. BLEU is over
    characters. Most lines have five or seven of them, so few 4-grams match: the mean over the lines
    adds one to the counts of n-grams above 1 (Lin and Och 2004), and both signatures name their
    smoothing.
    """
    check_aligned(outputs, references)
    check_aligned(first_lines, references)
    every = list(dict.fromkeys([*COUPLET_CONSTRAINTS, *constraints]))
    held = [
        [each.holds(first.strip(), output) for each in every]
        for first, output in zip(first_lines, outputs, strict=True)
    ]
    corpus = BLEU(tokenize="char")
    bleu = corpus.corpus_score(list(outputs), [list(references)])
    smoothed = BLEU(tokenize="char", smooth_method="add-k", smooth_value=1, effective_order=True)
    by_line = [
        smoothed.sentence_score(output, [reference]).score
        for output, reference in zip(outputs, references, strict=True)
    ]
    return CoupletScores(
        lines=len(outputs),
        violations={each.label: sum(not row[at] for row in held) for at, each in enumerate(every)},
        any_violation=sum(not all(row) for row in held),
        bleu=MetricScore("BLEU", float(bleu.score), str(corpus.get_signature())),
        sentence_bleu=MetricScore(
            "sentence BLEU", math.fsum(by_line) / len(by_line), str(smoothed.get_signature())
        ),
    )


def perplexity_per_character(log_probs: Iterable[float], targets: Iterable[str]) -> float:
    """Return the perplexity per character from the log-probability of each target.

    The end of a line counts as a character. So models with different vocabularies compare.
    """
    pairs = [(log_prob, len(text) + 1) for log_prob, text in zip(log_probs, targets, strict=True)]
    total = math.fsum(log_prob for log_prob, _ in pairs)
    return math.exp(min(-total / max(1, sum(count for _, count in pairs)), 700.0))
