"""Greedy search, and the loop that it shares with sampling: one hypothesis per row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.constrained_logits import ConstrainedRows
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search_interface import (
    ChosenTokens,
    FloatArray,
    IncrementalDecoder,
    IntArray,
    SearchBackend,
    SearchRequest,
    mask_invalid_tokens,
    next_logits,
    select_rows,
    to_host,
)
from dragoman.ops.topk import TopK
from dragoman.text.special_tokens import BOS, EOS, PAD

# Choose one token per row from logits (N, V), their log-sum-exp (N, 1) if scores are wanted, the
# row indices (N,), the step, and how often tokens of this step were rejected.
TokenChooser = Callable[[Tensor, Tensor | None, IntArray, int, int], ChosenTokens]


@dataclass(frozen=True, slots=True)
class GreedySearch:
    """Take the most probable token at each step, the lower id of equal ones: a beam of one."""

    penalty: LengthPenalty = field(default_factory=WuLengthPenalty)

    @property
    def name(self) -> str:
        """The strategy's name in messages."""
        return "greedy search"

    @property
    def beam_size(self) -> int:
        """Greedy search is a beam of one."""
        return 1

    @property
    def nbest(self) -> int:
        """Greedy search returns one hypothesis."""
        return 1

    @property
    def rows_per_sentence(self) -> int:
        """Each sentence takes one row of a batch."""
        return 1

    def run(
        self, model: IncrementalDecoder, state: Any, request: SearchRequest, backend: SearchBackend
    ) -> list[list[Hypothesis]]:
        """Search from a fresh state; return one hypothesis per row."""
        if request.observer is not None:
            return BeamSearch(1, 1, self.penalty).run(model, state, request, backend)
        if not request.constraints:
            found = backend.decode_greedy(model, state, request, self.penalty)
            if found is not None:
                return found

        def choose(
            logits: Tensor, log_sum_exp: Tensor | None, _: IntArray, step: int, __: int
        ) -> ChosenTokens:
            values, ids = backend.argmax(logits)
            return to_host(
                values if log_sum_exp is None else values - log_sum_exp.squeeze(1), ids, step
            )

        decoded = decode_one_path(
            model, state, request, choose=choose, penalty=self.penalty, backend=backend
        )
        return [[hypothesis] for hypothesis in decoded]


class _StepTokens(NamedTuple):
    """The tokens that one step appended to some rows."""

    rows: IntArray
    tokens: IntArray
    log_probs: FloatArray


def decode_one_path(
    model: IncrementalDecoder,
    state: Any,
    request: SearchRequest,
    *,
    choose: TokenChooser,
    penalty: LengthPenalty,
    backend: SearchBackend,
) -> list[Hypothesis]:
    """Append the chosen token to every row until EOS or its limit; done rows leave the batch."""
    max_lengths, return_scores = request.max_lengths, request.return_scores
    constrained = (
        ConstrainedRows(request.constraints, max_lengths.tolist()) if request.constraints else None
    )
    states = [constrained.start(row) for row in range(len(max_lengths))] if constrained else []
    steps: list[_StepTokens] = []
    active_rows: IntArray = np.arange(len(max_lengths))
    new_tokens: IntArray = np.full(len(max_lengths), BOS)
    step = 0
    while active_rows.size:
        logits, state = next_logits(model, new_tokens, state)
        log_sum_exp = backend.log_sum_exp(logits) if return_scores else None
        if constrained:
            logits = constrained.mask(logits, active_rows.tolist(), states, step)
        logits = mask_invalid_tokens(
            logits,
            forced=request.forced_tokens(active_rows, step),
            step=step,
            min_length=request.min_length,
        )
        new_tokens, values = choose(logits, log_sum_exp, active_rows, step, 0)
        if constrained:
            rows = np.arange(active_rows.size)
            for rejections in itertools.count(1):
                chosen = TopK(
                    *(torch.from_numpy(each[rows, None]) for each in (values, new_tokens))
                )
                rejected = constrained.reject(
                    logits, active_rows.tolist(), states, chosen, step, rows.tolist()
                )
                if not rejected:
                    break
                rows = np.array(rejected)
                new_tokens[rows], values[rows] = choose(
                    logits[rows],
                    None if log_sum_exp is None else log_sum_exp[rows],
                    active_rows[rows],
                    step,
                    rejections,
                )
        is_possible = np.isfinite(values)
        ended = is_possible & (new_tokens == EOS)
        continues = is_possible & ~ended & (max_lengths[active_rows] > step)
        added = ended | continues
        steps.append(_StepTokens(active_rows[added], new_tokens[added], values[added]))
        kept = np.flatnonzero(continues)
        if kept.size:
            state = select_rows(state, kept, active_rows.size)
        if constrained:
            states = [
                constrained.advance(int(active_rows[at]), states[at], int(new_tokens[at]))
                for at in kept
            ]
        active_rows, new_tokens = active_rows[kept], new_tokens[kept]
        step += 1
    tokens, log_probs, lengths = _collect_tokens(len(max_lengths), steps)
    return build_hypotheses(tokens, log_probs if return_scores else None, lengths, penalty)


def _collect_tokens(
    count: int, steps: Sequence[_StepTokens]
) -> tuple[IntArray, FloatArray, IntArray]:
    """Return tokens (B, T), log-probabilities (B, T) and the length of each row (B,)."""
    tokens, log_probs = np.full((count, len(steps)), PAD), np.zeros((count, len(steps)))
    lengths = np.zeros(count, dtype=np.int64)
    for step, (rows, new_tokens, values) in enumerate(steps):
        tokens[rows, step], log_probs[rows, step] = new_tokens, values
        lengths[rows] += 1
    return tokens, log_probs, lengths


def build_hypotheses(
    tokens: IntArray, log_probs: FloatArray | None, lengths: IntArray, penalty: LengthPenalty
) -> list[Hypothesis]:
    """Return a hypothesis for each row of tokens (B, T), with score 0 if there are no log_probs."""
    hypotheses = []
    for row, length in enumerate(lengths.tolist()):
        finished = bool(length > 0 and tokens[row, length - 1] == EOS)
        row_log_probs = [] if log_probs is None else log_probs[row, :length].tolist()
        score = 0.0 if log_probs is None else penalty.score(sum(row_log_probs), length)
        hypotheses.append(
            Hypothesis(tokens[row, : length - finished].tolist(), row_log_probs, score, finished)
        )
    return hypotheses
