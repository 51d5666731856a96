"""Batch shapes: a small set of padded (source, target) lengths with little padding."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Capturing a CUDA graph takes a second per shape, and remainders double the number: 64 at most.
MAX_SHAPES = 32
# A batch that is less than a third full is merged into another, if there is one.
MIN_FILL_DIVISOR = 3


class BatchShape(NamedTuple):
    """Padded lengths of source and target, BOS and EOS included."""

    src: int
    tgt: int

    def rows(self, batch_tokens: int) -> int:
        """Return how many pairs of this shape a batch holds within the token limit."""
        return max(1, batch_tokens // max(self.src, self.tgt))


class LengthCounts(NamedTuple):
    """The distinct length pairs of a corpus, BOS and EOS included, and their counts."""

    src: NDArray[np.int64]
    tgt: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        src_lengths: NDArray[np.integer[Any]],
        tgt_lengths: NDArray[np.integer[Any]],
        chunk: int = 1 << 22,
    ) -> LengthCounts:
        """Count the length pairs of a corpus in chunks, in bounded memory."""
        codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start in range(0, len(src_lengths), chunk):
            src = np.asarray(src_lengths[start : start + chunk], np.int64) + 1  # EOS
            tgt = np.asarray(tgt_lengths[start : start + chunk], np.int64) + 1
            found, times = np.unique(src << 32 | tgt, return_counts=True)
            codes, inverse = np.unique(np.concatenate([codes, found]), return_inverse=True)
            counts = np.bincount(inverse, np.concatenate([counts, times]), len(codes)).astype(
                np.int64
            )
        return cls(codes >> 32, codes & 0xFFFFFFFF, counts)

    def bounding_shape(self) -> BatchShape:
        """Return the smallest shape that holds them all."""
        return BatchShape(int(self.src.max()), int(self.tgt.max()))

    def part(self, inside: NDArray[np.bool_]) -> LengthCounts:
        """Return a subset."""
        return LengthCounts(self.src[inside], self.tgt[inside], self.counts[inside])


def assign_shapes(
    shapes: list[BatchShape], src: NDArray[np.int64], tgt: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return for each length pair the index of the smallest sorted shape that holds it.

    It is `len(shapes)` where none does.
    """
    chosen = np.full(len(src), len(shapes), np.int64)
    for number in range(len(shapes) - 1, -1, -1):
        chosen[(src <= shapes[number].src) & (tgt <= shapes[number].tgt)] = number
    return chosen


class ShapeAllocation(NamedTuple):
    """Batches of a shape's pairs, and the pairs passed to a larger shape."""

    batches: int
    passed_up: int
    larger_shape: int  # index of that shape


def allocate_batches(
    shapes: Sequence[BatchShape], counts: Sequence[int], batch_tokens: int
) -> list[ShapeAllocation]:
    """Return for each of the sorted shapes how many batches its pairs fill.

    A remainder of less than a third of a batch is passed to the next larger shape, which adds a
    little padding and saves a step; a larger remainder forms a batch.
    """
    pools = list(counts)
    allocation = []
    for number, shape in enumerate(shapes):
        rows = shape.rows(batch_tokens)
        batches, rest = divmod(pools[number], rows)
        larger_shape = _next_larger(shapes, number) if 0 < MIN_FILL_DIVISOR * rest < rows else -1
        if larger_shape < 0:
            batches, rest = batches + bool(rest), 0
        else:
            pools[larger_shape] += rest
        allocation.append(ShapeAllocation(batches, rest, larger_shape))
    return allocation


def _next_larger(shapes: Sequence[BatchShape], number: int) -> int:
    shape = shapes[number]
    larger = (
        j
        for j in range(number + 1, len(shapes))
        if shapes[j].src >= shape.src and shapes[j].tgt >= shape.tgt
    )
    return next(larger, -1)


MAX_LENGTH_PAIRS = 4096  # length pairs that changes of shapes are tried on
# besides its tokens a step costs 1/25 of a full batch, the optimizer's part, measured on an H200
STEP_COST_DIVISOR = 25
MANY_BATCHES_PER_SHAPE = 10  # batches per shape above which remainders no longer matter
INFINITE_COST = 1 << 62  # cost of an epoch in which a pair has no shape


def choose_shapes(
    lengths: LengthCounts, *, batch_tokens: int, max_shapes: int = MAX_SHAPES
) -> list[BatchShape]:
    """Return at most `max_shapes` shapes for pairs within the token limit, smallest first.

    Each shape fills at least a third of a batch.
    """
    fits = np.maximum(lengths.src, lengths.tgt) <= batch_tokens
    if not fits.any():
        return []
    fitting = lengths.part(fits)
    leaves: list[BatchShape] = []
    heap: list[tuple[float, int, LengthCounts, tuple[NDArray[np.bool_], NDArray[np.bool_]]]] = []
    made = 0

    def offer(cell: LengthCounts) -> None:
        nonlocal made
        made += 1
        saved, inside = _best_split(cell, batch_tokens)
        if inside is None:
            leaves.append(cell.bounding_shape())
        else:
            heapq.heappush(heap, (-saved, made, cell, (inside, ~inside)))

    offer(fitting)
    while heap and len(leaves) + len(heap) < max_shapes:
        _, _, cell, parts = heapq.heappop(heap)
        for inside in parts:
            offer(cell.part(inside))
    leaves.extend(cell.bounding_shape() for _, _, cell, _ in heap)
    shapes = _adjust_shapes(list(set(leaves)), _round_lengths(fitting), batch_tokens)
    if len(fitting.src) <= MAX_LENGTH_PAIRS:
        shapes = _adjust_for_epoch(shapes, fitting, batch_tokens)
    return _sort_shapes(shapes)


def _sort_shapes(shapes: list[BatchShape]) -> list[BatchShape]:
    return sorted(set(shapes), key=lambda shape: (shape.src + shape.tgt, shape))


def _round_lengths(lengths: LengthCounts) -> LengthCounts:
    """Round lengths up until few enough length pairs are left to try changes on."""
    step = 1
    while True:
        src, tgt = (-(-side // step) * step for side in (lengths.src, lengths.tgt))
        codes, inverse = np.unique(src << 32 | tgt, return_inverse=True)
        if len(codes) <= MAX_LENGTH_PAIRS or step > 1 << 16:
            break
        step *= 2
    counts = np.bincount(inverse, lengths.counts, len(codes)).astype(np.int64)
    top = lengths.bounding_shape()
    return LengthCounts(
        np.minimum(codes >> 32, top.src), np.minimum(codes & 0xFFFFFFFF, top.tgt), counts
    )


def _adjust_shapes(
    shapes: list[BatchShape], cell: LengthCounts, batch_tokens: int, rounds: int = 10
) -> list[BatchShape]:
    """Change one side of one shape at a time as long as the number of padded tokens falls."""
    # Cost of a pair that a shape does not hold: more than any shape's.
    far = 4 * int(cell.src.max() + cell.tgt.max()) + 256
    costs = np.stack([_padding_costs(shape, cell, far) for shape in shapes])  # (shapes, pairs)
    total = int(costs.min(axis=0) @ cell.counts)
    for _ in range(rounds):
        before = total
        for number in range(len(shapes)):
            others = np.delete(costs, number, axis=0).min(axis=0, initial=far)
            steps = [
                step for step in (1, 2, 3, 5, 8, 16, 32) if step <= max(3, max(shapes[number]) // 8)
            ]
            for trial in _adjacent_shapes(shapes[number], batch_tokens, steps):
                trial_costs = _padding_costs(trial, cell, far)
                best = np.minimum(others, trial_costs)
                trial_total = int(best @ cell.counts)
                if trial_total < total and int(best.max()) < far:
                    shapes[number], costs[number], total = trial, trial_costs, trial_total
        if before - total <= before // 10_000:
            break
    return shapes


def _adjust_for_epoch(
    shapes: list[BatchShape], lengths: LengthCounts, batch_tokens: int, rounds: int = 10
) -> list[BatchShape]:
    """Drop a shape or change one side of it as long as the cost of an epoch falls."""
    time, batches = _epoch_cost(shapes, lengths, batch_tokens)
    if batches > MANY_BATCHES_PER_SHAPE * len(shapes):
        return shapes
    for _ in range(rounds):
        before = time
        for shape in list(shapes):
            others = [other for other in shapes if other != shape]
            for trial in (
                others,
                *([*others, near] for near in _adjacent_shapes(shape, batch_tokens, (1,))),
            ):
                trial_time, _ = _epoch_cost(trial, lengths, batch_tokens)
                if trial_time < time:
                    shapes, time = trial, trial_time
        if before - time <= before // 1000:
            break
    return shapes


def _epoch_cost(
    shapes: list[BatchShape], lengths: LengthCounts, batch_tokens: int
) -> tuple[int, int]:
    """Return the cost of an epoch in padded tokens, and its number of batches."""
    shapes = _sort_shapes(shapes)
    src, tgt = np.array(shapes, np.int64).reshape(-1, 2, 1).transpose(1, 0, 2)
    holds = (lengths.src <= src) & (lengths.tgt <= tgt)  # (shapes, pairs)
    if not shapes or not holds.any(axis=0).all():
        return INFINITE_COST, 0
    counts = (
        np.bincount(holds.argmax(axis=0), lengths.counts, len(shapes)).astype(np.int64).tolist()
    )
    sizes = [shape.src + shape.tgt for shape in shapes]
    padded_tokens = batches = 0
    for own, size, allocation in zip(
        counts, sizes, allocate_batches(shapes, counts, batch_tokens), strict=True
    ):
        padded_tokens += own * size
        batches += allocation.batches
        if allocation.passed_up:
            padded_tokens += allocation.passed_up * (sizes[allocation.larger_shape] - size)
    return padded_tokens + 2 * batch_tokens * batches // STEP_COST_DIVISOR, batches


def _padding_costs(shape: BatchShape, cell: LengthCounts, far: int) -> NDArray[np.int64]:
    return np.where((cell.src <= shape.src) & (cell.tgt <= shape.tgt), shape.src + shape.tgt, far)


def _adjacent_shapes(
    shape: BatchShape, batch_tokens: int, steps: Sequence[int]
) -> list[BatchShape]:
    """Return the shapes with one side a step longer or shorter."""
    near = (
        BatchShape(shape.src + src, shape.tgt + tgt)
        for step in steps
        for src, tgt in ((-step, 0), (0, -step), (step, 0), (0, step))
    )
    return [each for each in near if min(each) >= 1 and max(each) <= batch_tokens]


def _best_split(cell: LengthCounts, batch_tokens: int) -> tuple[int, NDArray[np.bool_] | None]:
    """Return the length, of either side, whose split saves the most padded tokens.

    Both parts must fill at least a third of a batch.
    """
    whole = cell.bounding_shape()
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
        low, high = (
            (sorted_along[cuts], reach_low[cuts]),
            (int(sorted_along[-1]), reach_high[cuts + 1]),
        )
        count = below[cuts]
        saved = (
            total * (whole.src + whole.tgt)
            - count * (low[0] + low[1])
            - (total - count) * (high[0] + high[1])
        )
        padded_tokens = np.minimum(
            count * np.maximum(low[0], low[1]), (total - count) * np.maximum(high[0], high[1])
        )
        saved = np.where(MIN_FILL_DIVISOR * padded_tokens >= batch_tokens, saved, 0)
        index = int(np.argmax(saved))
        if saved[index] > best:
            best = int(saved[index])
            inside = (cell.src, cell.tgt)[axis] <= sorted_along[cuts[index]]
    return best, inside
