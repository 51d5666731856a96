"""Heartbeats of the ranks: warn about a rank that the others wait for, and detect a dead one.

A start that hangs without a message is a frequent complaint about multi-GPU training
(OpenNMT-py#1981, #954, #1487; allenai/allennlp#5088).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
LOST_RANK_SECONDS = 20.0  # without a heartbeat, after which a training rank counts as dead


class KeyValueStore(Protocol):
    """The methods of torch's rendezvous store that we use."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        ...


class Heartbeat:
    """A thread that writes this rank's activity to the store; rank 0 warns about long waits.

    While `is_monitoring`, a wait for a dead rank ends: rank 0 watches all others and publishes
    which one was lost; the others watch rank 0. `lost` is called once, with the reason, in this
    thread.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        size: int,
        patience: float,
        lost: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._patience, self._on_lost = patience, lost
        self.is_monitoring = False
        self._activity, self._since = "starting", time.monotonic()
        # Rank -> its last heartbeat count, and when we first saw it.
        self._seen: dict[int, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._is_waiting = self._warned = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def set_activity(self, activity: str, *, waits: bool = False) -> None:
        """Set the current activity of this rank, and whether it waits for others."""
        self._activity, self._since = activity, time.monotonic()
        self._is_waiting, self._warned = waits, False

    def seconds_silent(self, of: int) -> float:
        """Return the seconds since a rank's heartbeat count last changed, as seen from here."""
        count = int(self._read(of).get("count", -1))
        known, since = self._seen.get(of, (None, 0.0))
        if known != count:
            self._seen[of] = (count, time.monotonic())
            return 0.0
        return time.monotonic() - since

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(timeout=4 * HEARTBEAT_SECONDS)

    def _run(self) -> None:
        count = 0
        while not self._stop.wait(HEARTBEAT_SECONDS if count else 0.0):
            count += 1
            waited = time.monotonic() - self._since
            try:
                self._store.set(
                    f"beat/{self._rank}",
                    json.dumps(
                        {"count": count, "activity": self._activity, "seconds": round(waited, 1)}
                    ),
                )
                if self._rank == 0 and self._is_waiting and not self._warned:
                    others = self.describe_other_ranks()  # at every beat, to measure their silence
                    self._warned = waited > self._patience
                    if self._warned:
                        logger.warning(
                            "rank 0 has waited for %.0f s (%s); %s", waited, self._activity, others
                        )
                reason = self._find_lost_rank() if self._is_waiting and self.is_monitoring else ""
            except RuntimeError as error:  # the store is gone, and the run with it
                reason = f"the rendezvous store is gone ({' '.join(str(error).split())[:100]})"
            if reason:
                if self._on_lost is not None and not self._stop.is_set():
                    self._on_lost(reason)
                return

    def _find_lost_rank(self) -> str:
        """Return which rank is dead and why, or an empty string."""
        if self._rank and self._store.check(["lost"]):
            return self._store.get("lost").decode()
        for rank in range(1, self._size) if self._rank == 0 else (0,):
            if self.seconds_silent(of=rank) > LOST_RANK_SECONDS:
                silence = f"no heartbeat of rank {rank} for {LOST_RANK_SECONDS:.0f} s"
                reason = f"{silence} during {self._activity}"
                self._store.set("lost", reason)
                return reason
        return ""

    def describe_other_ranks(self) -> str:
        """Return the last known activity of every other rank."""
        descriptions = []
        for rank in range(self._size):
            if rank != self._rank:
                beat = self._read(rank)
                activity = (
                    f"{beat['activity']} for {beat['seconds']} s" if beat else "never connected"
                )
                descriptions.append(
                    f"rank {rank}: {activity}, silent for {self.seconds_silent(of=rank):.0f} s"
                )
        return "; ".join(descriptions)

    def _read(self, rank: int) -> dict[str, Any]:
        key = f"beat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}
