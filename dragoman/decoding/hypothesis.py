"""One candidate output of a search, with what the model thought of each of its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A sequence that a search proposes; the specials that frame it are not among its tokens."""

    tokens: list[int]
    log_probs: list[float]  # the model's own: one a token, and one for the end when it was reached
    score: float  # their sum under the strategy's length penalty: what hypotheses are ranked by
    finished: bool  # False when the length limit came before the end

    @property
    def total(self) -> float:
        """The log-probability of the whole sequence, without a length penalty."""
        return math.fsum(self.log_probs)
