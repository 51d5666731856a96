"""A sign of life from every process, and a word about the one that the others wait for.

A start that hangs without a word is the oldest complaint about training on several GPUs (OpenNMT-py#1981, #954, #1487;
allenai/allennlp#5088).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Any, Protocol

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5


class KeyStore(Protocol):
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
    """A thread that tells the store what this process is at, and in rank 0 warns when a wait grows long."""

    def __init__(self, store: KeyStore, *, rank: int, size: int, patience: float) -> None:
        self._store, self._rank, self._size, self._patience = store, rank, size, patience
        self._what, self._since = "starting", time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last count, and when we first saw it
        self._stop = threading.Event()
        self._waits = self._warned = False
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def doing(self, what: str, *, waits: bool = False) -> None:
        """Note what this process begins now, and whether it waits for others in it."""
        self._what, self._since, self._waits, self._warned = what, time.monotonic(), waits, False

    def silence(self, of: int) -> float:
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
        self._thread.join(timeout=4 * BEAT_SECONDS)

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_SECONDS if count else 0.0):
            count += 1
            waited = time.monotonic() - self._since
            try:
                self._store.set(f"beat/{self._rank}", json.dumps({"count": count, "doing": self._what, "seconds": round(waited, 1)}))
                if self._rank == 0 and self._waits and not self._warned:
                    others = self.others()  # asked at every beat of a wait, so that a rank's silence is known when it matters
                    self._warned = waited > self._patience
                    if self._warned:
                        log.warning("rank 0 has waited for %.0f s (%s); %s", waited, self._what, others)
            except RuntimeError:
                return  # the store is gone, and with it the run; the collective that fails next says so

    def others(self) -> str:
        """Describe what every other rank said last."""
        words = []
        for rank in range(self._size):
            if rank != self._rank:
                beat = self._read(rank)
                doing = f"{beat['doing']} for {beat['seconds']} s" if beat else "never heard of"
                words.append(f"rank {rank} {doing}, silent for {self.silence(of=rank):.0f} s")
        return "; ".join(words)

    def _read(self, rank: int) -> dict[str, Any]:
        key = f"beat/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else {}
