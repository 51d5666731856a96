"""A sign of life from every process, and a word about the one that the others wait for.

A start that hangs without a word is the oldest complaint about training on several GPUs (OpenNMT-py#1981, #954, #1487;
allenai/allennlp#5088).
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
LOST_RANK_SECONDS = 20.0  # silence after which a rank that was training is dead


class KeyValueStore(Protocol):
    """What all processes can read and write: torch's rendezvous store, as far as we use it."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Say whether all the keys are there."""
        ...


class Heartbeat:
    """A thread that tells the store what this process is at, and in rank 0 warns when a wait grows long.

    While it is `watching`, a wait that cannot end is given up: rank 0 minds all the others and tells everybody whom it lost, the others
    mind rank 0 alone. `lost` is called once, with the reason, in this thread.
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
        self._store, self._rank, self._size, self._patience, self._on_lost = (
            store,
            rank,
            size,
            patience,
            lost,
        )
        self.is_monitoring = False
        self._activity, self._since = "starting", time.monotonic()
        self._seen: dict[
            int, tuple[int, float]
        ] = {}  # rank -> its last count, and when we first saw it
        self._stop = threading.Event()
        self._is_waiting = self._warned = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def doing(self, what: str, *, waits: bool = False) -> None:
        """Note what this process begins now, and whether it waits for others in it."""
        self._activity, self._since, self._is_waiting, self._warned = (
            what,
            time.monotonic(),
            waits,
            False,
        )

    def seconds_silent(self, of: int) -> float:
        """Say for how many seconds a rank's count has stood still, as seen from here."""
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
                        {"count": count, "doing": self._activity, "seconds": round(waited, 1)}
                    ),
                )
                if self._rank == 0 and self._is_waiting and not self._warned:
                    others = self.others()  # asked at every beat of a wait, so that a rank's silence is known when it matters
                    self._warned = waited > self._patience
                    if self._warned:
                        logger.warning(
                            "rank 0 has waited for %.0f s (%s); %s", waited, self._activity, others
                        )
                reason = self._find_lost_rank() if self._is_waiting and self.is_monitoring else ""
            except RuntimeError as error:  # the store is gone, and with it the run
                reason = f"the ranks' meeting place is gone ({' '.join(str(error).split())[:100]})"
            if reason:
                if self._on_lost is not None and not self._stop.is_set():
                    self._on_lost(reason)
                return

    def _find_lost_rank(self) -> str:
        """Say which rank is dead, if one is."""
        if self._rank and self._store.check(["lost"]):
            return self._store.get("lost").decode()
        for rank in range(1, self._size) if self._rank == 0 else (0,):
            if self.seconds_silent(of=rank) > LOST_RANK_SECONDS:
                reason = (
                    f"no sign of rank {rank} for {LOST_RANK_SECONDS:.0f} s during {self._activity}"
                )
                self._store.set("lost", reason)
                return reason
        return ""

    def others(self) -> str:
        """Describe what every other rank said last."""
        words = []
        for rank in range(self._size):
            if rank != self._rank:
                beat = self._read(rank)
                doing = f"{beat['doing']} for {beat['seconds']} s" if beat else "never heard of"
                words.append(
                    f"rank {rank} {doing}, silent for {self.seconds_silent(of=rank):.0f} s"
                )
        return "; ".join(words)

    def _read(self, rank: int) -> dict[str, Any]:
        key = f"beat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}
