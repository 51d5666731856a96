"""BLEU by sentence length: a corpus in buckets of source length, each scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from dragoman.evaluate.translation_metrics import check_aligned
from dragoman.text.language_tags_and_script_detection import count_scripts

BUCKETS = 6
MIN_BUCKET_SENTENCES = 20  # fewer say nothing about BLEU
BOOTSTRAP_SAMPLES = 1000


class LengthBucket(NamedTuple):
    """The sentences of some lengths, with BLEU and its 95 % bootstrap interval."""

    shortest: int
    longest: int
    sentences: int
    bleu: float
    low: float
    high: float


class LengthScores(NamedTuple):
    """BLEU by length."""

    buckets: list[LengthBucket]
    unit: str  # what a length counts: "words" or "characters"
    signature: str


def score_by_length(
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    bleu: BLEU,
    *,
    buckets: int = BUCKETS,
    samples: int = BOOTSTRAP_SAMPLES,
) -> LengthScores:
    """Score sentences in buckets of source lengths, as many in each as lengths allow.

    Lengths count words, or characters in scripts without spaces. Intervals are sacreBLEU's.
    """
    check_aligned(hypotheses, references)
    check_aligned(sources, references)
    script, _ = count_scripts(sources)
    unit = "characters" if script and script != "Kore" else "words"
    lengths = np.array([len(text.split() if unit == "words" else text.strip()) for text in sources])
    found = []
    for shortest, longest in _edges(lengths, buckets):
        rows = np.flatnonzero((lengths >= shortest) & (lengths <= longest)).tolist()
        texts = [hypotheses[row] for row in rows]
        wanted = [[references[row] for row in rows]]
        result = bleu.corpus_score(texts, wanted)
        value = float(result.score)
        low = high = value
        if len(rows) > 1:
            resampled = bleu.corpus_score(texts, wanted, n_bootstrap=samples)
            low = float(resampled._mean - resampled._ci)
            high = float(resampled._mean + resampled._ci)
        found.append(LengthBucket(shortest, longest, len(rows), value, max(0.0, low), high))
    return LengthScores(found, unit, str(bleu.get_signature()))


def _edges(lengths: np.ndarray, buckets: int) -> list[tuple[int, int]]:
    """Return the shortest and longest length of each bucket, whose counts are about equal."""
    most = max(1, min(buckets, len(lengths) // MIN_BUCKET_SENTENCES))
    ends = np.quantile(lengths, np.arange(1, most + 1) / most, method="higher")
    found, start = list[tuple[int, int]](), int(lengths.min())
    for end in sorted({int(each) for each in ends}):
        inside = lengths[(lengths >= start) & (lengths <= end)]
        if len(inside):
            found.append((int(inside.min()), int(inside.max())))
            start = end + 1
    return found
