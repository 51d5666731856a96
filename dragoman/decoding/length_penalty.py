"""How log-probabilities of sequences of different lengths are made comparable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dragoman.errors import ConfigError


class LengthPenalty(Protocol):
    """Turns a sequence's log-probability into the score it is ranked by."""

    def score(self, total: float, length: int) -> float:
        """Rank a sequence of `length` tokens, its end counted when it has one."""
        ...

    def upper_bound(self, total: float, length: int, longest: int) -> float:
        """Say the best score that any continuation, up to `longest` tokens, can still reach."""
        ...


@dataclass(frozen=True, slots=True)
class WuLengthPenalty:
    r"""Divide the log-probability by a power of the length, so that short outputs do not always win.

    .. math:: s(Y) = \log P(Y) / lp(Y), \qquad lp(Y) = \left(\frac{5 + |Y|}{6}\right)^\alpha

    Wu et al. (2016), equation 14, with the end counted in \|Y\|. Alpha 0 ranks by plain log-probability.
    """

    alpha: float = 0.6

    def __post_init__(self) -> None:
        """Refuse an exponent under which `bound` would not hold."""
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError(
                [f"the length penalty must be a number of at least 0; found {self.alpha}; try 0.6"]
            )

    def score(self, total: float, length: int) -> float:
        """Rank a sequence of `length` tokens, its end counted when it has one."""
        return total / self.divisor(length)

    def divisor(self, length: float) -> float:
        """Give what the log-probability of a sequence of `length` tokens is divided by."""
        divisor: float = ((5.0 + length) / 6.0) ** self.alpha
        return divisor

    def upper_bound(self, total: float, length: int, longest: int) -> float:
        """Say the best score that any continuation can still reach.

        More tokens can only lower the log-probability, which is not positive, and raise the divisor: the best case
        is a continuation that the model is certain of, as long as the limit allows.
        """
        return self.score(total, max(length, longest))
