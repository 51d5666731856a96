"""The batches of each update, made ready in the background.

Position belongs to the trainer: what has been prepared ahead is never part of any state, and what is prepared is a pure
function of (plan, seed, cursor, rank). Resuming is therefore no different run (joeynmt#125, #172; OpenNMT-py#2006,
#2517; huggingface/transformers#11323).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import numpy as np

from dragoman.data.batches import Batch, BatchPlan, Cursor, plan_step
from dragoman.runtime.seeds import derive_seed
from dragoman.storage import fault_injection

CollateFunction = Callable[[np.ndarray, int], Batch]  # (example numbers, seed) -> batch


class MicroBatch(NamedTuple):
    """What one rank computes at once: some or all rows of a micro-batch."""

    micro_index: int  # place of the micro-batch in the update's global list
    split_index: int  # place of the rows in the micro-batch
    batch: Batch
    is_dummy: bool = False  # gone through for the other ranks' sake, and counts nothing


class GlobalBatch(NamedTuple):
    """One update's work: this rank's share, and what the whole is."""

    number: int
    micro_batches: list[MicroBatch]
    examples: list[np.ndarray]  # of all ranks, by micro-batch
    next_cursor: Cursor  # the position behind it


class DataLoader:
    """Prepares updates one after the other, up to `depth` ahead in a thread of its own, or on demand with `depth` 0."""

    def __init__(
        self,
        *,
        plan: BatchPlan,
        collate: CollateFunction,
        gradient_accumulation: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        lockstep: bool = False,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._plan, self._collate, self._gradient_accumulation, self._seed = (
            plan,
            collate,
            gradient_accumulation,
            seed,
        )
        self._rank, self._ranks, self._lockstep, self._prefetch, self._pin_memory = (
            rank,
            ranks,
            lockstep,
            prefetch,
            pin_memory,
        )

    def batches(self, number: int, cursor: Cursor) -> Generator[GlobalBatch, None, None]:
        """Yield updates from a position on, without end; close the iterator to end its thread."""
        if self._prefetch == 0:
            yield from self._generate(number, cursor)
            return
        ready: queue.Queue[GlobalBatch | BaseException] = queue.Queue(self._prefetch)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._prefetch_batches,
            args=(ready, stop, number, cursor),
            name="feed",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()
            thread.join()

    def _prefetch_batches(
        self,
        ready: queue.Queue[GlobalBatch | BaseException],
        stop: threading.Event,
        number: int,
        cursor: Cursor,
    ) -> None:
        """Keep the queue full until told to stop; an error goes the same way as the work and is raised where it is used."""
        item: GlobalBatch | BaseException
        work = self._generate(number, cursor)
        while not stop.is_set():
            try:
                item = next(work)
            except BaseException as error:  # everything must reach the main thread
                item = error
            while not stop.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def _generate(self, number: int, cursor: Cursor) -> Iterator[GlobalBatch]:
        while True:
            examples, cursor = plan_step(self._plan, cursor, self._gradient_accumulation)
            fault_injection.point("data.next")
            yield GlobalBatch(number, self._rank_micro_batches(number, examples), examples, cursor)
            number += 1

    def _rank_micro_batches(self, number: int, examples: list[np.ndarray]) -> list[MicroBatch]:
        """Take every W-th slice of the global list; micro-batches are cut by rows only where there are fewer than ranks."""
        parts = -(-self._ranks // len(examples))
        mine: list[MicroBatch] = []
        for place in range(self._rank, len(examples) * parts, self._ranks):
            micro_index, split_index = divmod(place, parts)
            batch = self._collate_micro_batch(number, micro_index, examples)
            if parts > 1:
                if split_index >= len(batch):
                    continue
                batch = batch.rows(slice(split_index, None, parts))
            mine.append(MicroBatch(micro_index, split_index, batch))
        if self._lockstep:
            is_dummy = MicroBatch(
                0, 0, self._collate_micro_batch(number, 0, examples).rows(slice(1)), is_dummy=True
            )
            mine += [is_dummy] * (-(-len(examples) * parts // self._ranks) - len(mine))
        return (
            [part._replace(batch=part.batch.pin_memory()) for part in mine]
            if self._pin_memory
            else mine
        )

    def _collate_micro_batch(
        self, number: int, micro_index: int, examples: list[np.ndarray]
    ) -> Batch:
        """Collate a micro-batch whole even where a rank needs some rows only: its pieces and shape must not depend on the ranks."""
        return self._collate(
            examples[micro_index], derive_seed(self._seed, number, micro_index, "text")
        )
