"""A hypothesis: one candidate output of a search, with the log-probability of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Output token ids without BOS and EOS, their log-probabilities, and the score they rank by."""

    tokens: list[int]
    log_probs: list[float]  # one per token, and one for EOS if the hypothesis is finished
    score: float  # sum of the log-probabilities under the strategy's length penalty
    finished: bool  # False if the length limit came before EOS

    @property
    def total(self) -> float:
        """The log-probability of the whole sequence, without a length penalty."""
        return math.fsum(self.log_probs)
