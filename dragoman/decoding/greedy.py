"""Greedy search: the likeliest token, always."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dragoman.decoding.following import follow
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty, WuPenalty
from dragoman.decoding.stepping import Candidates, Ints, Rows, Stepper, best_candidates


@dataclass(frozen=True, slots=True)
class Greedy:
    """Take the likeliest token at each step, the lower id of equal ones: the quickest, and a beam of one."""

    penalty: Penalty = field(default_factory=WuPenalty)

    def run(self, model: Stepper, state: Any, rows: Rows) -> list[list[Hypothesis]]:
        """Search from a fresh state; give one hypothesis a row."""
        return [[hypothesis] for hypothesis in follow(model, state, rows, choose=_likeliest, penalty=self.penalty)]


def _likeliest(log_probs: Tensor, rows: Ints, step: int) -> Candidates:
    """Choose the best token of each row."""
    return best_candidates(log_probs, 1, step)
