"""How a program that has no say in it uses the cores: one process with a thread for each, or a process of one thread for each.

Both are there for programs that translate one batch at a time with torch. The processes are forked before torch is loaded, load the
program each for itself, and take a batch whenever they are free.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from bench.workload import Batch, TranslateBatch, TranslateBatches, output_length


class CoreLayout(Protocol):
    """A program on some cores."""

    label: str  # processes x threads
    words: str  # the same for people, where there was a choice

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Translate some batches."""

    def peak_mib(self) -> int:
        """Say how much memory it has taken at most."""

    def close(self) -> None:
        """Let it go."""


class OwnThreading:
    """A program that spreads its batches itself."""

    words = ""

    def __init__(self, translate: TranslateBatches, label: str) -> None:
        self._translate, self.label = translate, label

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Leave it to the program."""
        self._translate(batches)

    def peak_mib(self) -> int:
        """Look at this process."""
        return _peak_mib()

    def close(self) -> None:
        """Do nothing: it ends with the process."""


class SingleProcess:
    """One process, which uses all cores for each batch: what torch does where nobody says otherwise."""

    def __init__(self, load: Callable[[], TranslateBatch], cores: int) -> None:
        self._translate = _load_with_threads(load, cores)
        self.label = f"1 x {cores}"
        self.words = f"as it comes ({cores} threads)" if cores > 1 else ""

    def __call__(self, batches: Sequence[Batch]) -> None:
        """Translate one after the other."""
        for batch in batches:
            translate_checked(self._translate, batch)

    def peak_mib(self) -> int:
        """Look at this process."""
        return _peak_mib()

    def close(self) -> None:
        """Forget the model."""
        del self._translate


class ProcessPerCore:
    """A process of one thread for each core."""

    def __init__(self, load: Callable[[], TranslateBatch], cores: int) -> None:
        context = multiprocessing.get_context("fork")
        self.label = f"{cores} x 1"
        self.words = f"{cores} processes"
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
        """Hand out the batches, the next one to who is free first."""
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
        """Add up the processes."""
        return sum(self._peaks.values())

    def close(self) -> None:
        """Let the processes end."""
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
    """Translate a batch, and see that every output is as long as it should be, or what is timed would not be the same work."""
    lengths = {len(found) for found in translate(batch, output_length(batch))}
    if lengths != {output_length(batch)}:
        raise RuntimeError(
            f"outputs must be {output_length(batch)} pieces long, found {sorted(lengths)}"
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
    except Exception as problem:  # whatever it is, the parent tells it in a line
        end.send(f"{type(problem).__name__}: {problem}")


def _load_with_threads(load: Callable[[], TranslateBatch], threads: int) -> TranslateBatch:
    translate = load()
    import torch

    torch.set_num_threads(threads)  # afterwards, for a program may set it as it starts
    return translate


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
