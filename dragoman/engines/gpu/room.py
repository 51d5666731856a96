"""Where a search on a GPU keeps what its steps read and write: tensors that stay where they are, whatever the batch.

Recorded launches know addresses. So every batch is laid into the same memory, a sentence after the other with all that belongs to it,
and a smaller batch of the same lengths is a beginning of a larger one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dragoman.decoding.board import Beams
from dragoman.engines.gpu.laid_out import LaidOut, Standing
from dragoman.kernels.beam_attention import reads_only_what_is_seen
from dragoman.text.specials import BOS

STRIDE = 16  # lengths are rounded up to multiples of it: few shapes to record, and rows as the attention kernels like them
_SPARE = 1.5  # times what is needed is reserved: what is recorded is lost when it must grow


def rounded(length: int) -> int:
    """Round a length up to one that is recorded."""
    return -(-length // STRIDE) * STRIDE


def level(count: int) -> int:
    """Round a number of sentences up to one that is recorded: eight to each power of two, at least eight apart."""
    apart = max(8, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // apart) * apart


class Room:
    """Space for the sentences of one batch at a time."""

    def __init__(self, model: LaidOut) -> None:
        self._model = model
        self._flat: dict[str, Tensor] = {}
        self.sentences = self.source = self.places = self.size = 0  # of the batch that is there
        self.grew = False  # since somebody last looked: what was recorded before is worth nothing

    def lay_out(self, *, sentences: int, source: int, places: int, size: int) -> None:
        """Make room for sentences of so many source positions, and of so many target places and beams; nothing is seen yet."""
        self.sentences, self.source, self.places, self.size = sentences, source, places, size
        each = self._model.layers * 2 * self._model.heads * self._model.head_width
        dtype, whole = self._model.dtype, torch.long
        self._reserve("own", sentences * each * places * size, dtype)  # by far the largest
        self._reserve("memory", sentences * each * source, dtype)
        self._reserve("hidden", sentences * source, dtype)
        self._reserve("seen", sentences * size * places * size, dtype).fill_(-torch.inf)
        self._reserve("sentences", sentences, whole)
        self._reserve("tokens", sentences * size, whole).fill_(BOS)
        self._reserve("totals", sentences * size, torch.float64)
        self._reserve("alive", sentences, torch.bool)
        diagonal = self._reserve("diagonal", size * size, dtype).view(size, size)
        diagonal.fill_(-torch.inf).fill_diagonal_(0.0)
        self._reserve("numbers", size, whole).copy_(torch.arange(size))

    def _reserve(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Give the first `count` numbers of a row of them, which is made longer where it is too short."""
        had = self._flat.get(name)
        if had is None or had.numel() < count:
            self._flat[name] = had = torch.empty(0)  # the old one goes before the new one comes
            self._flat[name] = had = self._noughts(count, dtype)
            self.grew = True
        return had[:count]

    def _noughts(self, count: int, dtype: torch.dtype) -> Tensor:
        """Make a row of numbers, with some to spare where there is memory; what a mask hides is multiplied by nought, and must be some."""
        try:
            return torch.zeros(math.ceil(_SPARE * count), dtype=dtype, device=self._model.device)
        except torch.OutOfMemoryError:
            return torch.zeros(count, dtype=dtype, device=self._model.device)

    def forget(self) -> None:
        """Give the memory back."""
        self._flat.clear()
        self.grew = True

    def beams(self, count: int) -> Beams:
        """View the living hypotheses of the first sentences."""
        sentences, alive = self._flat["sentences"][:count], self._flat["alive"][:count]
        tokens, totals = (self._flat[name][: count * self.size].view(count, self.size) for name in ("tokens", "totals"))
        return Beams(sentences, tokens, totals, alive)

    def memory(self, count: int) -> Tensor:
        """View the keys and values of the sources, (N, L, 2, H, S, Dh)."""
        return self._caches("memory", count, self.source)

    def hidden(self, count: int) -> Tensor:
        """View what hides the padding of sources, (N, 1, 1, S)."""
        return self._flat["hidden"][: count * self.source].view(count, 1, 1, self.source)

    def standing(self, count: int, read: int, step: Tensor) -> Standing:
        """View what a step of the first sentences reads, of the first `read` places; the newest slots are marked as seen."""
        seen = self._seen(count)
        seen.index_copy_(2, step.view(1), self._diagonal(count))
        return Standing(
            own=self._caches("own", count, self.places * self.size)[..., : read * self.size, :],
            seen=seen.flatten(2).unsqueeze(1)[..., : read * self.size],
            memory=self.memory(count),
            hidden=self.hidden(count),
            step=step,
            slots=self._flat["numbers"][: self.size] + step * self.size,
            places=self.places,
        )

    def follow(self, count: int, parents: Tensor) -> None:
        """Let each beam (N, K) go on with the past of a beam of its sentence; only the table of what is seen is copied."""
        seen = self.table(count)
        seen.copy_(seen.gather(1, parents.unsqueeze(2).expand_as(seen)))

    def keep(self, order: Tensor, before: int, filled: int) -> None:
        """Move sentences (M,) of those before to the front, with the first places that are filled."""
        count = len(order)
        own, old = (self._caches("own", each, self.places * self.size)[..., : filled * self.size, :] for each in (count, before))
        memory, remembered = self.memory(count), self.memory(before)
        for layer in range(self._model.layers):  # one by one: what is taken lies somewhere else for a moment
            own[:, layer].copy_(old[:, layer].index_select(0, order))
            memory[:, layer].copy_(remembered[:, layer].index_select(0, order))
        for view in (self.hidden, self._seen):
            view(count).copy_(view(before).index_select(0, order))
        for place, new in zip(self.beams(count), self.beams(before).take(order), strict=True):
            place.copy_(new)

    def reach(self, taken: int) -> int:
        """Say how many places a step reads after so many: all where that costs nothing, for then one recording serves every step."""
        width = self._model.head_width
        return self.places if reads_only_what_is_seen(self._flat["own"][:width]) else rounded(taken + 1)

    def table(self, count: int) -> Tensor:
        """View which slots each beam sees, (N, K, slots)."""
        return self._seen(count).flatten(2)

    def _seen(self, count: int) -> Tensor:
        """View which slots are a beam's own past, (N, K, places, K)."""
        return self._flat["seen"][: count * self.size * self.places * self.size].view(count, self.size, self.places, self.size)

    def _diagonal(self, count: int) -> Tensor:
        """View the newest slots, of which each beam sees its own: (N, K, 1, K)."""
        size = self.size
        return self._flat["diagonal"][: size * size].view(1, size, 1, size).expand(count, size, 1, size)

    def _caches(self, name: str, count: int, length: int) -> Tensor:
        """View keys and values of all layers, (N, L, 2, H, length, Dh)."""
        model = self._model
        shape = (count, model.layers, 2, model.heads, length, model.head_width)
        return self._flat[name][: math.prod(shape)].view(shape)
