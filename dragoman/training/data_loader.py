"""The batches of each training step, prepared in the background.

The trainer owns the position: what has been prefetched is never part of any state, and each batch
is a pure function of (plan, seed, cursor, rank). A resumed run therefore sees the same batches
(joeynmt#125, #172; OpenNMT-py#2006, #2517; huggingface/transformers#11323). `plan_step` in
`data/batch_plan.py` computes the next batch and cursor.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Generator, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from dragoman.data.batch_plan import Cursor, Plan, plan_step
from dragoman.data.collate import TensorBatch
from dragoman.storage import fault_injection


class CollateFunction(Protocol):
    """Makes a padded batch of some examples; the seed is for random parts, such as BPE-dropout."""

    def __call__(self, examples: np.ndarray, /, *, seed: int) -> TensorBatch:
        """Return the batch."""
        ...


def derive_seed(run_seed: int, step: int, micro_index: int, stream: str | int) -> int:
    """Return the seed of a micro-batch: 63 bits of SHA-256, the same for any number of ranks.

    Each micro-batch has a seed of its own, derived from its position. A generator's state that is
    saved and restored could drift at a resume (NVIDIA-NeMo/Megatron-Bridge#5257).
    """
    digest = hashlib.sha256(f"{run_seed}/{step}/{micro_index}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # some generators take signed numbers


class MicroBatch(NamedTuple):
    """All or some rows of a micro-batch, which one rank computes in one pass."""

    micro_index: int  # index of the micro-batch in the step, over all ranks
    split_index: int  # index of these rows, where a micro-batch is split over ranks
    batch: TensorBatch
    is_dummy: bool = False  # computed only to stay in lockstep with other ranks; does not count


class GlobalBatch(NamedTuple):
    """The batch of one optimizer step: this rank's micro-batches, and the examples of all ranks."""

    step: int
    micro_batches: list[MicroBatch]
    examples: list[np.ndarray]  # of all ranks, by micro-batch
    next_cursor: Cursor  # position of the next step's first micro-batch


class DataLoader:
    """Prepares batches up to `prefetch` steps ahead in a thread, or on demand with `prefetch=0`."""

    def __init__(
        self,
        *,
        plan: Plan,
        collate: CollateFunction,
        gradient_accumulation: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        lockstep: bool = False,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self._plan, self._collate, self._seed = plan, collate, seed
        self._gradient_accumulation = gradient_accumulation
        self._rank, self._ranks, self._lockstep = rank, ranks, lockstep
        self._prefetch, self._pin_memory = prefetch, pin_memory

    def batches(self, step: int, cursor: Cursor) -> Generator[GlobalBatch, None, None]:
        """Yield batches without end, from a step and its position on.

        Close it to end the thread.
        """
        if self._prefetch == 0:
            yield from self._generate(step, cursor)
            return
        ready: queue.Queue[GlobalBatch | BaseException] = queue.Queue(self._prefetch)
        stop = threading.Event()
        thread = threading.Thread(
            target=self._prefetch_batches,
            args=(ready, stop, step, cursor),
            name="data-loader",
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
        step: int,
        cursor: Cursor,
    ) -> None:
        """Keep the queue full until `stop`; pass an error on to the thread that reads the queue."""
        item: GlobalBatch | BaseException
        batches = self._generate(step, cursor)
        while not stop.is_set():
            try:
                item = next(batches)
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

    def _generate(self, step: int, cursor: Cursor) -> Iterator[GlobalBatch]:
        while True:
            examples, cursor = plan_step(self._plan, cursor, self._gradient_accumulation)
            if fault_injection.armed_faults:
                fault_injection.point("data.next")
            yield GlobalBatch(step, self._rank_micro_batches(step, examples), examples, cursor)
            step += 1

    def _rank_micro_batches(self, step: int, examples: list[np.ndarray]) -> list[MicroBatch]:
        """Return every W-th micro-batch of the step.

        They are split by rows where ranks outnumber them.
        """
        parts = -(-self._ranks // len(examples))
        mine: list[MicroBatch] = []
        for index in range(self._rank, len(examples) * parts, self._ranks):
            micro_index, split_index = divmod(index, parts)
            batch = self._collate_micro_batch(step, micro_index, examples)
            if parts > 1:
                if split_index >= len(batch):
                    continue
                batch = batch.rows(slice(split_index, None, parts))
            mine.append(MicroBatch(micro_index, split_index, batch))
        if self._lockstep:
            first = self._collate_micro_batch(step, 0, examples)
            dummy = MicroBatch(0, 0, first.rows(slice(1)), is_dummy=True)
            mine += [dummy] * (-(-len(examples) * parts // self._ranks) - len(mine))
        return (
            [part._replace(batch=part.batch.pin_memory()) for part in mine]
            if self._pin_memory
            else mine
        )

    def _collate_micro_batch(
        self, step: int, micro_index: int, examples: list[np.ndarray]
    ) -> TensorBatch:
        """Collate a whole micro-batch: its shape must not depend on the number of ranks."""
        seed = derive_seed(self._seed, step, micro_index, "text")
        return self._collate(examples[micro_index], seed=seed)
