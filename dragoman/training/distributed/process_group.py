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
    """Wait until all ranks have joined and return the group's id.

    Raises RuntimeError at a timeout.
    """
    token = secrets.token_hex(8)
    store.set(f"hello/{rank}", token)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        name = _propose_group(store, size) if rank == 0 else _confirm_group(store, rank, token)
        if name and store.check([f"begin/{name}"]):
            return name
        time.sleep(POLL_SECONDS)
    missing = [other for other in range(size) if not store.check([f"hello/{other}"])]
    raise RuntimeError(
        f"not all of {size} ranks joined within {timeout:.0f} s; "
        f"missing: {missing or 'none, but some are of an earlier start'}"
    )


def _propose_group(store: KeyValueStore, size: int) -> str:
    """Propose a group of the ranks that joined last.

    It starts once each has confirmed its token.
    """
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
    """Confirm a proposed group if it has our token and not that of an earlier process."""
    tokens = json.loads(store.get("invited")) if store.check(["invited"]) else []
    if len(tokens) <= rank or tokens[rank] != token:
        return ""
    name = _group_id(tokens)
    store.set(f"here/{name}/{rank}", "")
    return name


def _group_id(tokens: list[str]) -> str:
    return hashlib.sha256("/".join(tokens).encode()).hexdigest()[:16]


# Both are public and documented, but not exported for type checkers.
_rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

WATCHDOG_SECONDS = 60.0
SHUTDOWN_TIMEOUT_SECONDS = 10.0
STOPPING_RANK_TIMEOUT_SECONDS = 2.0
EXIT_GRACE_SECONDS = 5.0  # for the main thread to notice a lost rank by itself

_Value = TypeVar("_Value")
CallRanks = Callable[[Any], list[Any]]  # an argument for all ranks -> their return values


class ProcessGroup:
    """The ranks of a run, seen from one of them; a group of one by default."""

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
        self.is_rank_zero = rank == 0  # the process that writes files and shows progress
        self._peer_lost = False
        self._exiting = threading.Event()  # the main thread knows that the process must end
        # Called in the heartbeat thread, before the process exits.
        self.on_rank_lost: Callable[[str], None] = lambda reason: None
        self._parent = os.getppid()
        self._heartbeat: Heartbeat | None = None
        if store is not None:
            patience = min(WATCHDOG_SECONDS, timeout / 2)
            self._heartbeat = Heartbeat(
                store, rank=rank, size=size, patience=patience, lost=self._exit_process
            )

    def set_activity(self, activity: str, *, waits: bool = False) -> None:
        """Set the current activity of this rank, for the warning about one that others wait for."""
        if self._heartbeat is not None:
            self._heartbeat.set_activity(activity, waits=waits)

    def all_reduce(self, flat: Tensor, what: str) -> None:
        """Sum a tensor over all ranks, in place."""
        if self.size > 1:
            self.set_activity(what, waits=True)
            self.run_collective(lambda: dist.all_reduce(flat))
            self.set_activity(f"after {what}")
            if self._heartbeat is not None:
                self._heartbeat.is_monitoring = True  # all ranks train now; none is silent for long

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's tensors to all ranks, in place."""
        if self.size > 1:
            for tensor in tensors:
                self.run_collective(functools.partial(dist.broadcast, tensor, src=0))

    def run_on_rank_zero(self, compute: Callable[[], Any], what: str) -> Any:
        """Call a function on rank 0 and return its JSON result on all ranks, which wait for it."""
        if self._store is None or self._heartbeat is None:
            return compute()
        self._num_exchanges += 1
        key = f"result/{self._num_exchanges}"
        if self.is_rank_zero:
            self.set_activity(what)
            return self._publish_result(key, compute)
        return self._receive_result(key, what)

    def run_with_ranks(
        self, compute: Callable[[CallRanks], Any], part: Callable[[Any], Any], what: str
    ) -> Any:
        """Call `compute` on rank 0, which can call `part` on all ranks.

        Return its result everywhere.

        `compute` gets a function that calls `part` with one argument (JSON) on every rank and
        returns the results, by rank.
        """
        if self._store is None or self._heartbeat is None:
            return compute(lambda argument: [part(argument)])
        self._num_exchanges += 1
        key = f"result/{self._num_exchanges}"
        if self.is_rank_zero:
            self.set_activity(what)
            calls = itertools.count()
            return self._publish_result(
                key,
                lambda: compute(
                    lambda argument: self._call_ranks(f"{key}/{next(calls)}", argument, part, what)
                ),
            )
        for number in itertools.count():
            call_key = f"{key}/{number}"
            self.set_activity(f"waiting for rank 0: {what}", waits=True)
            waiting = functools.partial(self._wait_for_key, [key, call_key], 0, what)
            if self.run_collective(waiting) == key:
                break
            self.set_activity(what)
            argument = json.loads(self._store.get(call_key))
            publish = functools.partial(part, argument)
            self._publish_result(f"{call_key}/{self.rank}", publish)
        return self._receive_result(key, what)

    def _call_ranks(
        self, call_key: str, argument: Any, part: Callable[[Any], Any], what: str
    ) -> list[Any]:
        """Call `part` on every rank and return the results."""
        assert self._store is not None, "only several ranks exchange results"
        self._store.set(call_key, json.dumps(argument))
        results = [part(argument)]
        return results + [
            self._receive_result(f"{call_key}/{rank}", what, of=rank)
            for rank in range(1, self.size)
        ]

    def _receive_result(self, key: str, what: str, *, of: int = 0) -> Any:
        """Wait for a rank's result and return it; raise StoppedError if it failed."""
        assert self._store is not None, "only several ranks exchange results"
        self.set_activity(f"waiting for rank {of}: {what}", waits=True)
        self.run_collective(lambda: self._wait_for_key([key], of, what))
        received = json.loads(self._store.get(key))
        if "error" in received:
            raise _rank_lost_error(self.rank, f"rank {of} could not {what}: {received['error']}")
        return received["value"]

    def _wait_for_key(self, keys: list[str], of: int, what: str) -> str:
        """Wait until one of the keys is set and return it.

        Raise StoppedError if the rank is dead.
        """
        assert self._store is not None, "only several ranks exchange results"
        assert self._heartbeat is not None, "several ranks have heartbeats"
        while True:
            for key in keys:
                if self._store.check([key]):
                    return key
            self.check_launcher()
            # A launcher that lost a rank asks the others to stop; then a short silence is enough.
            # Rank 0 may block its heartbeat for a while (learning a vocabulary does); the others
            # only write files.
            longest = self._timeout if of == 0 else min(self._timeout, LOST_RANK_SECONDS)
            patience = (
                min(longest, STOPPING_RANK_TIMEOUT_SECONDS) if signals.stop_requested() else longest
            )
            if self._heartbeat.seconds_silent(of=of) > patience:
                self._peer_lost = True
                raise _rank_lost_error(
                    self.rank,
                    f"no heartbeat of rank {of} for {patience:.0f} s "
                    f"while waiting for it to {what}",
                )
            time.sleep(POLL_SECONDS)

    def _publish_result(self, key: str, compute: Callable[[], Any]) -> Any:
        """Compute and publish a result, or the error, since other ranks wait for it."""
        assert self._store is not None, "only several ranks exchange results"
        try:
            value = compute()
        except BaseException as error:
            self._store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        self._store.set(key, json.dumps({"value": value}))
        return value

    def check_launcher(self) -> None:
        """Raise StoppedError if the launcher is gone: ranks outlive a killed torchrun."""
        if self.size > 1 and os.getppid() != self._parent:
            raise _rank_lost_error(self.rank, "the launcher is gone")

    def _exit_process(self, reason: str) -> None:
        """Exit from the heartbeat thread: NCCL collectives with a dead peer never return."""
        logger.error("%s", _rank_lost_error(self.rank, reason))
        self.on_rank_lost(str(_rank_lost_error(self.rank, reason)))
        if not self._exiting.wait(EXIT_GRACE_SECONDS):
            os._exit(StoppedError.exit_code)

    def close(self) -> None:
        """Leave the group.

        Rank 0 last, since its process holds the store, but without waiting for dead ranks.
        """
        self._exiting.set()
        if self._heartbeat is not None and self._store is not None:
            self._heartbeat.stop()
            with suppress(RuntimeError):
                self._store.set(f"bye/{self.rank}", "")
                all_ranks = [f"bye/{rank}" for rank in range(self.size)]
                deadline = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
                while (
                    self.is_rank_zero
                    and not self._peer_lost
                    and not self._store.check(all_ranks)
                    and time.monotonic() < deadline
                ):
                    time.sleep(POLL_SECONDS)
        if self._store is not None and dist.is_initialized():
            with suppress(RuntimeError):  # peers may have gone first
                dist.destroy_process_group()

    def run_collective(self, call: Callable[[], _Value]) -> _Value:
        """Call a collective; raise StoppedError if a rank died or timed out."""
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
    """Join the process group of torchrun's environment; without one, return a group of one."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return ProcessGroup()
    rank, size = (parse_rank_variable(environment, name) for name in ("RANK", "WORLD_SIZE"))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(
            [
                "distributed training needs MASTER_ADDR and MASTER_PORT; "
                f"found {', '.join(missing)} unset; start it with torchrun"
            ]
        )
    set_parent_death_signal()
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    waiting = threading.Timer(
        WATCHDOG_SECONDS,
        logger.warning,
        (
            "rank %d still waits for the other %d ranks at %s; are all of them started?",
            rank,
            size - 1,
            address,
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
    """Have Linux kill this process when its launcher dies.

    Workers of torchrun survive it otherwise.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            pr_set_pdeathsig = 1
            ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _is_peer_lost(error: RuntimeError) -> bool:
    """Whether an error means that a peer is gone; gloo's errors have no class of their own."""
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("gloo", "Connection", "NCCL", "Timeout", "timed out")
    )


def _rank_lost_error(rank: int, found: str) -> StoppedError:
    return StoppedError(
        "all ranks of a run must stay alive",
        found=f"on rank {rank}: {found}",
        fix="run the same command again; it resumes from the newest checkpoint",
    )
