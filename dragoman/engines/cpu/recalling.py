"""The state of a compiled decoder: where each hypothesis's keys and values were written. They never move, only numbers do.

A sentence has a cache with a slot for each step and beam. `past` lists the slots of each row, so that beams are reordered, rows dropped
and sentences kept by choosing among lists; a cache is copied when it is full, and then only those that are still needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.engines.cpu.shortlist import Short
from dragoman.engines.cpu.structures import Step

_BY_SENTENCE = ("caches", "firsts", "lengths", "numbers")
FIRST = 16  # steps that a cache has room for at first


@dataclass(frozen=True, slots=True)
class Recall:
    """N sentences with F beams each, before their next piece. Stepping writes into its caches, so the old one is spent."""

    own: Tensor  # (layers, caches, 2, slots, I)
    memory: Tensor  # (layers, 2, places, I): all sources behind one another
    caches: NDArray[np.int64]  # (N,) which cache a sentence has
    firsts: NDArray[np.int64]  # (N,) the place where its source begins
    lengths: NDArray[np.int64]  # (N,)
    past: NDArray[np.int32]  # (N * F, steps): a row's slots
    numbers: NDArray[np.int64]  # (N,) a sentence's number among those that the search began with
    short: Short | None = None  # where only some pieces may be used
    fan: int = 1
    filled: int = 0  # slots

    @property
    def device(self) -> torch.device:
        """Say where the tensors are."""
        return self.memory.device

    @property
    def steps(self) -> int:
        """Count the pieces so far."""
        return self.past.shape[1]

    def as_step(self, **more: Any) -> Step:
        """Say where keys and values are, as the kernels want to know it; the state must live as long as that is used."""
        return Step(
            own=self.own.data_ptr(),
            memory=self.memory.data_ptr(),
            caches=self.caches.ctypes.data,
            firsts=self.firsts.ctypes.data,
            lengths=self.lengths.ctypes.data,
            fan=self.fan,
            cache_count=self.own.size(1),
            slots=self.own.size(3),
            places=self.memory.size(2),
            **more,
        )

    def select(self, rows: Tensor) -> Recall:
        """Take rows (M,) in any order, any number of times: each becomes a sentence of its own."""
        numbers = rows.numpy()
        sentences = numbers // self.fan
        taken = replace(self._take(sentences), past=self.past[numbers], fan=1)
        if np.unique(sentences).size == sentences.size:
            return taken
        own = self.own.index_select(1, torch.from_numpy(taken.caches))  # two rows must not write into one cache
        return replace(taken, own=own, caches=np.arange(sentences.size))

    def reorder(self, rows: Tensor) -> Recall:
        """Take rows (M,) that each go on with a row of the same sentence, M / N for each sentence in turn."""
        return replace(self, past=self.past[rows.numpy()], fan=rows.numel() // len(self.caches))

    def keep(self, sentences: Tensor) -> Recall:
        """Keep all beams of the sentences (M,) and drop the others."""
        numbers = sentences.numpy()
        past = self.past.reshape(len(self.caches), self.fan, -1)[numbers]
        return replace(self._take(numbers), past=past.reshape(-1, self.steps))

    def advance(self) -> Recall:
        """Give each row a new slot, with room made where there is none."""
        filled = self.filled + self.fan
        steps = self.steps
        past = np.empty((len(self.past), steps + 1), dtype=np.int32)  # by rows, as the kernels read it
        past[:, :steps] = self.past
        past.reshape(-1, self.fan, steps + 1)[:, :, steps] = np.arange(self.filled, filled, dtype=np.int32)
        state = self if filled <= self.own.size(3) else self._grown(max(2 * self.own.size(3), self.filled + FIRST * self.fan))
        return replace(state, past=past, filled=filled)

    def with_room(self, steps: int) -> Recall:
        """Make room for so many more steps of single rows, which is not filled yet."""
        filled, slots = self.filled + steps, self.own.size(3)
        return self if filled <= slots else self._grown(max(2 * slots, filled))

    def _grown(self, slots: int) -> Recall:
        """Copy the caches that are still needed into larger ones."""
        layers, _, both, _, inner = self.own.shape
        grown = self.own.new_empty(layers, len(self.caches), both, slots, inner)
        if self.filled:
            kept = self.own[:, :, :, : self.filled]
            whole = len(self.caches) == self.own.size(1) and np.array_equal(self.caches, np.arange(len(self.caches)))
            grown[:, :, :, : self.filled] = kept if whole else kept[:, torch.from_numpy(self.caches)]
        return replace(self, own=grown, caches=np.arange(len(self.caches)))

    def _take(self, sentences: NDArray[np.int64]) -> Recall:
        """Take sentences with all that belongs to them but their past."""
        return replace(self, **{each: getattr(self, each)[sentences] for each in _BY_SENTENCE})
