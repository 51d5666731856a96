"""Sampling with temperature, top-k, epsilon and top-p; draws do not depend on the batch."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.greedy import decode_one_path
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search_interface import (
    ChosenTokens,
    IncrementalDecoder,
    IntArray,
    SearchBackend,
    SearchRequest,
    select_rows,
    to_host,
)
from dragoman.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Draw each token from the model's distribution after temperature, top-k, epsilon and top-p.

    A draw is a pure function of (seed, sample id, sample, step), so it does not depend on the batch
    or its order. Top-k is applied first, then epsilon (Hewitt, Manning and Liang, 2022), which
    keeps the tokens that the model itself gives at least that probability, and always the most
    probable one; top-p then keeps the fewest tokens that reach the probability.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 for all tokens
    top_p: float = 1.0
    seed: int = 1
    samples: int = 1  # hypotheses drawn for each row
    penalty: LengthPenalty = field(default_factory=WuLengthPenalty)
    epsilon: float = 0.0  # probability below which a token is never drawn
    distinct: bool = True  # return equal samples once; with False as often as they were drawn

    def __post_init__(self) -> None:
        """Raise ConfigError with all settings that are out of range."""
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            problems.append(
                f"temperature must be a finite number above 0; found {self.temperature}; "
                "for the most probable token do not sample"
            )
        if not hasattr(self.top_k, "__index__") or self.top_k < 0:
            problems.append(
                "top_k must be an integer of at least 1, or 0 for all tokens; "
                f"found {self.top_k!r}; try 20"
            )
        if not 0 < self.top_p <= 1:
            problems.append(
                f"top_p must be more than 0 and at most 1; found {self.top_p}; try 0.95"
            )
        if not 0 <= self.epsilon < 1:
            problems.append(
                f"epsilon must be at least 0 and less than 1; found {self.epsilon}; try 0.02"
            )
        if not hasattr(self.seed, "__index__") or not 0 <= self.seed < 2**63:
            problems.append(
                f"seed must be an integer from 0 to 2**63 - 1; found {self.seed!r}; try 1"
            )
        if self.samples < 1:
            problems.append(f"samples must be at least 1; found {self.samples}; try 1")
        if problems:
            raise ConfigError(problems)

    @property
    def name(self) -> str:
        """The strategy's name in messages."""
        return "sampling"

    @property
    def beam_size(self) -> None:
        """Sampling has no beam."""
        return None

    @property
    def nbest(self) -> int:
        """Hypotheses returned for each sentence at most."""
        return self.samples

    @property
    def rows_per_sentence(self) -> int:
        """Each sample takes a row of a batch."""
        return self.samples

    def run(
        self, model: IncrementalDecoder, state: Any, request: SearchRequest, backend: SearchBackend
    ) -> list[list[Hypothesis]]:
        """Sample from a fresh state; return the samples of each row, best first."""
        count = len(request.limits)
        source = np.repeat(np.arange(count), self.samples)
        source_rows = source.tolist()
        sample = np.tile(np.arange(self.samples), count)
        repeated = replace(
            request,
            limits=[request.limits[row] for row in source_rows],
            prefixes=[request.prefixes[row] for row in source_rows],
            sample_ids=[request.sample_ids[row] for row in source_rows],
            return_scores=True,
            constraints=[request.constraints[row] for row in source_rows]
            if request.constraints
            else (),
        )

        def choose(
            logits: Tensor,
            log_sum_exp: Tensor | None,
            active_rows: IntArray,
            step: int,
            rejections: int,
        ) -> ChosenTokens:
            assert log_sum_exp is not None, "sampling needs probabilities"
            uniform_draws = [
                uniform_draw(
                    self.seed, repeated.sample_ids[row], int(sample[row]), step, rejections
                )
                for row in active_rows
            ]
            return self.draw(logits - log_sum_exp, uniform_draws, step)

        drawn = decode_one_path(
            model,
            select_rows(state, source, count),
            repeated,
            choose=choose,
            penalty=self.penalty,
            backend=backend,
        )
        return [
            _rank_samples(
                drawn[row * self.samples : (row + 1) * self.samples], distinct=self.distinct
            )
            for row in range(count)
        ]

    def draw(self, log_probs: Tensor, uniform_draws: list[float], step: int) -> ChosenTokens:
        """Return one token per row: the quantile of the cumulative distribution at its draw.

        Tokens are sorted by descending probability, so that top-k and top-p keep the first of a
        row.
        """
        scaled_log_probs, ids = self._sort_tokens(log_probs)
        if self.top_k:
            scaled_log_probs, ids = scaled_log_probs[:, : self.top_k], ids[:, : self.top_k]
        if self.epsilon:
            is_dropped = scaled_log_probs < math.log(self.epsilon) / self.temperature
            is_dropped[:, 0] = False
            scaled_log_probs = scaled_log_probs.masked_fill(is_dropped, -torch.inf)
        probs = scaled_log_probs.softmax(dim=-1)
        cumulative = probs.cumsum(dim=-1)
        kept_probs = probs.masked_fill(cumulative - probs >= self.top_p, 0.0).cumsum(dim=-1)
        threshold = (
            torch.tensor(uniform_draws, dtype=torch.float64, device=kept_probs.device)[:, None]
            * kept_probs[:, -1:]
        )
        # The first index whose cumulative probability exceeds the threshold, but never past the
        # last token with any probability.
        index = torch.minimum(
            (kept_probs <= threshold).sum(dim=-1, keepdim=True),
            (kept_probs < kept_probs[:, -1:]).sum(dim=-1, keepdim=True),
        )
        tokens = ids.gather(-1, index)
        return to_host(log_probs.gather(-1, tokens).squeeze(1), tokens.squeeze(1), step)

    def _sort_tokens(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities over the temperature in descending order, and their token ids.

        At most 1/epsilon tokens have a probability of epsilon: the others are not sorted.
        """
        ids = None
        if self.epsilon and (most := int(1 / self.epsilon) + 1) < log_probs.size(1):
            # In ascending order, because of equal values `topk` returns any first.
            ids = log_probs.topk(most, sorted=False).indices.sort(dim=-1).values
            log_probs = log_probs.gather(-1, ids)
        values, order = torch.sort(
            log_probs.double() / self.temperature, dim=-1, descending=True, stable=True
        )
        return values, order if ids is None else ids.gather(-1, order)


def uniform_draw(seed: int, sample_id: int, sample: int, step: int, rejections: int = 0) -> float:
    """Hash a position of an output to a number in [0, 1) with 53 random bits.

    After a token was rejected another one is drawn from the rest: so draws are from the
    distribution over all tokens that may follow, though only few of them were looked at.
    """
    digest = hashlib.blake2b(
        struct.pack("<4q", seed, sample_id, sample, step | rejections << 32), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _rank_samples(drawn: list[Hypothesis], *, distinct: bool) -> list[Hypothesis]:
    """Sort finished before truncated samples, each by score; `distinct` drops duplicates."""
    if distinct:
        drawn = list({(tuple(h.tokens), h.finished): h for h in drawn}.values())
    return sorted(drawn, key=lambda h: (not h.finished, -h.score))
