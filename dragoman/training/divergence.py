"""Updates that leave the finite numbers: skipped, counted, and when they do not end, the end of the run.

The rule is that of `docs/reliability.md`: ten skips in a row, or more than one in a hundred of the last thousand
updates, roll the run back to its newest checkpoint with the offending updates passed over; a second time it stops.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

IN_A_ROW = 10
WINDOW = 1000
SHARE = 0.01
SPIKE_SIGMAS = 6.0
SPIKE_HORIZON = 500  # updates that the running mean and variance of the loss look back on


class DivergenceWatch:
    """Counts what was skipped and says when that is too much; its state is plain JSON."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self.skipped = int(state.get("skipped", 0))
        self.recent: deque[int] = deque(state.get("recent", ()))  # numbers of the updates skipped within the window
        self.row = int(state.get("row", 0))
        self.excluded: set[int] = set(state.get("excluded", ()))  # updates that a rollback passes over
        self.rolled_back = bool(state.get("rolled_back", False))
        self.mean, self.variance, self.seen = (float(state.get(key, 0.0)) for key in ("mean", "variance", "seen"))
        self.suspect = bool(state.get("suspect", False))

    def skip(self, update: int) -> bool:
        """Count a skipped update; True when the rule says that training has diverged."""
        self.skipped += 1
        self.row += 1
        self.recent.append(update)
        while self.recent and self.recent[0] <= update - WINDOW:
            self.recent.popleft()
        return self.row >= IN_A_ROW or len(self.recent) > SHARE * WINDOW

    def accept(self, loss: float) -> bool:
        """Count an applied update; True when its loss stands more than six standard deviations above the mean."""
        self.row = 0
        deviation = loss - self.mean
        spike = self.seen >= SPIKE_HORIZON and deviation > SPIKE_SIGMAS * math.sqrt(self.variance)
        self.suspect = self.suspect or spike
        self.seen += 1
        share = 1 / min(self.seen, SPIKE_HORIZON)
        self.mean += share * deviation
        self.variance = (1 - share) * (self.variance + share * deviation * deviation)
        return spike

    def roll_back(self, published: dict[str, Any]) -> DivergenceWatch:
        """Make the watch for a second try: counters as published, but knowing what to pass over, and that this was the one chance."""
        again = DivergenceWatch(published)
        again.excluded |= set(self.recent)
        again.rolled_back = True
        again.row = 0
        again.recent.clear()
        return again

    def export_state(self) -> dict[str, Any]:
        """Give the state as JSON."""
        return {
            "skipped": self.skipped,
            "recent": list(self.recent),
            "row": self.row,
            "excluded": sorted(self.excluded),
            "rolled_back": self.rolled_back,
            "mean": self.mean,
            "variance": self.variance,
            "seen": self.seen,
            "suspect": self.suspect,
        }
