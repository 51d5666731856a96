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

from dragoman.inference.cpu.c_structs import CDecodeStep
from dragoman.inference.cpu.shortlist import BatchShortlist

_SENTENCE_FIELDS = ("cache_ids", "source_starts", "lengths", "sentence_ids")
INITIAL_STEPS = 16  # steps that a cache has room for at first


@dataclass(frozen=True, slots=True)
class CppKVCache:
    """N sentences with F beams each, before their next piece. Stepping writes into its caches, so the old one is spent."""

    kv_cache: Tensor  # (layers, caches, 2, slots, I)
    memory: Tensor  # (layers, 2, places, I): all sources behind one another
    cache_ids: NDArray[np.int64]  # (N,) which cache a sentence has
    source_starts: NDArray[np.int64]  # (N,) the place where its source begins
    lengths: NDArray[np.int64]  # (N,)
    past_slots: NDArray[np.int32]  # (N * F, steps): a row's slots
    sentence_ids: NDArray[
        np.int64
    ]  # (N,) a sentence's number among those that the search began with
    shortlist: BatchShortlist | None = None  # where only some pieces may be used
    beams_per_sentence: int = 1
    filled: int = 0  # slots

    @property
    def device(self) -> torch.device:
        """Say where the tensors are."""
        return self.memory.device

    @property
    def steps(self) -> int:
        """Count the pieces so far."""
        return self.past_slots.shape[1]

    def to_c_struct(self, **more: Any) -> CDecodeStep:
        """Say where keys and values are, as the kernels want to know it; the state must live as long as that is used."""
        return CDecodeStep(
            kv_cache=self.kv_cache.data_ptr(),
            memory=self.memory.data_ptr(),
            cache_ids=self.cache_ids.ctypes.data,
            source_starts=self.source_starts.ctypes.data,
            lengths=self.lengths.ctypes.data,
            beams_per_sentence=self.beams_per_sentence,
            cache_count=self.kv_cache.size(1),
            slots=self.kv_cache.size(3),
            source_positions=self.memory.size(2),
            **more,
        )

    def select(self, rows: Tensor) -> CppKVCache:
        """Take rows (M,) in any order, any number of times: each becomes a sentence of its own."""
        row_ids = rows.numpy()
        sentences = row_ids // self.beams_per_sentence
        taken = replace(
            self._select_sentences(sentences),
            past_slots=self.past_slots[row_ids],
            beams_per_sentence=1,
        )
        if np.unique(sentences).size == sentences.size:
            return taken
        kv_cache = self.kv_cache.index_select(
            1, torch.from_numpy(taken.cache_ids)
        )  # two rows must not write into one cache
        return replace(taken, kv_cache=kv_cache, cache_ids=np.arange(sentences.size))

    def reorder(self, rows: Tensor) -> CppKVCache:
        """Take rows (M,) that each go on with a row of the same sentence, M / N for each sentence in turn."""
        return replace(
            self,
            past_slots=self.past_slots[rows.numpy()],
            beams_per_sentence=rows.numel() // len(self.cache_ids),
        )

    def keep(self, sentences: Tensor) -> CppKVCache:
        """Keep all beams of the sentences (M,) and drop the others."""
        kept_ids = sentences.numpy()
        past_slots = self.past_slots.reshape(len(self.cache_ids), self.beams_per_sentence, -1)[
            kept_ids
        ]
        return replace(
            self._select_sentences(kept_ids), past_slots=past_slots.reshape(-1, self.steps)
        )

    def advance(self) -> CppKVCache:
        """Give each row a new slot, with room made where there is none."""
        filled = self.filled + self.beams_per_sentence
        steps = self.steps
        past_slots = np.empty(
            (len(self.past_slots), steps + 1), dtype=np.int32
        )  # by rows, as the kernels read it
        past_slots[:, :steps] = self.past_slots
        past_slots.reshape(-1, self.beams_per_sentence, steps + 1)[:, :, steps] = np.arange(
            self.filled, filled, dtype=np.int32
        )
        state = (
            self
            if filled <= self.kv_cache.size(3)
            else self._grow(
                max(
                    2 * self.kv_cache.size(3), self.filled + INITIAL_STEPS * self.beams_per_sentence
                )
            )
        )
        return replace(state, past_slots=past_slots, filled=filled)

    def reserve_steps(self, steps: int) -> CppKVCache:
        """Make room for so many more steps of single rows, which is not filled yet."""
        filled, slots = self.filled + steps, self.kv_cache.size(3)
        return self if filled <= slots else self._grow(max(2 * slots, filled))

    def _grow(self, slots: int) -> CppKVCache:
        """Copy the caches that are still needed into larger ones."""
        layers, _, both, _, inner = self.kv_cache.shape
        grown = self.kv_cache.new_empty(layers, len(self.cache_ids), both, slots, inner)
        if self.filled:
            kept = self.kv_cache[:, :, :, : self.filled]
            whole = len(self.cache_ids) == self.kv_cache.size(1) and np.array_equal(
                self.cache_ids, np.arange(len(self.cache_ids))
            )
            grown[:, :, :, : self.filled] = (
                kept if whole else kept[:, torch.from_numpy(self.cache_ids)]
            )
        return replace(self, kv_cache=grown, cache_ids=np.arange(len(self.cache_ids)))

    def _select_sentences(self, sentences: NDArray[np.int64]) -> CppKVCache:
        """Take sentences with all that belongs to them but their past."""
        return replace(self, **{each: getattr(self, each)[sentences] for each in _SENTENCE_FIELDS})
