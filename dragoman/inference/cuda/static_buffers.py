"""Where a search on a GPU keeps what its steps read and write: tensors that stay where they are, whatever the batch.

Recorded launches know addresses. So every batch is laid into the same memory, a sentence after the other with all that belongs to it,
and a smaller batch of the same lengths is a beginning of a larger one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dragoman.decoding.beam_state import ActiveBeams
from dragoman.inference.cuda.cuda_transformer import CudaTransformer, DecodeStepInputs
from dragoman.ops.beam_attention import can_skip_masked_slots
from dragoman.text.special_tokens import BOS

LENGTH_MULTIPLE = 16  # lengths are rounded up to multiples of it: few shapes to record, and rows as the attention kernels like them
_OVERALLOCATION = (
    1.5  # times what is needed is reserved: what is recorded is lost when it must grow
)


def round_length(length: int) -> int:
    """Round a length up to one that is recorded."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def round_batch(count: int) -> int:
    """Round a number of sentences up to one that is recorded: eight to each power of two, at least eight apart."""
    apart = max(8, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // apart) * apart


class StaticBuffers:
    """Space for the sentences of one batch at a time."""

    def __init__(self, model: CudaTransformer) -> None:
        self._model = model
        self._storage: dict[str, Tensor] = {}
        self.sentences = self.source = self.max_steps = self.size = 0  # of the batch that is there
        self.has_grown = (
            False  # since somebody last looked: what was recorded before is worth nothing
        )

    def allocate(self, *, sentences: int, source: int, max_steps: int, size: int) -> None:
        """Make room for sentences of so many source positions, and of so many target places and beams; nothing is seen yet."""
        self.sentences, self.source, self.max_steps, self.size = sentences, source, max_steps, size
        each = self._model.layers * 2 * self._model.heads * self._model.head_width
        dtype, whole = self._model.dtype, torch.long
        self._get_buffer(
            "kv_cache", sentences * each * max_steps * size, dtype
        )  # by far the largest
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
        """Give the first `count` numbers of a row of them, which is made longer where it is too short."""
        storage = self._storage.get(name)
        if storage is None or storage.numel() < count:
            self._storage[name] = storage = torch.empty(
                0
            )  # the old one goes before the new one comes
            self._storage[name] = storage = self._allocate_zeros(count, dtype)
            self.has_grown = True
        return storage[:count]

    def _allocate_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Make a row of numbers, with some to spare where there is memory; what a mask hides is multiplied by nought, and must be some."""
        try:
            return torch.zeros(
                math.ceil(_OVERALLOCATION * count), dtype=dtype, device=self._model.device
            )
        except torch.OutOfMemoryError:
            return torch.zeros(count, dtype=dtype, device=self._model.device)

    def release(self) -> None:
        """Give the memory back."""
        self._storage.clear()
        self.has_grown = True

    def beams(self, count: int) -> ActiveBeams:
        """View the living hypotheses of the first sentences."""
        sentences, alive = self._storage["sentences"][:count], self._storage["alive"][:count]
        tokens, log_prob_sums = (
            self._storage[name][: count * self.size].view(count, self.size)
            for name in ("tokens", "log_prob_sums")
        )
        return ActiveBeams(sentences, tokens, log_prob_sums, alive)

    def memory(self, count: int) -> Tensor:
        """View the keys and values of the sources, (N, L, 2, H, S, Dh)."""
        return self._caches("memory", count, self.source)

    def padding_bias(self, count: int) -> Tensor:
        """View what hides the padding of sources, (N, 1, 1, S)."""
        return self._storage["padding_bias"][: count * self.source].view(count, 1, 1, self.source)

    def step_inputs(self, count: int, num_steps_read: int, step: Tensor) -> DecodeStepInputs:
        """View what a step of the first sentences reads, of the first `read` places; the newest slots are marked as seen."""
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
        """Let each beam (N, K) go on with the past of a beam of its sentence; only the table of what is seen is copied."""
        history_bias = self.flat_history_bias(count)
        history_bias.copy_(history_bias.gather(1, parents.unsqueeze(2).expand_as(history_bias)))

    def compact(self, order: Tensor, before: int, filled: int) -> None:
        """Move sentences (M,) of those before to the front, with the first places that are filled."""
        count = len(order)
        kv_cache, old = (
            self._caches("kv_cache", each, self.max_steps * self.size)[..., : filled * self.size, :]
            for each in (count, before)
        )
        memory, remembered = self.memory(count), self.memory(before)
        for layer in range(
            self._model.layers
        ):  # one by one: what is taken lies somewhere else for a moment
            kv_cache[:, layer].copy_(old[:, layer].index_select(0, order))
            memory[:, layer].copy_(remembered[:, layer].index_select(0, order))
        for view in (self.padding_bias, self._history_bias_view):
            view(count).copy_(view(before).index_select(0, order))
        for place, new in zip(self.beams(count), self.beams(before).take(order), strict=True):
            place.copy_(new)

    def readable_steps(self, num_steps: int) -> int:
        """Say how many places a step reads after so many: all where that costs nothing, for then one recording serves every step."""
        width = self._model.head_width
        return (
            self.max_steps
            if can_skip_masked_slots(self._storage["kv_cache"][:width])
            else round_length(num_steps + 1)
        )

    def flat_history_bias(self, count: int) -> Tensor:
        """View which slots each beam sees, (N, K, slots)."""
        return self._history_bias_view(count).flatten(2)

    def _history_bias_view(self, count: int) -> Tensor:
        """View which slots are a beam's own past, (N, K, places, K)."""
        return self._storage["history_bias"][: count * self.size * self.max_steps * self.size].view(
            count, self.size, self.max_steps, self.size
        )

    def _diagonal(self, count: int) -> Tensor:
        """View the newest slots, of which each beam sees its own: (N, K, 1, K)."""
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
