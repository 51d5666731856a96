"""Strategies that follow one path a row: they differ only in how the next token is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty
from dragoman.decoding.stepping import Candidates, Floats, Ints, Rows, Stepper, next_logits, ranks_of, restrict, select_rows
from dragoman.text.specials import BOS, EOS, PAD

# Given logits (N, V) and their normaliser (N, 1), if any, the rows (N,) and the step, choose one token a row: an (N, 1) of candidates.
Choice = Callable[[Tensor, Tensor | None, Ints, int], Candidates]


class _Taken(NamedTuple):
    """What one step added to some rows."""

    rows: Ints
    tokens: Ints
    log_probs: Floats


def follow(model: Stepper, state: Any, rows: Rows, *, choose: Choice, penalty: Penalty, takes_first: bool = False) -> list[Hypothesis]:
    """Extend every row by the chosen token until its end or its limit; rows that are done leave the batch.

    Where no scores are wanted, hypotheses have no log-probabilities and the score nought. `takes_first` says that `choose` always takes
    the largest logit: a model that can go on by itself in that way brings it as its `follow_first`, which may give None.
    """
    count = len(rows.limits)
    if takes_first and not rows.scored and not any(rows.prefixes) and hasattr(model, "follow_first"):
        found = model.follow_first(state, rows.limits, at_least=rows.at_least)
        if found is not None:
            return _hypotheses(found, np.zeros(found.shape), (found >= 0).sum(axis=1), penalty, scored=False)
    taken: list[_Taken] = []
    living: Ints = np.arange(count)
    newest: Ints = np.full(count, BOS)
    ranks = ranks_of(model)
    step = 0
    while living.size:
        logits, state = next_logits(model, newest, state)
        less = ranks.normaliser(logits) if rows.scored else None
        logits = restrict(logits, forced=rows.forced(living, step), step=step, at_least=rows.at_least)
        chosen = choose(logits, less, living, step)
        newest, values = chosen.tokens[:, 0], chosen.log_probs[:, 0]
        possible = np.isfinite(values)
        ended = possible & (newest == EOS)
        goes_on = possible & ~ended & (rows.limits[living] > step)
        added = ended | goes_on
        taken.append(_Taken(living[added], newest[added], values[added]))
        kept = np.flatnonzero(goes_on)
        if kept.size:
            state = select_rows(state, kept, living.size)
        living, newest = living[kept], newest[kept]
        step += 1
    return _hypotheses(*_joined(count, taken), penalty, scored=rows.scored)


def _joined(count: int, taken: Sequence[_Taken]) -> tuple[Ints, Floats, Ints]:
    """Put together what the steps added: tokens and log-probabilities (B, T), of which a row has the first so many (B,)."""
    tokens, log_probs = np.full((count, len(taken)), PAD), np.zeros((count, len(taken)))
    lengths = np.zeros(count, dtype=np.int64)
    for step, (rows, newest, values) in enumerate(taken):
        tokens[rows, step], log_probs[rows, step] = newest, values
        lengths[rows] += 1
    return tokens, log_probs, lengths


def _hypotheses(tokens: Ints, log_probs: Floats, lengths: Ints, penalty: Penalty, *, scored: bool) -> list[Hypothesis]:
    """Make a hypothesis of each row."""
    made = []
    for row, length in enumerate(lengths.tolist()):
        finished = length > 0 and tokens[row, length - 1] == EOS
        numbers = log_probs[row, :length].tolist() if scored else []
        score = penalty.score(sum(numbers), length) if scored else 0.0
        made.append(Hypothesis(tokens[row, : length - finished].tolist(), numbers, score, bool(finished)))
    return made
