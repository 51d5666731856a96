"""Greedy search: the likeliest token, always."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dragoman.decoding.following import follow
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty, WuPenalty
from dragoman.decoding.resident import ResidentBeam
from dragoman.decoding.stepping import Candidates, Ints, Rows, Stepper, likeliest, ranks_of


@dataclass(frozen=True, slots=True)
class Greedy:
    """Take the likeliest token at each step, the lower id of equal ones: the quickest, and a beam of one."""

    penalty: Penalty = field(default_factory=WuPenalty)

    def run(self, model: Stepper, state: Any, rows: Rows) -> list[list[Hypothesis]]:
        """Search from a fresh state; give one hypothesis a row."""
        if state.device.type == "cuda":
            return ResidentBeam(rows, size=1, nbest=1, penalty=self.penalty, device=state.device).run(model, state)
        ranks = ranks_of(model)

        def choose(logits: Tensor, less: Tensor | None, _: Ints, step: int) -> Candidates:
            return likeliest(logits, step, less=less, ranks=ranks)

        return [[hypothesis] for hypothesis in follow(model, state, rows, choose=choose, penalty=self.penalty, takes_first=True)]
