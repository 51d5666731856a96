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

from dragoman.data.batches import Batch, BatchPlan, Cursor, update_batches
from dragoman.files import faults
from dragoman.training.randomness import seed_for

Collate = Callable[[np.ndarray, int], Batch]  # (example numbers, seed) -> batch


class Slice(NamedTuple):
    """What one rank computes at once: some or all rows of a micro-batch."""

    micro: int  # place of the micro-batch in the update's global list
    slot: int  # place of the rows in the micro-batch
    batch: Batch
    idle: bool = False  # gone through for the other ranks' sake, and counts nothing


class Update(NamedTuple):
    """One update's work: this rank's share, and what the whole is."""

    number: int
    slices: list[Slice]
    examples: list[np.ndarray]  # of all ranks, by micro-batch
    after: Cursor  # the position behind it


class Feed:
    """Prepares updates one after the other, up to `depth` ahead in a thread of its own, or on demand with `depth` 0."""

    def __init__(
        self,
        *,
        plan: BatchPlan,
        collate: Collate,
        accumulate: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        lockstep: bool = False,
        depth: int = 2,
        pin: bool = False,
    ) -> None:
        self._plan, self._collate, self._accumulate, self._seed = plan, collate, accumulate, seed
        self._rank, self._ranks, self._lockstep, self._depth, self._pin = rank, ranks, lockstep, depth, pin

    def updates(self, number: int, cursor: Cursor) -> Generator[Update, None, None]:
        """Yield updates from a position on, without end; close the iterator to end its thread."""
        if self._depth == 0:
            yield from self._make(number, cursor)
            return
        ready: queue.Queue[Update | BaseException] = queue.Queue(self._depth)
        stop = threading.Event()
        thread = threading.Thread(target=self._fill, args=(ready, stop, number, cursor), name="feed", daemon=True)
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

    def _fill(self, ready: queue.Queue[Update | BaseException], stop: threading.Event, number: int, cursor: Cursor) -> None:
        """Keep the queue full until told to stop; an error goes the same way as the work and is raised where it is used."""
        item: Update | BaseException
        work = self._make(number, cursor)
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

    def _make(self, number: int, cursor: Cursor) -> Iterator[Update]:
        while True:
            examples, cursor = update_batches(self._plan, cursor, self._accumulate)
            faults.point("data.next")
            yield Update(number, self._share(number, examples), examples, cursor)
            number += 1

    def _share(self, number: int, examples: list[np.ndarray]) -> list[Slice]:
        """Take every W-th slice of the global list; micro-batches are cut by rows only where there are fewer than ranks."""
        parts = -(-self._ranks // len(examples))
        mine: list[Slice] = []
        for place in range(self._rank, len(examples) * parts, self._ranks):
            micro, slot = divmod(place, parts)
            batch = self._batch(number, micro, examples)
            if parts > 1:
                if slot >= len(batch):
                    continue
                batch = batch.rows(slice(slot, None, parts))
            mine.append(Slice(micro, slot, batch))
        if self._lockstep:
            idle = Slice(0, 0, self._batch(number, 0, examples).rows(slice(1)), idle=True)
            mine += [idle] * (-(-len(examples) * parts // self._ranks) - len(mine))
        return [part._replace(batch=part.batch.pin_memory()) for part in mine] if self._pin else mine

    def _batch(self, number: int, micro: int, examples: list[np.ndarray]) -> Batch:
        """Collate a micro-batch whole even where a rank needs some rows only: its pieces and shape must not depend on the ranks."""
        return self._collate(examples[micro], seed_for(self._seed, number, micro, "text"))
