"""Sampling whose draws belong to the line, not to the batch it happens to be in."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.following import follow
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty, WuPenalty
from dragoman.decoding.stepping import Candidates, Ints, Rows, Stepper, require_finite, select_rows
from dragoman.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw each token from the model's distribution, sharpened, cut, or left as it is.

    A draw is a pure function of (seed, line number, sample, step): neighbours, batch size and order change nothing,
    and the same seed gives the same text again. The cut to the `top_k` likeliest comes first, then the cut to the
    fewest that hold `top_p` of the probability.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 for all
    top_p: float = 1.0
    seed: int = 1
    samples: int = 1  # hypotheses drawn for each row
    penalty: Penalty = field(default_factory=WuPenalty)

    def __post_init__(self) -> None:
        """Refuse settings that describe no distribution, all at once."""
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            problems.append(f"temperature must be a finite number above 0; found {self.temperature}; for the likeliest token do not sample")
        if self.top_k < 0:
            problems.append(f"top_k must be at least 1, or 0 for all tokens; found {self.top_k}; try 20")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p must be more than 0 and at most 1; found {self.top_p}; try 0.95")
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed must be 0 to 2**63 - 1; found {self.seed}; try 1")
        if self.samples < 1:
            problems.append(f"samples must be at least 1; found {self.samples}; try 1")
        if problems:
            raise ConfigError(problems)

    def run(self, model: Stepper, state: Any, rows: Rows) -> list[list[Hypothesis]]:
        """Draw from a fresh state; give each row's samples, best first and each text once."""
        count = len(rows.limits)
        source = np.repeat(np.arange(count), self.samples)
        many = Rows(rows.limits[source], [rows.prefixes[int(r)] for r in source], [rows.lines[int(r)] for r in source], rows.at_least)
        sample = np.tile(np.arange(self.samples), count)

        def choose(logits: Tensor, less: Tensor | None, living: Ints, step: int) -> Candidates:
            draws = [_uniform(self.seed, many.lines[row], int(sample[row]), step) for row in living]
            return self._draw(logits if less is None else logits - less, draws, step)

        drawn = follow(model, select_rows(state, source, count), many, choose=choose, penalty=self.penalty)
        return [_ranked(drawn[row * self.samples : (row + 1) * self.samples]) for row in range(count)]

    def _draw(self, log_probs: Tensor, draws: list[float], step: int) -> Candidates:
        """Turn one uniform number a row into a token: the point of the cumulative distribution that it names.

        The tokens stand in falling order of probability, so that the cuts keep a beginning of the row.
        """
        tempered, ids = torch.sort(log_probs.double() / self.temperature, dim=-1, descending=True, stable=True)
        if self.top_k:
            tempered, ids = tempered[:, : self.top_k], ids[:, : self.top_k]
        probs = tempered.softmax(dim=-1)
        cumulative = probs.cumsum(dim=-1)
        kept = probs.masked_fill(cumulative - probs >= self.top_p, 0.0).cumsum(dim=-1)
        point = torch.tensor(draws, dtype=torch.float64, device=kept.device)[:, None] * kept[:, -1:]
        # The first place whose cumulative probability passes the point; never past the last one that has any.
        place = torch.minimum((kept <= point).sum(dim=-1, keepdim=True), (kept < kept[:, -1:]).sum(dim=-1, keepdim=True))
        tokens = ids.gather(-1, place)
        both = torch.cat([log_probs.gather(-1, tokens).double(), tokens.double()], dim=-1).cpu().numpy()
        require_finite(both[:, :1], step)
        return Candidates(both[:, :1], both[:, 1:].astype(np.int64))


def _uniform(seed: int, line: int, sample: int, step: int) -> float:
    """Hash a place in the output to a number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, line, sample, step), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _ranked(drawn: list[Hypothesis]) -> list[Hypothesis]:
    """Sort finished before cut ones, better before worse, and drop repetitions."""
    once = {(tuple(h.tokens), h.finished): h for h in drawn}
    return sorted(once.values(), key=lambda h: (not h.finished, -h.score))
