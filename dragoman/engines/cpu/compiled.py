"""A Transformer that runs in kernels compiled for this machine: the verbs of a frozen one, each of them a single call.

While a call computes, Python's other threads go on; and no row's numbers depend on its neighbours, to the last bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.decoding.largest import Largest
from dragoman.decoding.stepping import Ranks, not_finite
from dragoman.engines.cpu.laying import Laid
from dragoman.engines.cpu.products import Range
from dragoman.engines.cpu.recalling import Recall
from dragoman.engines.cpu.shortlist import Short
from dragoman.engines.cpu.structures import Step
from dragoman.engines.cpu.walking import Walker
from dragoman.models.encoder_decoder import EncoderDecoder

READ_TOGETHER = 512  # source positions that go through the encoder at once: what a layer widens should stay near the processor
_NOT_FINITE = -2  # what kernels give back where int8 met NaN or infinity, which rounding would hide


class Sources(NamedTuple):
    """Encoded sources, one behind another: nothing is padded."""

    values: Tensor  # (places, D)
    lengths: NDArray[np.int64]  # (N,)
    short: Short | None = None  # where only some pieces may be used


class CompiledRanks(Ranks):
    """The largest of a row, and what makes log-probabilities of it, each in one pass."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels

    def first(self, logits: Tensor) -> Largest:
        """Find the largest of each row, the first of equal ones, NaN above all: (N,) each."""
        return self._into(logits, 1, torch.empty(logits.size(0)), torch.empty(logits.size(0), dtype=torch.long))

    def best(self, logits: Tensor, count: int) -> Largest:
        """Find the `count` largest of each row, in falling order, of equal ones the first: (N, count) each."""
        return self._into(logits, count, torch.empty(logits.size(0), count), torch.empty(logits.size(0), count, dtype=torch.long))

    def _into(self, logits: Tensor, count: int, values: Tensor, ids: Tensor) -> Largest:
        logits, (rows, width) = logits.contiguous(), logits.shape
        self._kernels.dragoman_largest(logits.data_ptr(), rows, width, count, values.data_ptr(), ids.data_ptr())
        return Largest(values, ids)

    def normaliser(self, logits: Tensor) -> Tensor:
        """Give what is to be taken from logits to make log-probabilities: (N, 1)."""
        logits, (rows, width) = logits.contiguous(), logits.shape
        found = torch.empty(rows, 1)
        self._kernels.dragoman_normaliser(logits.data_ptr(), rows, width, found.data_ptr())
        return found


class Compiled:
    """What a model computes, from copies of its weights; `seen` are the ranges of its products' inputs, for int8."""

    def __init__(self, model: EncoderDecoder, kernels: ctypes.CDLL, seen: Iterator[Range] | None = None) -> None:
        self._kernels, self._laid = kernels, Laid(model, seen, panel=kernels.dragoman_panel())
        self._src, self._tgt = model._embedding("src"), model._embedding("tgt")
        self._src_entrance, self._places = model.src_entrance, model.tgt_entrance.positions
        self.ranks = CompiledRanks(kernels)
        self._model = ctypes.byref(self._laid.model)
        self.walker = Walker(kernels, self._laid, self._places, screens=seen is None)

    def encode(self, src: Tensor, mask: Tensor | None = None) -> Sources:
        """Read sources (B, S), real where `mask` (B, S) is True."""
        placed = self._src_entrance(self._src(src)).float()
        values = (placed.flatten(0, 1) if mask is None else placed[mask]).contiguous()
        lengths = np.full(len(src), src.size(1)) if mask is None else mask.sum(dim=1).numpy()
        ends = np.cumsum(lengths)
        for first, last in _parts(lengths):
            begin = ends[first] - lengths[first]
            within = ends[first:last] - begin
            if self._kernels.dragoman_read(self._model, values[begin:].data_ptr(), within.ctypes.data, last - first) < 0:
                raise not_finite(0)
        return Sources(values, lengths)

    def shortened(self, memory: Sources, allowed: Sequence[NDArray[np.int64]]) -> Sources:
        """Let each sentence use only some pieces (U,), its own: all of them together are scored, and no row sees another's."""
        ids = np.concatenate(allowed)
        any_ = np.zeros(self._laid.pieces, dtype=np.bool_)
        any_[ids] = True
        some = self._laid.some_pieces(torch.from_numpy(np.flatnonzero(any_)))
        ends = np.cumsum([0, *map(len, allowed)])
        return memory._replace(short=Short(some, ids, (np.cumsum(any_) - 1)[ids], ends))

    def start(self, memory: Sources) -> Recall:
        """Stand before the first target position of every row."""
        laid, (values, lengths, short) = self._laid, memory
        places, count = values.size(0), len(lengths)
        made = torch.empty(laid.layers, 2, places, laid.inner, dtype=laid.cells)
        for first in range(0, places, READ_TOGETHER):
            rows = min(READ_TOGETHER, places - first)
            if self._kernels.dragoman_prepare(self._model, values[first:].data_ptr(), first, rows, made.data_ptr(), places) < 0:
                raise not_finite(0)
        own = torch.empty(laid.layers, count, 2, 0, laid.inner, dtype=laid.cells)
        past, all_ = np.empty((count, 0), dtype=np.int32), np.arange(count)
        return Recall(own, made, all_, np.cumsum(lengths) - lengths, lengths, past, all_, short)

    def step(self, tokens: Tensor, state: Recall) -> tuple[Tensor, Recall]:
        """Take one more token a row, (N * F,), and score what comes next."""
        state, asked, _held = self._asked(tokens, state)
        short, shape = state.short, (tokens.size(0), self._laid.pieces)
        logits = torch.empty(shape) if short is None else torch.full(shape, -torch.inf)
        asked.logits = logits.data_ptr()
        if short is not None:
            asked.some, asked.numbers = ctypes.addressof(short.some.product), state.numbers.ctypes.data
            asked.ids, asked.columns, asked.list_ends = (each.ctypes.data for each in (short.ids, short.columns, short.ends))
        done = self._kernels.dragoman_step(self._model, ctypes.byref(asked))
        if done == _NOT_FINITE:
            raise not_finite(state.steps - 1)
        if done < 0:
            raise IndexError(f"a piece must be one of the {self._laid.pieces} of the target vocabulary")
        return logits, state

    def follow_first(self, state: Recall, limits: NDArray[np.int64], *, at_least: int) -> NDArray[np.int64] | None:
        """Go on from a fresh state by the largest logit each time, which is to the last bit that of `step`: (N, T), -1 past a row's last.

        Special pieces are left out, but for the end. None for what only `step` can do.
        """
        return self.walker.follow(state, limits, at_least=at_least).tokens if self.walker.can(state) else None

    def _asked(self, tokens: Tensor, state: Recall) -> tuple[Recall, Step, Any]:
        """Say what is asked of the kernels: the state after the step, the step, and what must live as long as that."""
        place = state.steps
        state = state.advance()
        asked = state.as_step(past=state.past.ctypes.data, past_room=state.steps, steps=state.steps, rows=tokens.size(0))
        if self._laid.model.table is None:
            stream = self._entered(tokens, place)
            asked.stream = stream.data_ptr()
            return state, asked, stream
        tokens, added = tokens.contiguous(), self._places.vectors(place, 1)
        asked.tokens = tokens.data_ptr()
        if added is not None:
            added = added.float().contiguous()
            asked.place = added.data_ptr()
        return state, asked, (tokens, added)

    def _entered(self, tokens: Tensor, place: int) -> Tensor:
        """Embed tokens (N,) that all stand at one place, where that takes more than a table: (N, D)."""
        embedded, added = self._tgt.forward(tokens), self._places.vectors(place, 1)
        return (embedded if added is None else (embedded + added).to(embedded.dtype)).float().contiguous()


def _parts(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut sentences into runs of few positions: (first, last), the last not within."""
    first, held = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if held and held + length > READ_TOGETHER:
            yield first, number
            first, held = number, 0
        held += length
    yield first, len(lengths)
