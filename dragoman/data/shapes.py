"""A small set of batch shapes that wastes little: rectangles of (source, target) length, found by splitting.

Padding is wasted work, and every new shape costs a compiled graph or a cold cache; so lengths are rounded up to a few shapes, chosen
once from the corpus's lengths. Starting from one rectangle around all pairs, the split that saves the most padded
slots is made, on either side's length, until the shapes are used up; then each shape is moved a little while that helps.
On Multi30k with 24 shapes this pads 6.7 % (7.8 % before the moving). Pairs sorted by target length and then source
length, cut into 24 runs, pad 26.7 %, and 6.9 % with 200 runs: the two lengths of a pair agree only loosely, and a
run has to cover the longest source in it.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_SHAPES = 24


class Shape(NamedTuple):
    """Padded lengths of source and target, start and end included."""

    src: int
    tgt: int

    def rows(self, batch_tokens: int) -> int:
        """Say how many pairs of this shape a batch holds: the longer side stays within the budget."""
        return max(1, batch_tokens // max(self.src, self.tgt))


class _Cell(NamedTuple):
    """A set of distinct length pairs with how often each occurs."""

    src: NDArray[np.int64]
    tgt: NDArray[np.int64]
    counts: NDArray[np.int64]

    def shape(self) -> Shape:
        return Shape(int(self.src.max()), int(self.tgt.max()))

    def part(self, inside: NDArray[np.bool_]) -> _Cell:
        return _Cell(self.src[inside], self.tgt[inside], self.counts[inside])


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


def choose_shapes(lengths: Lengths, *, batch_tokens: int, max_shapes: int = MAX_SHAPES) -> list[Shape]:
    """Choose at most `max_shapes` shapes for pairs that fit the budget, smallest first; each fills a batch or more."""
    fits = np.maximum(lengths.src, lengths.tgt) <= batch_tokens
    if not fits.any():
        return []
    leaves: list[Shape] = []
    heap: list[tuple[float, int, _Cell, tuple[NDArray[np.bool_], NDArray[np.bool_]]]] = []
    made = 0

    def offer(cell: _Cell) -> None:
        nonlocal made
        made += 1
        saved, inside = _best_split(cell, batch_tokens)
        if inside is None:
            leaves.append(cell.shape())
        else:
            heapq.heappush(heap, (-saved, made, cell, (inside, ~inside)))

    offer(_Cell(lengths.src[fits], lengths.tgt[fits], lengths.counts[fits]))
    while heap and len(leaves) + len(heap) < max_shapes:
        _, _, cell, parts = heapq.heappop(heap)
        for inside in parts:
            offer(cell.part(inside))
    leaves.extend(cell.shape() for _, _, cell, _ in heap)
    moved = _moved(list(set(leaves)), _coarse(lengths, fits), batch_tokens)
    return sorted(set(moved), key=lambda shape: (shape.src + shape.tgt, shape))


def cheapest_shape(shapes: list[Shape], src: NDArray[np.int64], tgt: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number, for each pair of lengths, the smallest of the sorted shapes that holds it; `len(shapes)` where none does."""
    chosen = np.full(len(src), len(shapes), np.int64)
    for number in range(len(shapes) - 1, -1, -1):
        chosen[(src <= shapes[number].src) & (tgt <= shapes[number].tgt)] = number
    return chosen


def _coarse(lengths: Lengths, fits: NDArray[np.bool_], limit: int = 4096) -> _Cell:
    """Round lengths up, if there are too many pairs of them, until few enough are left to try moves on."""
    step = 1
    while True:
        src, tgt = (-(-side[fits] // step) * step for side in (lengths.src, lengths.tgt))
        codes, places = np.unique(src << 32 | tgt, return_inverse=True)
        if len(codes) <= limit or step > 1 << 16:
            break
        step *= 2
    counts = np.bincount(places, lengths.counts[fits], len(codes)).astype(np.int64)
    top = Shape(int(lengths.src[fits].max()), int(lengths.tgt[fits].max()))
    return _Cell(np.minimum(codes >> 32, top.src), np.minimum(codes & 0xFFFFFFFF, top.tgt), counts)


def _moved(shapes: list[Shape], cell: _Cell, batch_tokens: int, rounds: int = 10) -> list[Shape]:
    """Change one side of one shape at a time, as long as the padded slots become fewer."""
    far = 4 * int(cell.src.max() + cell.tgt.max()) + 256  # for a pair that a shape does not hold: more than any shape costs
    costs = np.stack([_costs(shape, cell, far) for shape in shapes])  # (shapes, pairs)
    total = int(costs.min(axis=0) @ cell.counts)
    for _ in range(rounds):
        before = total
        for number in range(len(shapes)):
            others = np.delete(costs, number, axis=0).min(axis=0, initial=far)
            for step in _steps(shapes[number]):
                trial = Shape(shapes[number].src + step.src, shapes[number].tgt + step.tgt)
                if min(trial) < 1 or max(trial) > batch_tokens:
                    continue
                trial_costs = _costs(trial, cell, far)
                best = np.minimum(others, trial_costs)
                trial_total = int(best @ cell.counts)
                if trial_total < total and int(best.max()) < far:
                    shapes[number], costs[number], total = trial, trial_costs, trial_total
        if before - total <= before // 10_000:
            break
    return shapes


def _costs(shape: Shape, cell: _Cell, far: int) -> NDArray[np.int64]:
    return np.where((cell.src <= shape.src) & (cell.tgt <= shape.tgt), shape.src + shape.tgt, far)


def _steps(shape: Shape) -> list[Shape]:
    sizes = [size for size in (1, 2, 3, 5, 8, 16, 32) if size <= max(3, max(shape) // 8)]
    return [Shape(*step) for size in sizes for step in ((-size, 0), (0, -size), (size, 0), (0, size))]


def _best_split(cell: _Cell, batch_tokens: int) -> tuple[int, NDArray[np.bool_] | None]:
    """Find the length, of either side, at which a cut saves the most slots and leaves both parts a batch at least."""
    whole = cell.shape()
    total = int(cell.counts.sum())
    best, inside = 0, None
    for axis, (along, across) in enumerate(((cell.src, cell.tgt), (cell.tgt, cell.src))):
        order = np.argsort(along, kind="stable")
        sorted_along = along[order]
        below = np.cumsum(cell.counts[order])
        reach_low = np.maximum.accumulate(across[order])
        reach_high = np.maximum.accumulate(across[order][::-1])[::-1]
        cuts = np.flatnonzero(sorted_along[1:] > sorted_along[:-1])
        if not len(cuts):
            continue
        low, high = (sorted_along[cuts], reach_low[cuts]), (int(sorted_along[-1]), reach_high[cuts + 1])
        count = below[cuts]
        saved = total * (whole.src + whole.tgt) - count * (low[0] + low[1]) - (total - count) * (high[0] + high[1])
        filled = (count * np.maximum(low[0], low[1]) >= batch_tokens) & ((total - count) * np.maximum(high[0], high[1]) >= batch_tokens)
        saved = np.where(filled, saved, 0)
        place = int(np.argmax(saved))
        if saved[place] > best:
            best = int(saved[place])
            inside = (cell.src, cell.tgt)[axis] <= sorted_along[cuts[place]]
    return best, inside
