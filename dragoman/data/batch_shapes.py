"""Batch shapes: a small set of padded (source, target) lengths with little padding, and how sentence pairs fill them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Each takes a second to record on a GPU, and with their remainders twice as many are recorded: 64 at most.
MAX_SHAPES = 32
MIN_FILL_DIVISOR = (
    3  # a batch that is less than a third full is not made, where there is another for its pairs
)


class BatchShape(NamedTuple):
    """Padded lengths of source and target, start and end included."""

    src: int
    tgt: int

    def rows(self, batch_tokens: int) -> int:
        """Say how many pairs of this shape a batch holds: the longer side stays within the budget."""
        return max(1, batch_tokens // max(self.src, self.tgt))


class LengthCounts(NamedTuple):
    """The distinct length pairs of a corpus, start and end included, and how often each occurs."""

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
        """Count the length pairs of a corpus, a chunk at a time so that memory does not grow with it."""
        codes, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        for start in range(0, len(src_lengths), chunk):
            src = (
                np.asarray(src_lengths[start : start + chunk], np.int64) + 1
            )  # the end of sentence
            tgt = np.asarray(tgt_lengths[start : start + chunk], np.int64) + 1
            found, times = np.unique(src << 32 | tgt, return_counts=True)
            codes, places = np.unique(np.concatenate([codes, found]), return_inverse=True)
            counts = np.bincount(places, np.concatenate([counts, times]), len(codes)).astype(
                np.int64
            )
        return cls(codes >> 32, codes & 0xFFFFFFFF, counts)

    def bounding_shape(self) -> BatchShape:
        """Give the smallest shape that holds them all."""
        return BatchShape(int(self.src.max()), int(self.tgt.max()))

    def part(self, inside: NDArray[np.bool_]) -> LengthCounts:
        """Take some of them."""
        return LengthCounts(self.src[inside], self.tgt[inside], self.counts[inside])


def assign_shapes(
    shapes: list[BatchShape], src: NDArray[np.int64], tgt: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Number, for each pair of lengths, the smallest of the sorted shapes that holds it; `len(shapes)` where none does."""
    chosen = np.full(len(src), len(shapes), np.int64)
    for number in range(len(shapes) - 1, -1, -1):
        chosen[(src <= shapes[number].src) & (tgt <= shapes[number].tgt)] = number
    return chosen


class ShapeAllocation(NamedTuple):
    """What becomes of a shape's pairs: full batches and perhaps one more, and those that are handed up to a larger shape."""

    batches: int
    handed_up: int
    larger_shape: int  # the number of that shape


def allocate_batches(
    shapes: Sequence[BatchShape], counts: Sequence[int], batch_tokens: int
) -> list[ShapeAllocation]:
    """Say for each of the sorted shapes how many batches its pairs fill.

    Less than a third of a batch at the end of a shape goes into the next larger shape, which costs a little padding and
    saves an update; more stays a batch of its own.
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


MAX_LENGTH_PAIRS = 4096  # pairs of lengths that moves are tried on
STEP_COST_DIVISOR = 25  # besides its slots an update takes as long as one part in so many of a full batch: the optimiser's share, measured on an H200
MANY_BATCHES_PER_SHAPE = 10  # batches a shape, past which remainders no longer weigh
INFINITE_COST = 1 << 62  # the time of an epoch in which a pair has no shape


def choose_shapes(
    lengths: LengthCounts, *, batch_tokens: int, max_shapes: int = MAX_SHAPES
) -> list[BatchShape]:
    """Choose at most `max_shapes` shapes for pairs that fit the budget, smallest first; each fills a third of a batch or more."""
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
    """Round lengths up, if there are too many pairs of them, until few enough are left to try moves on."""
    step = 1
    while True:
        src, tgt = (-(-side // step) * step for side in (lengths.src, lengths.tgt))
        codes, places = np.unique(src << 32 | tgt, return_inverse=True)
        if len(codes) <= MAX_LENGTH_PAIRS or step > 1 << 16:
            break
        step *= 2
    counts = np.bincount(places, lengths.counts, len(codes)).astype(np.int64)
    top = lengths.bounding_shape()
    return LengthCounts(
        np.minimum(codes >> 32, top.src), np.minimum(codes & 0xFFFFFFFF, top.tgt), counts
    )


def _adjust_shapes(
    shapes: list[BatchShape], cell: LengthCounts, batch_tokens: int, rounds: int = 10
) -> list[BatchShape]:
    """Change one side of one shape at a time, as long as the padded slots become fewer."""
    far = (
        4 * int(cell.src.max() + cell.tgt.max()) + 256
    )  # for a pair that a shape does not hold: more than any shape costs
    costs = np.stack([_padding_costs(shape, cell, far) for shape in shapes])  # (shapes, pairs)
    total = int(costs.min(axis=0) @ cell.counts)
    for _ in range(rounds):
        before = total
        for number in range(len(shapes)):
            others = np.delete(costs, number, axis=0).min(axis=0, initial=far)
            steps = [
                step for step in (1, 2, 3, 5, 8, 16, 32) if step <= max(3, max(shapes[number]) // 8)
            ]
            for trial in _neighbor_shapes(shapes[number], batch_tokens, steps):
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
    """Drop a shape, or change one side of it, as long as an epoch as it will be dealt becomes quicker."""
    time, batches = _epoch_cost(shapes, lengths, batch_tokens)
    if batches > MANY_BATCHES_PER_SHAPE * len(shapes):
        return shapes
    for _ in range(rounds):
        before = time
        for shape in list(shapes):
            others = [other for other in shapes if other != shape]
            for trial in (
                others,
                *([*others, near] for near in _neighbor_shapes(shape, batch_tokens, (1,))),
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
    """Say how long an epoch takes, counted in slots, and how many batches it has."""
    shapes = _sort_shapes(shapes)
    src, tgt = np.array(shapes, np.int64).reshape(-1, 2, 1).transpose(1, 0, 2)
    holds = (lengths.src <= src) & (lengths.tgt <= tgt)  # (shapes, pairs)
    if not shapes or not holds.any(axis=0).all():
        return INFINITE_COST, 0
    counts = (
        np.bincount(holds.argmax(axis=0), lengths.counts, len(shapes)).astype(np.int64).tolist()
    )
    sizes = [shape.src + shape.tgt for shape in shapes]
    slots = batches = 0
    for own, size, allocation in zip(
        counts, sizes, allocate_batches(shapes, counts, batch_tokens), strict=True
    ):
        slots += own * size
        batches += allocation.batches
        if allocation.handed_up:
            slots += allocation.handed_up * (sizes[allocation.larger_shape] - size)
    return slots + 2 * batch_tokens * batches // STEP_COST_DIVISOR, batches


def _padding_costs(shape: BatchShape, cell: LengthCounts, far: int) -> NDArray[np.int64]:
    return np.where((cell.src <= shape.src) & (cell.tgt <= shape.tgt), shape.src + shape.tgt, far)


def _neighbor_shapes(
    shape: BatchShape, batch_tokens: int, steps: Sequence[int]
) -> list[BatchShape]:
    """List the shapes of which one side is a step longer or shorter."""
    near = (
        BatchShape(shape.src + src, shape.tgt + tgt)
        for step in steps
        for src, tgt in ((-step, 0), (0, -step), (step, 0), (0, step))
    )
    return [each for each in near if min(each) >= 1 and max(each) <= batch_tokens]


def _best_split(cell: LengthCounts, batch_tokens: int) -> tuple[int, NDArray[np.bool_] | None]:
    """Find the length, of either side, at which a cut saves the most slots and leaves both parts a third of a batch at least."""
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
        slots = np.minimum(
            count * np.maximum(low[0], low[1]), (total - count) * np.maximum(high[0], high[1])
        )
        saved = np.where(MIN_FILL_DIVISOR * slots >= batch_tokens, saved, 0)
        place = int(np.argmax(saved))
        if saved[place] > best:
            best = int(saved[place])
            inside = (cell.src, cell.tgt)[axis] <= sorted_along[cuts[place]]
    return best, inside
