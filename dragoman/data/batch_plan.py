"""Batch order: which sentence pairs form which micro-batch, a pure function of (seed, epoch).

Every pair occurs once per epoch. Pairs are shuffled, assigned to the smallest batch shape that
holds them, and fill its batches, up to `train.batch_tokens` tokens (`BatchShape.rows` in
`bucket_shapes.py`); the batches are shuffled in turn. A corpus of more than 4 million
pairs is planned in windows of that size, made of shuffled blocks: planning needs bounded memory,
and a resumed run plans only the window it is in.

A `Cursor` is the position that a checkpoint stores; `plan_step` returns the micro-batches of the
next training step and the cursor after them, so a resumed run continues where it stopped.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dragoman.data.bucket_shapes import (
    MAX_SHAPES,
    BatchShape,
    LengthCounts,
    ShapeAllocation,
    allocate_batches,
    assign_shapes,
    choose_shapes,
)
from dragoman.errors import DataError
from dragoman.runtime.counter_rng import derive_key, permutation, splitmix64_outputs

BLOCK_PAIRS = 1 << 16  # pairs that stay together when blocks are shuffled
WINDOW_BLOCKS = 64  # blocks planned together


class Cursor(NamedTuple):
    """Position of the next micro-batch: its epoch and its index in it, both from 0."""

    epoch: int
    batch: int


class Plan(Protocol):
    """An assignment of examples to the micro-batches of each epoch."""

    @property
    def examples(self) -> int:
        """The number of examples per epoch."""
        ...

    def batches(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch."""
        ...

    def batch(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return the examples of one micro-batch."""
        ...

    def padding_fraction(self, epoch: int) -> float:
        """Return the fraction of padding tokens in an epoch."""
        ...


class BatchPlan:
    """Plans the micro-batches of every epoch from the lengths in tokens, without BOS and EOS.

    `batch_tokens` limits the padded tokens of the longer side (`BatchShape.rows` in
    bucket_shapes.py); a longer pair forms its own batch.
    """

    def __init__(
        self,
        src_lengths: NDArray[np.integer[Any]],
        tgt_lengths: NDArray[np.integer[Any]],
        *,
        batch_tokens: int,
        seed: int,
        max_shapes: int = MAX_SHAPES,
        block: int = BLOCK_PAIRS,
        window: int = WINDOW_BLOCKS,
    ) -> None:
        if len(src_lengths) != len(tgt_lengths) or not len(src_lengths):
            found = f"{len(src_lengths)} and {len(tgt_lengths)} lengths"
            raise DataError(
                "a batch plan needs both lengths of each pair", found=found, fix="check the corpus"
            )
        self.batch_tokens, self.seed = batch_tokens, seed
        self._src_lengths, self._tgt_lengths = src_lengths, tgt_lengths
        self._block, self._window = block, window
        self.shapes = choose_shapes(
            LengthCounts.of(src_lengths, tgt_lengths),
            batch_tokens=batch_tokens,
            max_shapes=max_shapes,
        )
        self._rows = [shape.rows(batch_tokens) for shape in self.shapes]
        starts = range(0, len(src_lengths), block)
        # Blocks move whole, so the number of batches of a window is known without planning it.
        self._counts = np.stack(
            [
                self._count(np.arange(start, min(start + block, len(src_lengths))))
                for start in starts
            ]
        )
        self._planned_batches: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
        self._cached_window_sizes: dict[int, list[int]] = {}  # of the last epoch used

    @property
    def examples(self) -> int:
        """The number of pairs per epoch."""
        return len(self._src_lengths)

    def batches(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch."""
        return sum(self._window_sizes(epoch))

    def epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return an epoch's micro-batches as arrays of pair indices; each pair is in one."""
        return [
            batch
            for window in range(len(self._window_sizes(epoch)))
            for batch in self._plan(epoch, window)
        ]

    def batch(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return one micro-batch, planning no more than its window."""
        index = cursor.batch
        for window, size in enumerate(self._window_sizes(cursor.epoch)):
            if index < size:
                if (cursor.epoch, window) not in self._planned_batches:
                    self._planned_batches = {
                        (cursor.epoch, window): self._plan(cursor.epoch, window)
                    }
                return self._planned_batches[cursor.epoch, window][index]
            index -= size
        raise IndexError(
            f"epoch {cursor.epoch} has {self.batches(cursor.epoch)} batches; found number "
            f"{cursor.batch}"
        )

    def shape(self, batch: NDArray[np.int64]) -> BatchShape:
        """Return the lengths that a batch is padded to, BOS and EOS included."""
        src, tgt = int(self._src_lengths[batch].max()) + 1, int(self._tgt_lengths[batch].max()) + 1
        return smallest_fitting_shape(self.shapes, src, tgt)

    def padding_fraction(self, epoch: int) -> float:
        """Return the fraction of padding tokens in an epoch, over both sides."""
        real = (
            int(self._src_lengths.sum(dtype=np.int64) + self._tgt_lengths.sum(dtype=np.int64))
            + 2 * self.examples
        )
        return 1.0 - real / sum(len(batch) * sum(self.shape(batch)) for batch in self.epoch(epoch))

    def _windows(self, epoch: int) -> list[NDArray[np.int64]]:
        """Shuffle the blocks and cut them into windows."""
        order = permutation(derive_key(self.seed, "blocks", epoch), len(self._counts))
        return [order[start : start + self._window] for start in range(0, len(order), self._window)]

    def _window_sizes(self, epoch: int) -> list[int]:
        """Return the number of batches of each window of an epoch."""
        if epoch not in self._cached_window_sizes:
            sizes = [
                sum(
                    allocation.batches
                    for allocation in self._allocate(self._counts[blocks].sum(axis=0))
                )
                for blocks in self._windows(epoch)
            ]
            self._cached_window_sizes = {epoch: sizes}
        return self._cached_window_sizes[epoch]

    def _plan(self, epoch: int, window: int) -> list[NDArray[np.int64]]:
        blocks = self._windows(epoch)[window]
        pairs = np.concatenate(
            [
                np.arange(start, min(start + self._block, self.examples))
                for start in blocks * self._block
            ]
        )
        shapes = self._assign(pairs)
        order = np.lexsort(
            (splitmix64_outputs(derive_key(self.seed, "pairs", epoch), pairs), shapes)
        )
        counts = np.bincount(shapes, minlength=len(self.shapes) + 1)
        pools = [
            list[NDArray[np.int64]]([part])
            for part in np.split(pairs[order], np.cumsum(counts)[:-1])
        ]
        batches: list[NDArray[np.int64]] = []
        for number, allocation in enumerate(self._allocate(counts)):
            pool = np.concatenate(pools[number])
            rows = self._rows[number] if number < len(self.shapes) else 1
            if allocation.passed_up:
                pools[allocation.larger_shape].append(pool[len(pool) - allocation.passed_up :])
                pool = pool[: len(pool) - allocation.passed_up]
            batches.extend(pool[start : start + rows] for start in range(0, len(pool), rows))
        return [
            batches[index]
            for index in permutation(derive_key(self.seed, "batches", epoch, window), len(batches))
        ]

    def _allocate(self, counts: NDArray[np.int64]) -> list[ShapeAllocation]:
        """Return the batches of each shape and the pairs it passes to a larger one.

        The last entry is for pairs that form their own batch.
        """
        *held, alone = counts.tolist()
        return [
            *allocate_batches(self.shapes, held, self.batch_tokens),
            ShapeAllocation(alone, 0, -1),
        ]

    def _assign(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        src, tgt = (
            np.asarray(side[pairs], np.int64) + 1 for side in (self._src_lengths, self._tgt_lengths)
        )
        return assign_shapes(self.shapes, src, tgt)

    def _count(self, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(self._assign(pairs), minlength=len(self.shapes) + 1)


def smallest_fitting_shape(shapes: list[BatchShape], src: int, tgt: int) -> BatchShape:
    """Return the smallest of the sorted shapes that holds these lengths.

    Lengths that no shape holds are rounded up to multiples of 8.
    """
    fits = (shape for shape in shapes if shape.src >= src and shape.tgt >= tgt)
    return next(fits, BatchShape(-(-src // 8) * 8, -(-tgt // 8) * 8))


class StepPlan(NamedTuple):
    """The micro-batches of one training step, and the position of the next."""

    batches: list[NDArray[np.int64]]
    cursor: Cursor


def plan_step(plan: Plan, cursor: Cursor, gradient_accumulation: int) -> StepPlan:
    """Return the next `gradient_accumulation` micro-batches, past the end of an epoch if needed."""
    batches = []
    for _ in range(gradient_accumulation):
        if cursor.batch >= plan.batches(cursor.epoch):
            cursor = Cursor(cursor.epoch + 1, 0)
        batches.append(plan.batch(cursor))
        cursor = Cursor(cursor.epoch, cursor.batch + 1)
    if cursor.batch >= plan.batches(cursor.epoch):
        cursor = Cursor(cursor.epoch + 1, 0)
    return StepPlan(batches, cursor)
