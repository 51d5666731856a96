"""The process group: rendezvous of the ranks, collectives, and work that only rank 0 does."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import logging
import os
import secrets
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

from dragoman.errors import ConfigError, StoppedError
from dragoman.runtime import signals
from dragoman.runtime.device import parse_rank_variable
from dragoman.training.distributed.heartbeat import LOST_RANK_SECONDS, Heartbeat, KeyValueStore

POLL_SECONDS = 0.05


def agree_on_group_id(store: KeyValueStore, *, rank: int, size: int, timeout: float) -> str:
    """Wait until all ranks are there and give the meeting's name; raises RuntimeError when some do not come."""
    token = secrets.token_hex(8)
    store.set(f"hello/{rank}", token)
    patience = time.monotonic() + timeout
    while time.monotonic() < patience:
        name = _propose_group(store, size) if rank == 0 else _confirm_group(store, rank, token)
        if name and store.check([f"begin/{name}"]):
            return name
        time.sleep(POLL_SECONDS)
    missing = [other for other in range(size) if not store.check([f"hello/{other}"])]
    raise RuntimeError(
        f"not all of {size} ranks came within {timeout:.0f} s; never heard of: {missing or 'none, but not all are new'}"
    )


def _propose_group(store: KeyValueStore, size: int) -> str:
    """Name the meeting of those who said hello last; it begins once each of them has found its own word in the list."""
    hello_keys = [f"hello/{rank}" for rank in range(size)]
    if not store.check(hello_keys):
        return ""
    tokens = [store.get(key).decode() for key in hello_keys]
    name = _group_id(tokens)
    store.set("invited", json.dumps(tokens))
    if store.check([f"here/{name}/{rank}" for rank in range(1, size)]):
        store.set(f"begin/{name}", "")
    return name


def _confirm_group(store: KeyValueStore, rank: int, token: str) -> str:
    """Say that we are here where the list has our own word, and not that of a process that stood in our place before."""
    tokens = json.loads(store.get("invited")) if store.check(["invited"]) else []
    if len(tokens) <= rank or tokens[rank] != token:
        return ""
    name = _group_id(tokens)
    store.set(f"here/{name}/{rank}", "")
    return name


def _group_id(tokens: list[str]) -> str:
    return hashlib.sha256("/".join(tokens).encode()).hexdigest()[:16]


_rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined] # public and documented, but not marked so
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

RANK_POLL_SECONDS = 0.05
WATCHDOG_SECONDS = 60.0
SHUTDOWN_TIMEOUT_SECONDS = 10.0
STOPPING_RANK_TIMEOUT_SECONDS = 2.0
EXIT_GRACE_SECONDS = 5.0  # for a process that was told of a loss to notice by itself

_Value = TypeVar("_Value")
CallRanks = Callable[[Any], list[Any]]  # a word for everybody -> what each rank answered


class ProcessGroup:
    """One process among several, or alone."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        store: KeyValueStore | None = None,
        timeout: float = 300.0,
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout = store, timeout
        self._num_exchanges = 0
        self._peer_lost = False  # somebody was lost
        self._exiting = threading.Event()  # this process knows that it must end
        self.on_rank_lost: Callable[[str], None] = lambda reason: (
            None
        )  # called in another thread, just before the process is left
        self._parent = os.getppid()
        self._heartbeat: Heartbeat | None = None
        if store is not None:
            patience = min(WATCHDOG_SECONDS, timeout / 2)
            self._heartbeat = Heartbeat(
                store, rank=rank, size=size, patience=patience, lost=self._exit_process
            )

    @property
    def is_rank_zero(self) -> bool:
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
            self.run_collective(lambda: dist.all_reduce(flat))
            self.doing(f"past {what}")
            if self._heartbeat is not None:
                self._heartbeat.is_monitoring = (
                    True  # all are training now, and nobody is silent for long any more
                )

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give everybody the first process's values, in place."""
        if self.size > 1:
            for tensor in tensors:
                self.run_collective(lambda tensor=tensor: dist.broadcast(tensor, src=0))  # type: ignore[misc]

    def run_on_rank_zero(self, compute: Callable[[], Any], what: str) -> Any:
        """Let the first process compute something as JSON and hand it to all; the others wait as long as it lives."""
        if self._store is None or self._heartbeat is None:
            return compute()
        self._num_exchanges += 1
        key = f"share/{self._num_exchanges}"
        if self.is_rank_zero:
            self.doing(what)
            return self._publish_result(key, compute)
        return self._receive_result(key, what)

    def run_with_ranks(
        self, compute: Callable[[CallRanks], Any], part: Callable[[Any], Any], what: str
    ) -> Any:
        """Share what the first process computes, as `share` does, while all do a part of it each time that it asks them to.

        `compute` gets a function that hands a word (JSON) to everybody's `part` and gives the answers, by rank.
        """
        if self._store is None or self._heartbeat is None:
            return compute(lambda word: [part(word)])
        self._num_exchanges += 1
        key = f"share/{self._num_exchanges}"
        if self.is_rank_zero:
            self.doing(what)
            asked = itertools.count()
            return self._publish_result(
                key,
                lambda: compute(
                    lambda word: self._call_ranks(f"{key}/{next(asked)}", word, part, what)
                ),
            )
        for number in itertools.count():
            question = f"{key}/{number}"
            self.doing(f"waiting for rank 0: {what}", waits=True)
            waiting = functools.partial(self._wait_for_key, [key, question], 0, what)
            if self.run_collective(waiting) == key:
                break
            self.doing(what)
            word = json.loads(self._store.get(question))
            self._publish_result(f"{question}/{self.rank}", lambda word=word: part(word))  # type: ignore[misc]
        return self._receive_result(key, what)

    def _call_ranks(
        self, question: str, word: Any, part: Callable[[Any], Any], what: str
    ) -> list[Any]:
        """Hand everybody a word, do this process's own part, and collect the answers."""
        assert self._store is not None, "only a process among several asks others"
        self._store.set(question, json.dumps(word))
        answers = [part(word)]
        return answers + [
            self._receive_result(f"{question}/{rank}", what, of=rank)
            for rank in range(1, self.size)
        ]

    def _receive_result(self, key: str, what: str, *, of: int = 0) -> Any:
        """Read what a rank told of its work, as soon as it is there."""
        assert self._store is not None, "only a process among several hears anything"
        self.doing(f"waiting for rank {of}: {what}", waits=True)
        self.run_collective(lambda: self._wait_for_key([key], of, what))
        received = json.loads(self._store.get(key))
        if "error" in received:
            raise _rank_lost_error(self.rank, f"rank {of} could not {what}: {received['error']}")
        return received["value"]

    def _wait_for_key(self, keys: list[str], of: int, what: str) -> str:
        """Wait until one of the keys is there, as long as the rank that will write it shows signs of life; says which."""
        assert self._store is not None, "only a process among several hears anything"
        assert self._heartbeat is not None, "a process among several has a heartbeat"
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key
            self.check_launcher()
            # A launcher that lost a rank asks the others to stop: then its silence need not be long to be believed. Rank 0
            # may keep its threads from running for a while (learning a vocabulary does); the others only write files.
            longest = self._timeout if of == 0 else min(self._timeout, LOST_RANK_SECONDS)
            patience = (
                min(longest, STOPPING_RANK_TIMEOUT_SECONDS) if signals.stop_requested() else longest
            )
            if self._heartbeat.seconds_silent(of=of) > patience:
                self._peer_lost = True
                raise _rank_lost_error(
                    self.rank,
                    f"no sign of rank {of} for {patience:.0f} s while waiting for it to {what}",
                )
            time.sleep(RANK_POLL_SECONDS)

    def _publish_result(self, key: str, compute: Callable[[], Any]) -> Any:
        """Compute and tell the outcome, an error too: the others must not wait for what will never come."""
        assert self._store is not None, "only a process among several tells anything"
        try:
            value = compute()
        except BaseException as error:
            self._store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        self._store.set(key, json.dumps({"value": value}))
        return value

    def check_launcher(self) -> None:
        """Leave when the launcher is gone: nobody would collect us (measured: ranks outlive a killed torchrun)."""
        if self.size > 1 and os.getppid() != self._parent:
            raise _rank_lost_error(self.rank, "the launcher is gone")

    def _exit_process(self, reason: str) -> None:
        """End the process from its heartbeat's thread, where a collective holds the main one: NCCL never returns from a dead peer."""
        logger.error("%s", _rank_lost_error(self.rank, reason))
        self.on_rank_lost(str(_rank_lost_error(self.rank, reason)))
        if not self._exiting.wait(EXIT_GRACE_SECONDS):
            os._exit(StoppedError.exit_code)

    def close(self) -> None:
        """Leave the group. Rank 0 goes last, for the others still read from its store; but it does not wait for the dead."""
        self._exiting.set()
        if self._heartbeat is not None and self._store is not None:
            self._heartbeat.stop()
            with suppress(RuntimeError):
                self._store.set(f"bye/{self.rank}", "")
                everybody = [f"bye/{rank}" for rank in range(self.size)]
                patience = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
                while (
                    self.is_rank_zero
                    and not self._peer_lost
                    and not self._store.check(everybody)
                    and time.monotonic() < patience
                ):
                    time.sleep(RANK_POLL_SECONDS)
        if self._store is not None and dist.is_initialized():
            with suppress(RuntimeError):  # peers may have gone first
                dist.destroy_process_group()

    def run_collective(self, call: Callable[[], _Value]) -> _Value:
        """Do something that needs all ranks, and turn a peer's death or silence into one sentence; the survivors never publish."""
        try:
            return call()
        except RuntimeError as error:
            if not _is_peer_lost(error):
                raise
            self._peer_lost = True
            self._exiting.set()
            raise _rank_lost_error(self.rank, " ".join(str(error).split())[:300]) from error


def init_process_group(
    device: torch.device, *, timeout: float = 300.0, environment: Mapping[str, str] = os.environ
) -> ProcessGroup:
    """Find out from torchrun's environment who we are; without one we are alone."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return ProcessGroup()
    rank, size = (parse_rank_variable(environment, name) for name in ("RANK", "WORLD_SIZE"))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(
            [
                f"a run of several processes needs MASTER_ADDR and MASTER_PORT; found {', '.join(missing)} unset; start it with torchrun"
            ]
        )
    set_parent_death_signal()
    place = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    waiting = threading.Timer(
        WATCHDOG_SECONDS,
        logger.warning,
        (
            "rank %d still waits for the other %d ranks at %s; are all started?",
            rank,
            size - 1,
            place,
        ),
    )
    waiting.daemon = True
    waiting.start()
    try:
        store, rank, size = next(
            iter(_rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout)))
        )
        name = agree_on_group_id(store, rank=rank, size=size, timeout=timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(
            backend,
            store=_PrefixStore(f"group/{name}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            **options,
        )
    except (RuntimeError, dist.DistError) as error:
        raise _rank_lost_error(rank, " ".join(str(error).split())[:300]) from error
    finally:
        waiting.cancel()
    return ProcessGroup(rank, size, store=_PrefixStore(f"dragoman/{name}", store), timeout=timeout)


def set_parent_death_signal() -> None:
    """Ask Linux to end this process with its launcher, whose death torchrun's workers otherwise survive."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(
                1, signal.SIGKILL, 0, 0, 0
            )  # 1 is PR_SET_PDEATHSIG


def _is_peer_lost(error: RuntimeError) -> bool:
    """Tell a peer that is gone from an error of our own; gloo's have no class, but name their source."""
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "Connection", "NCCL", "Timeout", "timed out")
    )


def _rank_lost_error(rank: int, found: str) -> StoppedError:
    return StoppedError(
        "all processes of a run must go on together",
        found=f"on rank {rank}: {found}",
        fix="run the same command again; it goes on from the newest checkpoint",
    )
