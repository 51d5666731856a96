"""Minimum Bayes risk decoding: the candidate that agrees most with all candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dragoman.decoding.hypothesis import Hypothesis

if TYPE_CHECKING:
    from dragoman.evaluate.minimum_bayes_risk_utility import PairwiseMetric


class RankedCandidates(NamedTuple):
    """Distinct candidates of one sentence by descending expected utility."""

    hypotheses: list[Hypothesis]
    texts: list[str]
    utilities: list[float]


def rank_candidates(
    hypotheses: Sequence[Hypothesis],
    texts: Sequence[str],
    utility: PairwiseMetric,
    *,
    sampled: bool,
) -> RankedCandidates:
    r"""Rank candidates by their expected utility, finished before truncated ones.

    .. math:: \sum_y p(y) \, u(h, y)

    Samples are weighted by how often they were drawn (Eikema and Aziz, 2020), the hypotheses of a
    beam by their probabilities, normalized over the beam (Kumar and Byrne, 2004). Of several
    tokenizations of the same text only the first is kept.
    """
    positions: dict[str, int] = {}
    weights = np.zeros(len(texts))
    most = max(hypothesis.total for hypothesis in hypotheses)
    for at, (hypothesis, text) in enumerate(zip(hypotheses, texts, strict=True)):
        weight = 1.0 if sampled else math.exp(hypothesis.total - most)
        weights[positions.setdefault(text, at)] += weight
    kept = list(positions.values())
    distinct = [texts[at] for at in kept]
    expected = utility(distinct) @ (weights[kept] / weights.sum())
    order = sorted(
        range(len(kept)), key=lambda at: (not hypotheses[kept[at]].finished, -expected[at])
    )
    return RankedCandidates(
        [hypotheses[kept[at]] for at in order],
        [distinct[at] for at in order],
        [float(expected[at]) for at in order],
    )
