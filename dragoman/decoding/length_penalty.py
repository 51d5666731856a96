"""Length penalties: score hypotheses of different lengths so that they can be compared.

`BeamState` in beam_step.py divides log-probabilities by `divisor`: of finished hypotheses in
`_store_finished`, of truncated ones in `_store_truncated`, and in `_upper_bounds` to stop early. So
do its C++ and Triton forms. Greedy search and sampling call `score`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from dragoman.errors import ConfigError


class LengthPenalty(Protocol):
    """Divides the log-probability of a hypothesis by a function of its length.

    The divisor must be positive and must not decrease with the length. Beam search relies on it:
    the score of a partial hypothesis at its maximum length is then an upper bound for all of its
    continuations.
    """

    def divisor(self, length: int) -> float:
        """Return the divisor for `length` tokens, EOS included if the hypothesis is finished."""
        ...

    def score(self, total: float, length: int) -> float:
        """Return the score of a hypothesis from its log-probability and its length."""
        ...


@dataclass(frozen=True, slots=True)
class WuLengthPenalty:
    r"""Divide the log-probability by a power of the length, so that short outputs do not win.

    .. math:: s(Y) = \log P(Y) / lp(Y), \qquad lp(Y) = \left(\frac{5 + |Y|}{6}\right)^\alpha

    Wu et al. (2016), equation 14, with EOS counted in \|Y\|. Alpha 0 ranks by log-probability.
    """

    alpha: float = 0.6

    def __post_init__(self) -> None:
        """Raise ConfigError for an exponent under which the divisor would decrease."""
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError(
                [f"the length penalty must be a number of at least 0; found {self.alpha}; try 0.6"]
            )

    def divisor(self, length: int) -> float:
        """Return the divisor for `length` tokens, EOS included if the hypothesis is finished."""
        divisor: float = ((5.0 + length) / 6.0) ** self.alpha
        return divisor

    def score(self, total: float, length: int) -> float:
        """Return the score of a hypothesis from its log-probability and its length."""
        return total / self.divisor(length)


def parse_length_penalty(name: str) -> WuLengthPenalty:
    """Return the penalty that an explanation names `gnmt 0.6`; without a name none, alpha 0."""
    kind, _, alpha = name.partition(" ")
    return WuLengthPenalty(float(alpha) if kind == "gnmt" else 0.0)
