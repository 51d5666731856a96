"""Constraints applied to the logits: tokens that leave no completion get a logit of -inf.

`ConstrainedRows` serves every search strategy. The allowed tokens come from `TokenConstraints`:
constraints on the text, compiled by `constraint_automaton.py`, or `no_repeat_ngram.py`. A forced
prefix of the target and the minimum length are enforced by `mask_invalid_tokens` in
`search_interface.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.search_interface import TokenConstraints
from dragoman.ops.topk import TopK


class ConstrainedRows:
    """The constraints of sentences, applied to rows that are each in a state of its sentence's.

    A row without a state (None) is not constrained: its result is not used.
    """

    def __init__(self, constraints: Sequence[TokenConstraints], max_lengths: Sequence[int]) -> None:
        self._constraints, self._max_lengths = constraints, max_lengths
        self.needs_check = any(each.needs_check for each in self._constraints)
        self.reason = self._constraints[0].reason

    def start(self, sentence: int) -> Any:
        """Return the state before the first token."""
        return self._constraints[sentence].start()

    def advance(self, sentence: int, state: Any, token: int) -> Any:
        """Return the state after a token."""
        return self._constraints[sentence].advance(state, token)

    def mask(
        self,
        logits: Tensor,
        sentences: Sequence[int],
        states: Sequence[Any | None],
        step: int,
    ) -> Tensor:
        """Set the logits (N, V) of tokens that leave no completion to -inf, in place."""
        allowed = np.ones(logits.shape, dtype=bool)
        for row, (sentence, state) in enumerate(zip(sentences, states, strict=True)):
            if state is not None:
                remaining = self._max_lengths[sentence] - step
                allowed[row] = self._constraints[sentence].allowed(state, remaining)
        return logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def reject(
        self,
        logits: Tensor,
        sentences: Sequence[int],
        states: Sequence[Any | None],
        candidates: TopK,
        step: int,
        rows: Sequence[int] | None = None,
    ) -> list[int]:
        """Set logits of candidates (R, C) without a completion to -inf; return their rows.

        The candidates are those of some rows, by default of all. Only those that a search would
        take are checked: completing a line under Mirror and NoCopy takes a search of its own.
        """
        if not self.needs_check:
            return []
        at, rejected = list[int](), list[int]()
        given = zip(
            range(len(states)) if rows is None else rows,
            candidates.ids.tolist(),
            candidates.values.isfinite().tolist(),
            strict=True,
        )
        for row, tokens, is_finite in given:
            state, sentence = states[row], sentences[row]
            if state is None:
                continue
            constraints, remaining = self._constraints[sentence], self._max_lengths[sentence] - step
            for token, finite in zip(tokens, is_finite, strict=True):
                if finite and not constraints.can_complete(state, token, remaining):
                    at.append(row)
                    rejected.append(token)
        logits[at, rejected] = -torch.inf
        return sorted(set(at))
