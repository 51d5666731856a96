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

from dragoman.decoding.greedy import decode_one_path
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search import (
    Candidates,
    IncrementalDecoder,
    IntArray,
    SearchConstraints,
    require_finite,
    select_rows,
)
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
    penalty: LengthPenalty = field(default_factory=WuLengthPenalty)

    def __post_init__(self) -> None:
        """Refuse settings that describe no distribution, all at once."""
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            problems.append(
                f"temperature must be a finite number above 0; found {self.temperature}; for the likeliest token do not sample"
            )
        if self.top_k < 0:
            problems.append(
                f"top_k must be at least 1, or 0 for all tokens; found {self.top_k}; try 20"
            )
        if not 0 < self.top_p <= 1:
            problems.append(
                f"top_p must be more than 0 and at most 1; found {self.top_p}; try 0.95"
            )
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed must be 0 to 2**63 - 1; found {self.seed}; try 1")
        if self.samples < 1:
            problems.append(f"samples must be at least 1; found {self.samples}; try 1")
        if problems:
            raise ConfigError(problems)

    def run(
        self, model: IncrementalDecoder, state: Any, rows: SearchConstraints
    ) -> list[list[Hypothesis]]:
        """Draw from a fresh state; give each row's samples, best first and each text once."""
        count = len(rows.limits)
        source = np.repeat(np.arange(count), self.samples)
        repeated = SearchConstraints(
            rows.limits[source],
            [rows.prefixes[int(r)] for r in source],
            [rows.lines[int(r)] for r in source],
            rows.min_length,
        )
        sample = np.tile(np.arange(self.samples), count)

        def choose(
            logits: Tensor, log_normalizer: Tensor | None, active_rows: IntArray, step: int
        ) -> Candidates:
            uniform_draws = [
                _uniform_draw(self.seed, repeated.lines[row], int(sample[row]), step)
                for row in active_rows
            ]
            return self._draw(
                logits if log_normalizer is None else logits - log_normalizer, uniform_draws, step
            )

        drawn = decode_one_path(
            model, select_rows(state, source, count), repeated, choose=choose, penalty=self.penalty
        )
        return [
            _rank_samples(drawn[row * self.samples : (row + 1) * self.samples])
            for row in range(count)
        ]

    def _draw(self, log_probs: Tensor, uniform_draws: list[float], step: int) -> Candidates:
        """Turn one uniform number a row into a token: the point of the cumulative distribution that it names.

        The tokens stand in falling order of probability, so that the cuts keep a beginning of the row.
        """
        scaled_log_probs, ids = torch.sort(
            log_probs.double() / self.temperature, dim=-1, descending=True, stable=True
        )
        if self.top_k:
            scaled_log_probs, ids = scaled_log_probs[:, : self.top_k], ids[:, : self.top_k]
        probs = scaled_log_probs.softmax(dim=-1)
        cumulative = probs.cumsum(dim=-1)
        kept_probs = probs.masked_fill(cumulative - probs >= self.top_p, 0.0).cumsum(dim=-1)
        threshold = (
            torch.tensor(uniform_draws, dtype=torch.float64, device=kept_probs.device)[:, None]
            * kept_probs[:, -1:]
        )
        # The first place whose cumulative probability passes the point; never past the last one that has any.
        index = torch.minimum(
            (kept_probs <= threshold).sum(dim=-1, keepdim=True),
            (kept_probs < kept_probs[:, -1:]).sum(dim=-1, keepdim=True),
        )
        tokens = ids.gather(-1, index)
        both = (
            torch.cat([log_probs.gather(-1, tokens).double(), tokens.double()], dim=-1)
            .cpu()
            .numpy()
        )
        require_finite(both[:, :1], step)
        return Candidates(both[:, :1], both[:, 1:].astype(np.int64))


def _uniform_draw(seed: int, line: int, sample: int, step: int) -> float:
    """Hash a place in the output to a number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, line, sample, step), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _rank_samples(drawn: list[Hypothesis]) -> list[Hypothesis]:
    """Sort finished before cut ones, better before worse, and drop repetitions."""
    once = {(tuple(h.tokens), h.finished): h for h in drawn}
    return sorted(once.values(), key=lambda h: (not h.finished, -h.score))
