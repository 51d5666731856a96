"""Core layouts of peers without batch parallelism of their own.

One process with a thread per core, or one single-threaded process per core. The processes are
forked before torch is imported; each loads the system and takes the next batch when it is free.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from bench.workload import Batch, TranslateBatch, TranslateBatches, output_length


class CoreLayout(Protocol):
    """A system running on some cores."""

    label: str  # processes x threads
    description: str  # for the table, if there was a choice

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Translate batches."""

    def peak_mib(self) -> int:
        """Return the peak memory."""

    def close(self) -> None:
        """Release the system."""


class OwnThreading:
    """A system that distributes batches over the cores itself."""

    description = ""

    def __init__(self, translate: TranslateBatches, label: str) -> None:
        self._translate, self.label = translate, label

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Translate batches."""
        self._translate(batches)

    def peak_mib(self) -> int:
        """Return the peak memory of this process."""
        return _peak_mib()

    def close(self) -> None:
        """Do nothing: the system ends with the process."""


class OneProcess:
    """One process with all cores for each batch: torch's default."""

    def __init__(self, load: Callable[[], TranslateBatch], cores: int) -> None:
        self._translate = _load_with_threads(load, cores)
        self.label = f"1 x {cores}"
        self.description = f"1 process, {cores} threads" if cores > 1 else ""

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Translate batches one after another."""
        for batch in batches:
            translate_checked(self._translate, batch)

    def peak_mib(self) -> int:
        """Return the peak memory of this process."""
        return _peak_mib()

    def close(self) -> None:
        """Release the model."""
        del self._translate


class ProcessPerCore:
    """One single-threaded process per core."""

    def __init__(self, load: Callable[[], TranslateBatch], cores: int) -> None:
        context = multiprocessing.get_context("fork")
        self.label = f"{cores} x 1"
        self.description = f"{cores} processes"
        self._connections: list[Connection] = []
        self._peaks: dict[int, int] = {}
        for _ in range(cores):
            here, there = context.Pipe()
            context.Process(target=_worker_main, args=(load, there), daemon=True).start()
            there.close()
            self._connections.append(here)
        for end in self._connections:
            self._receive(end)

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Translate batches, each in the first free process."""
        waiting, busy = list(reversed(batches)), set[Any]()
        free: list[Any] = list(self._connections)
        while waiting or busy:
            while waiting and free:
                end = free.pop()
                end.send(waiting.pop())
                busy.add(end)
            for done in wait(list(busy)):
                self._receive(done)
                busy.remove(done)
                free.append(done)

    def peak_mib(self) -> int:
        """Return the sum of the peak memory of the processes."""
        return sum(self._peaks.values())

    def close(self) -> None:
        """End the processes."""
        for end in self._connections:
            end.close()

    def _receive(self, end: Any) -> None:
        try:
            reply = end.recv()
        except EOFError:
            raise RuntimeError("a worker ended before its batch was done") from None
        if isinstance(reply, str):
            raise RuntimeError(reply)
        self._peaks[id(end)] = reply


def translate_checked(translate: TranslateBatch, batch: Batch) -> None:
    """Translate a batch; raise RuntimeError unless every output has the required length."""
    lengths = {len(found) for found in translate(batch, output_length(batch))}
    if lengths != {output_length(batch)}:
        raise RuntimeError(
            f"outputs must be {output_length(batch)} tokens long; found {sorted(lengths)}"
        )


def _worker_main(load: Callable[[], TranslateBatch], end: Connection) -> None:
    try:
        translate = _load_with_threads(load, 1)
        end.send(_peak_mib())
        while True:
            translate_checked(translate, end.recv())
            end.send(_peak_mib())
    except EOFError:
        return
    except Exception as problem:  # the parent reports it
        end.send(f"{type(problem).__name__}: {problem}")


def _load_with_threads(load: Callable[[], TranslateBatch], threads: int) -> TranslateBatch:
    translate = load()
    import torch

    torch.set_num_threads(threads)  # after loading, because a system may set it
    return translate


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
