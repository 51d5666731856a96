"""Shapes of batches: rectangles of (source, target) length, and how pairs are dealt to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Each takes a second to record on a GPU, and with their remainders twice as many are recorded: 64 at most.
MAX_SHAPES = 32
LEAST = 3  # a batch that is less than a third full is not made, where there is another for its pairs


class Shape(NamedTuple):
    """Padded lengths of source and target, start and end included."""

    src: int
    tgt: int

    def rows(self, batch_tokens: int) -> int:
        """Say how many pairs of this shape a batch holds: the longer side stays within the budget."""
        return max(1, batch_tokens // max(self.src, self.tgt))


class Lengths(NamedTuple):
    """The distinct length pairs of a corpus, start and end included, and how often each occurs."""

    src: NDArray[np.int64]
    tgt: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, src_lengths: NDArray[np.integer[Any]], tgt_lengths: NDArray[np.integer[Any]], chunk: int = 1 << 22) -> Lengths:
        """Count the length pairs of a corpus, a chunk at a time so that memory does not grow with it."""
        codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start in range(0, len(src_lengths), chunk):
            src = np.asarray(src_lengths[start : start + chunk], np.int64) + 1  # the end of sentence
            tgt = np.asarray(tgt_lengths[start : start + chunk], np.int64) + 1
            found, times = np.unique(src << 32 | tgt, return_counts=True)
            codes, places = np.unique(np.concatenate([codes, found]), return_inverse=True)
            counts = np.bincount(places, np.concatenate([counts, times]), len(codes)).astype(np.int64)
        return cls(codes >> 32, codes & 0xFFFFFFFF, counts)

    def reach(self) -> Shape:
        """Give the smallest shape that holds them all."""
        return Shape(int(self.src.max()), int(self.tgt.max()))

    def part(self, inside: NDArray[np.bool_]) -> Lengths:
        """Take some of them."""
        return Lengths(self.src[inside], self.tgt[inside], self.counts[inside])


def cheapest_shape(shapes: list[Shape], src: NDArray[np.int64], tgt: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number, for each pair of lengths, the smallest of the sorted shapes that holds it; `len(shapes)` where none does."""
    chosen = np.full(len(src), len(shapes), np.int64)
    for number in range(len(shapes) - 1, -1, -1):
        chosen[(src <= shapes[number].src) & (tgt <= shapes[number].tgt)] = number
    return chosen


class Dealt(NamedTuple):
    """What becomes of a shape's pairs: full batches and perhaps one more, and those that are handed up to a larger shape."""

    batches: int
    handed: int
    above: int  # the number of that shape


def deal(shapes: Sequence[Shape], counts: Sequence[int], batch_tokens: int) -> list[Dealt]:
    """Say for each of the sorted shapes how many batches its pairs fill.

    Less than a third of a batch at the end of a shape goes into the next larger shape, which costs a little padding and
    saves an update; more stays a batch of its own.
    """
    pools = list(counts)
    dealt = []
    for number, shape in enumerate(shapes):
        rows = shape.rows(batch_tokens)
        batches, rest = divmod(pools[number], rows)
        above = _next_above(shapes, number) if 0 < LEAST * rest < rows else -1
        if above < 0:
            batches, rest = batches + bool(rest), 0
        else:
            pools[above] += rest
        dealt.append(Dealt(batches, rest, above))
    return dealt


def _next_above(shapes: Sequence[Shape], number: int) -> int:
    shape = shapes[number]
    larger = (j for j in range(number + 1, len(shapes)) if shapes[j].src >= shape.src and shapes[j].tgt >= shape.tgt)
    return next(larger, -1)
