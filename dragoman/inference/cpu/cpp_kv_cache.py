"""KV cache of the C++ decoder: keys and values stay in place, beams are reordered by slot indices.

Each sentence has a cache with a slot for every step and beam. `past_slots` lists the slots of each
row, so reordering beams and dropping rows or sentences only selects lists. A cache is copied when
it is full, and then only those still in use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.inference.cpu.c_structs import CDecodeStep
from dragoman.inference.cpu.lexical_shortlist import BatchShortlist

_SENTENCE_FIELDS = ("cache_ids", "source_starts", "lengths", "sentence_ids")
INITIAL_STEPS = 16  # capacity of a new cache, in steps


@dataclass(frozen=True, slots=True)
class CppKVCache:
    """Decoder state of N sentences with F beams each.

    A step writes into its tensors, so the state before a step must not be used after it.
    """

    kv_cache: Tensor  # (layers, caches, 2, slots, I) self-attention
    memory: Tensor  # (layers, 2, source positions, I) cross-attention, sources concatenated
    cache_ids: NDArray[np.int64]  # (N,) cache of each sentence
    source_starts: NDArray[np.int64]  # (N,) first source position of each sentence in `memory`
    lengths: NDArray[np.int64]  # (N,) source lengths
    past_slots: NDArray[np.int32]  # (N * F, steps) slots of each row, oldest first
    sentence_ids: NDArray[np.int64]  # (N,) index of each sentence in the batch at the start
    shortlist: BatchShortlist | None = None  # restricts the output vocabulary
    beams_per_sentence: int = 1
    filled: int = 0  # slots in use

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.memory.device

    @property
    def steps(self) -> int:
        """The number of target tokens so far."""
        return self.past_slots.shape[1]

    def to_c_struct(self, **more: Any) -> CDecodeStep:
        """Return the kernel's arguments for a step; the state must outlive them."""
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
        """Select rows (M,) in any order and with repetition; each becomes a sentence of its own."""
        row_ids = rows.numpy()
        sentences = row_ids // self.beams_per_sentence
        selected = replace(
            self._select_sentences(sentences),
            past_slots=self.past_slots[row_ids],
            beams_per_sentence=1,
        )
        if np.unique(sentences).size == sentences.size:
            return selected
        # Two rows must not write into one cache.
        kv_cache = self.kv_cache.index_select(1, torch.from_numpy(selected.cache_ids))
        return replace(selected, kv_cache=kv_cache, cache_ids=np.arange(sentences.size))

    def reorder(self, rows: Tensor) -> CppKVCache:
        """Reorder beams: row i continues row `rows[i]` (M,) of its sentence, M / N per sentence."""
        return replace(
            self,
            past_slots=self.past_slots[rows.numpy()],
            beams_per_sentence=rows.numel() // len(self.cache_ids),
        )

    def keep(self, sentences: Tensor) -> CppKVCache:
        """Keep all beams of sentences (M,) and drop the others."""
        kept_ids = sentences.numpy()
        past_slots = self.past_slots.reshape(len(self.cache_ids), self.beams_per_sentence, -1)
        return replace(
            self._select_sentences(kept_ids),
            past_slots=past_slots[kept_ids].reshape(-1, self.steps),
        )

    def advance(self) -> CppKVCache:
        """Assign a new slot to each row, in a larger cache if this one is full."""
        filled = self.filled + self.beams_per_sentence
        steps = self.steps
        # Row-major, as the kernels read it.
        past_slots = np.empty((len(self.past_slots), steps + 1), dtype=np.int32)
        past_slots[:, :steps] = self.past_slots
        past_slots.reshape(-1, self.beams_per_sentence, steps + 1)[:, :, steps] = np.arange(
            self.filled, filled, dtype=np.int32
        )
        slots = self.kv_cache.size(3)
        state = self
        if filled > slots:
            state = self._grow(
                max(2 * slots, self.filled + INITIAL_STEPS * self.beams_per_sentence)
            )
        return replace(state, past_slots=past_slots, filled=filled)

    def reserve_steps(self, steps: int) -> CppKVCache:
        """Grow the cache, if needed, to hold `steps` more tokens of single rows."""
        filled, slots = self.filled + steps, self.kv_cache.size(3)
        return self if filled <= slots else self._grow(max(2 * slots, filled))

    def _grow(self, slots: int) -> CppKVCache:
        """Copy the caches in use into larger ones."""
        layers, _, both, _, inner = self.kv_cache.shape
        grown = self.kv_cache.new_empty(layers, len(self.cache_ids), both, slots, inner)
        if self.filled:
            kept = self.kv_cache[:, :, :, : self.filled]
            all_in_use = len(self.cache_ids) == self.kv_cache.size(1) and np.array_equal(
                self.cache_ids, np.arange(len(self.cache_ids))
            )
            grown[:, :, :, : self.filled] = (
                kept if all_in_use else kept[:, torch.from_numpy(self.cache_ids)]
            )
        return replace(self, kv_cache=grown, cache_ids=np.arange(len(self.cache_ids)))

    def _select_sentences(self, sentences: NDArray[np.int64]) -> CppKVCache:
        """Select sentences with their caches and sources, but not their past slots."""
        return replace(self, **{each: getattr(self, each)[sentences] for each in _SENTENCE_FIELDS})
