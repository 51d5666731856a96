"""Strategies that follow one path a row: they differ only in how the next token is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty
from dragoman.decoding.stepping import Candidates, Ints, Rows, Stepper, next_log_probs, restrict, select_rows
from dragoman.text.specials import BOS, EOS

# Given the log-probabilities (N, V), the rows (N,) and the step, choose one token a row: an (N, 1) of candidates.
Choice = Callable[[Tensor, Ints, int], Candidates]


def follow(model: Stepper, state: Any, rows: Rows, *, choose: Choice, penalty: Penalty) -> list[Hypothesis]:
    """Extend every row by the chosen token until its end or its limit; rows that are done leave the batch."""
    count = len(rows.limits)
    tokens: list[list[int]] = [[] for _ in range(count)]
    log_probs: list[list[float]] = [[] for _ in range(count)]
    finished = np.zeros(count, dtype=np.bool_)
    living: Ints = np.arange(count)
    newest: Ints = np.full(count, BOS)
    step = 0
    while living.size:
        scores, state = next_log_probs(model, newest, state)
        scores = restrict(scores, forced=rows.forced(living, step), step=step, at_least=rows.at_least)
        chosen = choose(scores, living, step)
        newest, values = chosen.tokens[:, 0], chosen.log_probs[:, 0]
        possible = np.isfinite(values)
        ended = possible & (newest == EOS)
        goes_on = possible & ~ended & (rows.limits[living] > step)
        for at in np.flatnonzero(ended | goes_on):
            log_probs[living[at]].append(float(values[at]))
        for at in np.flatnonzero(goes_on):
            tokens[living[at]].append(int(newest[at]))
        finished[living[ended]] = True
        kept = np.flatnonzero(goes_on)
        if kept.size:
            state = select_rows(state, kept, living.size)
        living, newest = living[kept], newest[kept]
        step += 1
    return [
        Hypothesis(tokens[row], log_probs[row], penalty.score(sum(log_probs[row]), len(log_probs[row])), bool(finished[row]))
        for row in range(count)
    ]
