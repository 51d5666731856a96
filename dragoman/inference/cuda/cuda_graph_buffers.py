"""Static buffers for CUDA graphs: KV cache, memory and beams at fixed addresses for every batch.

Captured graphs hold addresses, so every batch uses the same memory. Buffers are ordered by
sentence, so a smaller batch of the same lengths is a prefix of a larger one. Reordering beams
reorders only the history bias, not the KV cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dragoman.decoding.beam_step import ActiveBeams
from dragoman.inference.cuda.cuda_transformer import CudaTransformer, DecodeStepInputs
from dragoman.ops.beam_search_step_attention import can_skip_masked_slots
from dragoman.text.special_tokens import BOS

LENGTH_MULTIPLE = 16  # lengths are rounded up: few shapes to capture, aligned for attention kernels
_OVERALLOCATION = 1.5  # graphs are lost when a buffer grows


def round_length(length: int) -> int:
    """Round a length up to a shape that is captured."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def round_batch(count: int) -> int:
    """Round a batch size up to one that is captured: eight per power of two, 8 apart."""
    apart = max(8, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // apart) * apart


class StaticBuffers:
    """Buffers for one batch at a time."""

    def __init__(self, model: CudaTransformer) -> None:
        self._model = model
        self._storage: dict[str, Tensor] = {}
        self.sentences = self.source = self.max_steps = self.size = 0  # of the current batch
        self.has_grown = False  # since it was last reset: captured graphs are then invalid

    def allocate(self, *, sentences: int, source: int, max_steps: int, size: int) -> None:
        """Allocate and reset the buffers for a batch; no beam has a history yet."""
        self.sentences, self.source, self.max_steps, self.size = sentences, source, max_steps, size
        each = self._model.layers * 2 * self._model.heads * self._model.head_width
        dtype, whole = self._model.dtype, torch.long
        self._get_buffer("kv_cache", sentences * each * max_steps * size, dtype)  # the largest
        self._get_buffer("memory", sentences * each * source, dtype)
        self._get_buffer("padding_bias", sentences * source, dtype)
        self._get_buffer("history_bias", sentences * size * max_steps * size, dtype).fill_(
            -torch.inf
        )
        self._get_buffer("sentences", sentences, whole)
        self._get_buffer("tokens", sentences * size, whole).fill_(BOS)
        self._get_buffer("log_prob_sums", sentences * size, torch.float64)
        self._get_buffer("alive", sentences, torch.bool)
        diagonal = self._get_buffer("diagonal", size * size, dtype).view(size, size)
        diagonal.fill_(-torch.inf).fill_diagonal_(0.0)
        self._get_buffer("numbers", size, whole).copy_(torch.arange(size))

    def _get_buffer(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Return the first `count` elements of a buffer, reallocated if it is too small."""
        storage = self._storage.get(name)
        if storage is None or storage.numel() < count:
            self._storage[name] = storage = torch.empty(0)  # free the old one first
            self._storage[name] = storage = self._allocate_zeros(count, dtype)
            self.has_grown = True
        return storage[:count]

    def _allocate_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros, more than needed if they fit: masked values must not be NaN."""
        try:
            return torch.zeros(
                math.ceil(_OVERALLOCATION * count), dtype=dtype, device=self._model.device
            )
        except torch.OutOfMemoryError:
            return torch.zeros(count, dtype=dtype, device=self._model.device)

    def release(self) -> None:
        """Free the memory."""
        self._storage.clear()
        self.has_grown = True

    def beams(self, count: int) -> ActiveBeams:
        """View the active beams of the first sentences."""
        sentences, alive = self._storage["sentences"][:count], self._storage["alive"][:count]
        tokens, log_prob_sums = (
            self._storage[name][: count * self.size].view(count, self.size)
            for name in ("tokens", "log_prob_sums")
        )
        return ActiveBeams(sentences, tokens, log_prob_sums, alive)

    def memory(self, count: int) -> Tensor:
        """View the cross-attention keys and values, (N, L, 2, H, S, Dh)."""
        return self._caches("memory", count, self.source)

    def padding_bias(self, count: int) -> Tensor:
        """View the bias that masks source padding, (N, 1, 1, S)."""
        return self._storage["padding_bias"][: count * self.source].view(count, 1, 1, self.source)

    def step_inputs(self, count: int, num_steps_read: int, step: Tensor) -> DecodeStepInputs:
        """View the inputs of a step; each beam's history bias is opened for its new slot."""
        history_bias = self._history_bias_view(count)
        history_bias.index_copy_(2, step.view(1), self._diagonal(count))
        return DecodeStepInputs(
            kv_cache=self._caches("kv_cache", count, self.max_steps * self.size)[
                ..., : num_steps_read * self.size, :
            ],
            history_bias=history_bias.flatten(2).unsqueeze(1)[..., : num_steps_read * self.size],
            memory=self.memory(count),
            padding_bias=self.padding_bias(count),
            step=step,
            slots=self._storage["numbers"][: self.size] + step * self.size,
            max_steps=self.max_steps,
        )

    def reorder(self, count: int, parents: Tensor) -> None:
        """Reorder beams: each continues its parent (N, K); only `history_bias` is copied."""
        history_bias = self.flat_history_bias(count)
        history_bias.copy_(history_bias.gather(1, parents.unsqueeze(2).expand_as(history_bias)))

    def compact(self, order: Tensor, before: int, filled: int) -> None:
        """Move sentences (M,) to the front, with the first `filled` steps of their KV cache."""
        count = len(order)
        kv_cache, old = (
            self._caches("kv_cache", each, self.max_steps * self.size)[..., : filled * self.size, :]
            for each in (count, before)
        )
        memory, remembered = self.memory(count), self.memory(before)
        for layer in range(self._model.layers):  # one by one: index_select needs a temporary copy
            kv_cache[:, layer].copy_(old[:, layer].index_select(0, order))
            memory[:, layer].copy_(remembered[:, layer].index_select(0, order))
        for view in (self.padding_bias, self._history_bias_view):
            view(count).copy_(view(before).index_select(0, order))
        for buffer, new in zip(self.beams(count), self.beams(before).take(order), strict=True):
            buffer.copy_(new)

    def readable_steps(self, num_steps: int) -> int:
        """Return how many steps of the cache a step reads: all if masked slots cost nothing."""
        width = self._model.head_width
        return (
            self.max_steps
            if can_skip_masked_slots(self._storage["kv_cache"][:width])
            else round_length(num_steps + 1)
        )

    def flat_history_bias(self, count: int) -> Tensor:
        """View the history bias of each beam, (N, K, slots)."""
        return self._history_bias_view(count).flatten(2)

    def _history_bias_view(self, count: int) -> Tensor:
        """View the history bias of each beam, (N, K, steps, K)."""
        return self._storage["history_bias"][: count * self.size * self.max_steps * self.size].view(
            count, self.size, self.max_steps, self.size
        )

    def _diagonal(self, count: int) -> Tensor:
        """View the history bias of a new step, where each beam sees its own slot: (N, K, 1, K)."""
        size = self.size
        return (
            self._storage["diagonal"][: size * size]
            .view(1, size, 1, size)
            .expand(count, size, 1, size)
        )

    def _caches(self, name: str, count: int, length: int) -> Tensor:
        """View keys and values of all layers, (N, L, 2, H, length, Dh)."""
        model = self._model
        shape = (count, model.layers, 2, model.heads, length, model.head_width)
        return self._storage[name][: math.prod(shape)].view(shape)
