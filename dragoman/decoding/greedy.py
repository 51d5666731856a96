"""Greedy search, and the loop that it shares with sampling: one hypothesis per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dragoman.decoding.device_beam_search import DeviceBeamSearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search import (
    Candidates,
    FloatArray,
    IncrementalDecoder,
    IntArray,
    SearchConstraints,
    apply_constraints,
    argmax_candidates,
    get_logits_backend,
    next_logits,
    select_rows,
)
from dragoman.text.special_tokens import BOS, EOS, PAD

# Given logits (N, V) and their normaliser (N, 1), if any, the rows (N,) and the step, choose one token a row: an (N, 1) of candidates.
TokenChooser = Callable[[Tensor, Tensor | None, IntArray, int], Candidates]


class _StepTokens(NamedTuple):
    """What one step added to some rows."""

    rows: IntArray
    tokens: IntArray
    log_probs: FloatArray


def decode_one_path(
    model: IncrementalDecoder,
    state: Any,
    rows: SearchConstraints,
    *,
    choose: TokenChooser,
    penalty: LengthPenalty,
    is_greedy: bool = False,
) -> list[Hypothesis]:
    """Extend every row by the chosen token until its end or its limit; rows that are done leave the batch.

    Where no scores are wanted, hypotheses have no log-probabilities and the score nought. `takes_first` says that `choose` always takes
    the largest logit: a model that can go on by itself in that way brings it as its `follow_first`, which may give None.
    """
    count = len(rows.limits)
    if (
        is_greedy
        and not rows.return_scores
        and not any(rows.prefixes)
        and hasattr(model, "decode_greedy")
    ):
        found = model.decode_greedy(state, rows.limits, min_length=rows.min_length)
        if found is not None:
            return _build_hypotheses(
                found, np.zeros(found.shape), (found >= 0).sum(axis=1), penalty, return_scores=False
            )
    steps: list[_StepTokens] = []
    active_rows: IntArray = np.arange(count)
    new_tokens: IntArray = np.full(count, BOS)
    logits_backend = get_logits_backend(model)
    step = 0
    while active_rows.size:
        logits, state = next_logits(model, new_tokens, state)
        log_normalizer = logits_backend.log_sum_exp(logits) if rows.return_scores else None
        logits = apply_constraints(
            logits, forced=rows.forced(active_rows, step), step=step, min_length=rows.min_length
        )
        chosen = choose(logits, log_normalizer, active_rows, step)
        new_tokens, values = chosen.tokens[:, 0], chosen.log_probs[:, 0]
        is_possible = np.isfinite(values)
        ended = is_possible & (new_tokens == EOS)
        continues = is_possible & ~ended & (rows.limits[active_rows] > step)
        added = ended | continues
        steps.append(_StepTokens(active_rows[added], new_tokens[added], values[added]))
        kept = np.flatnonzero(continues)
        if kept.size:
            state = select_rows(state, kept, active_rows.size)
        active_rows, new_tokens = active_rows[kept], new_tokens[kept]
        step += 1
    return _build_hypotheses(
        *_collect_tokens(count, steps), penalty, return_scores=rows.return_scores
    )


def _collect_tokens(
    count: int, steps: Sequence[_StepTokens]
) -> tuple[IntArray, FloatArray, IntArray]:
    """Put together what the steps added: tokens and log-probabilities (B, T), of which a row has the first so many (B,)."""
    tokens, log_probs = np.full((count, len(steps)), PAD), np.zeros((count, len(steps)))
    lengths = np.zeros(count, dtype=np.int64)
    for step, (rows, new_tokens, values) in enumerate(steps):
        tokens[rows, step], log_probs[rows, step] = new_tokens, values
        lengths[rows] += 1
    return tokens, log_probs, lengths


def _build_hypotheses(
    tokens: IntArray,
    log_probs: FloatArray,
    lengths: IntArray,
    penalty: LengthPenalty,
    *,
    return_scores: bool,
) -> list[Hypothesis]:
    """Make a hypothesis of each row."""
    made = []
    for row, length in enumerate(lengths.tolist()):
        finished = length > 0 and tokens[row, length - 1] == EOS
        numbers = log_probs[row, :length].tolist() if return_scores else []
        score = penalty.score(sum(numbers), length) if return_scores else 0.0
        made.append(
            Hypothesis(tokens[row, : length - finished].tolist(), numbers, score, bool(finished))
        )
    return made


@dataclass(frozen=True, slots=True)
class GreedySearch:
    """Take the likeliest token at each step, the lower id of equal ones: the quickest, and a beam of one."""

    penalty: LengthPenalty = field(default_factory=WuLengthPenalty)

    def run(
        self, model: IncrementalDecoder, state: Any, rows: SearchConstraints
    ) -> list[list[Hypothesis]]:
        """Search from a fresh state; give one hypothesis a row."""
        if state.device.type == "cuda":
            return DeviceBeamSearch(
                rows, size=1, nbest=1, penalty=self.penalty, device=state.device
            ).run(model, state)
        logits_backend = get_logits_backend(model)

        def choose(
            logits: Tensor, log_normalizer: Tensor | None, _: IntArray, step: int
        ) -> Candidates:
            return argmax_candidates(
                logits, step, log_normalizer=log_normalizer, logits_backend=logits_backend
            )

        return [
            [hypothesis]
            for hypothesis in decode_one_path(
                model, state, rows, choose=choose, penalty=self.penalty, is_greedy=True
            )
        ]
