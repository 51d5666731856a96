"""Several processes that train as one: who we are among them, and the little that they say to each other.

`torchrun` starts the processes; this module only finds out what it set up. Gradients are summed by collectives, whose
backend follows the device (gloo on CPUs, NCCL on GPUs); everything else (validation, checkpoints, their outcome) goes through
the rendezvous store, outside any collective, so that a long validation cannot run into a collective's time limit.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dragoman import stopping
from dragoman.errors import ConfigError, StoppedError
from dragoman.training.heartbeat import LOST_SECONDS, Heartbeat, KeyStore
from dragoman.training.meeting import agree

_rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined] # public and documented, but not marked so
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
WATCHDOG_SECONDS = 60.0
GOODBYE_SECONDS = 10.0
SILENCE_SECONDS = 2.0
LEAVING_SECONDS = 5.0  # for a process that was told of a loss to notice by itself

_Value = TypeVar("_Value")
Ask = Callable[[Any], list[Any]]  # a word for everybody -> what each rank answered


class World:
    """One process among several, or alone."""

    def __init__(self, rank: int = 0, size: int = 1, *, store: KeyStore | None = None, timeout: float = 300.0) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout = store, timeout
        self._shared = 0
        self._alone = False  # somebody was lost
        self._over = threading.Event()  # this process knows that it must end
        self.on_loss: Callable[[str], None] = lambda reason: None  # called in another thread, just before the process is left
        self._parent = os.getppid()
        self._heartbeat: Heartbeat | None = None
        if store is not None:
            patience = min(WATCHDOG_SECONDS, timeout / 2)
            self._heartbeat = Heartbeat(store, rank=rank, size=size, patience=patience, lost=self._leave)

    @property
    def leads(self) -> bool:
        """Say whether this is the process that writes and shows progress."""
        return self.rank == 0

    def doing(self, what: str, *, waits: bool = False) -> None:
        """Note what this process is at, for the message about a rank that everybody waits for."""
        if self._heartbeat is not None:
            self._heartbeat.doing(what, waits=waits)

    def all_reduce(self, flat: Tensor, what: str) -> None:
        """Sum a tensor over all processes, in place."""
        if self.size > 1:
            self.doing(what, waits=True)
            self.together(lambda: dist.all_reduce(flat))
            self.doing(f"past {what}")
            if self._heartbeat is not None:
                self._heartbeat.watching = True  # all are training now, and nobody is silent for long any more

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give everybody the first process's values, in place."""
        if self.size > 1:
            for tensor in tensors:
                self.together(lambda tensor=tensor: dist.broadcast(tensor, src=0))  # type: ignore[misc]

    def share(self, compute: Callable[[], Any], what: str) -> Any:
        """Let the first process compute something as JSON and hand it to all; the others wait as long as it lives."""
        if self._store is None or self._heartbeat is None:
            return compute()
        self._shared += 1
        key = f"share/{self._shared}"
        if self.leads:
            self.doing(what)
            return self._tell(key, compute)
        return self._outcome(key, what)

    def conduct(self, compute: Callable[[Ask], Any], part: Callable[[Any], Any], what: str) -> Any:
        """Share what the first process computes, as `share` does, while all do a part of it each time that it asks them to.

        `compute` gets a function that hands a word (JSON) to everybody's `part` and gives the answers, by rank.
        """
        if self._store is None or self._heartbeat is None:
            return compute(lambda word: [part(word)])
        self._shared += 1
        key = f"share/{self._shared}"
        if self.leads:
            self.doing(what)
            asked = itertools.count()
            return self._tell(key, lambda: compute(lambda word: self._ask(f"{key}/{next(asked)}", word, part, what)))
        for number in itertools.count():
            question = f"{key}/{number}"
            self.doing(f"waiting for rank 0: {what}", waits=True)
            if self.together(lambda question=question: self._wait([key, question], 0, what)) == key:  # type: ignore[misc]
                break
            self.doing(what)
            word = json.loads(self._store.get(question))
            self._tell(f"{question}/{self.rank}", lambda word=word: part(word))  # type: ignore[misc]
        return self._outcome(key, what)

    def _ask(self, question: str, word: Any, part: Callable[[Any], Any], what: str) -> list[Any]:
        """Hand everybody a word, do this process's own part, and collect the answers."""
        assert self._store is not None, "only a process among several asks others"
        self._store.set(question, json.dumps(word))
        answers = [part(word)]
        return answers + [self._outcome(f"{question}/{rank}", what, of=rank) for rank in range(1, self.size)]

    def _outcome(self, key: str, what: str, *, of: int = 0) -> Any:
        """Read what a rank told of its work, as soon as it is there."""
        assert self._store is not None, "only a process among several hears anything"
        self.doing(f"waiting for rank {of}: {what}", waits=True)
        self.together(lambda: self._wait([key], of, what))
        told = json.loads(self._store.get(key))
        if "error" in told:
            raise _lost(self.rank, f"rank {of} could not {what}: {told['error']}")
        return told["value"]

    def _wait(self, keys: list[str], of: int, what: str) -> str:
        """Wait until one of the keys is there, as long as the rank that will write it shows signs of life; says which."""
        assert self._store is not None, "only a process among several hears anything"
        assert self._heartbeat is not None, "a process among several has a heartbeat"
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key
            self.check_parent()
            # A launcher that lost a rank asks the others to stop: then its silence need not be long to be believed. Rank 0
            # may keep its threads from running for a while (learning a vocabulary does); the others only write files.
            longest = self._timeout if of == 0 else min(self._timeout, LOST_SECONDS)
            patience = min(longest, SILENCE_SECONDS) if stopping.requested() else longest
            if self._heartbeat.silence(of=of) > patience:
                self._alone = True
                raise _lost(self.rank, f"no sign of rank {of} for {patience:.0f} s while waiting for it to {what}")
            time.sleep(POLL_SECONDS)

    def _tell(self, key: str, compute: Callable[[], Any]) -> Any:
        """Compute and tell the outcome, an error too: the others must not wait for what will never come."""
        assert self._store is not None, "only a process among several tells anything"
        try:
            value = compute()
        except BaseException as error:
            self._store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        self._store.set(key, json.dumps({"value": value}))
        return value

    def check_parent(self) -> None:
        """Leave when the launcher is gone: nobody would collect us (measured: ranks outlive a killed torchrun)."""
        if self.size > 1 and os.getppid() != self._parent:
            raise _lost(self.rank, "the launcher is gone")

    def _leave(self, reason: str) -> None:
        """End the process from its heartbeat's thread, where a collective holds the main one: NCCL never returns from a dead peer."""
        log.error("%s", _lost(self.rank, reason))
        self.on_loss(str(_lost(self.rank, reason)))
        if not self._over.wait(LEAVING_SECONDS):
            os._exit(StoppedError.exit_code)

    def close(self) -> None:
        """Leave the group. Rank 0 goes last, for the others still read from its store; but it does not wait for the dead."""
        self._over.set()
        if self._heartbeat is not None and self._store is not None:
            self._heartbeat.stop()
            with suppress(RuntimeError):
                self._store.set(f"bye/{self.rank}", "")
                everybody = [f"bye/{rank}" for rank in range(self.size)]
                patience = time.monotonic() + GOODBYE_SECONDS
                while self.leads and not self._alone and not self._store.check(everybody) and time.monotonic() < patience:
                    time.sleep(POLL_SECONDS)
        if self._store is not None and dist.is_initialized():
            with suppress(RuntimeError):  # peers may have gone first
                dist.destroy_process_group()

    def together(self, call: Callable[[], _Value]) -> _Value:
        """Do something that needs all ranks, and turn a peer's death or silence into one sentence; the survivors never publish."""
        try:
            return call()
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            self._alone = True
            self._over.set()
            raise _lost(self.rank, " ".join(str(error).split())[:300]) from error


def join_world(device: torch.device, *, timeout: float = 300.0, environment: Mapping[str, str] = os.environ) -> World:
    """Find out from torchrun's environment who we are; without one we are alone."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return World()
    rank, size = (_whole(environment, name) for name in ("RANK", "WORLD_SIZE"))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(
            [f"a run of several processes needs MASTER_ADDR and MASTER_PORT; found {', '.join(missing)} unset; start it with torchrun"]
        )
    die_with_parent()
    place = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    waiting = threading.Timer(
        WATCHDOG_SECONDS, log.warning, ("rank %d still waits for the other %d ranks at %s; are all started?", rank, size - 1, place)
    )
    waiting.daemon = True
    waiting.start()
    try:
        store, rank, size = next(iter(_rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout))))
        name = agree(store, rank=rank, size=size, timeout=timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(
            backend, store=_PrefixStore(f"group/{name}", store), rank=rank, world_size=size, timeout=timedelta(seconds=timeout), **options
        )
    except (RuntimeError, dist.DistError) as error:
        raise _lost(rank, " ".join(str(error).split())[:300]) from error
    finally:
        waiting.cancel()
    return World(rank, size, store=_PrefixStore(f"dragoman/{name}", store), timeout=timeout)


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Say which of this machine's processes we are: the number of the GPU to take."""
    return _whole(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0


def die_with_parent() -> None:
    """Ask Linux to end this process with its launcher, whose death torchrun's workers otherwise survive."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG


def _is_loss(error: RuntimeError) -> bool:
    """Tell a peer that is gone from an error of our own; gloo's have no class, but name their source."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "Connection", "NCCL", "Timeout", "timed out"))


def _whole(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise ConfigError([f"{name} must be a whole number; found {text!r}; start several processes with torchrun"])
    return int(text)


def _lost(rank: int, found: str) -> StoppedError:
    return StoppedError(
        "all processes of a run must go on together",
        found=f"on rank {rank}: {found}",
        fix="run the same command again; it goes on from the newest checkpoint",
    )
