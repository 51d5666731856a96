"""Counts, rates and estimates, kept apart from how they are shown."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

Clock = Callable[[], float]

WINDOW_SECONDS = 20.0  # what a rate looks back on: long enough to be calm, short enough to be true
MOST_MARKS = 256


class Meter:
    """Counts towards a total and knows how fast it goes."""

    def __init__(self, total: int | None, *, done: int = 0, clock: Clock = time.monotonic) -> None:
        self.total, self.done = total, done
        self._clock = clock
        self.started = clock()
        self._marks: deque[tuple[float, int]] = deque([(self.started, done)], maxlen=MOST_MARKS)

    def advance(self, count: int = 1) -> None:
        """Count more of it."""
        self.done += count
        now = self._clock()
        # At most MOST_MARKS marks over the window, whatever the pace.
        if now - self._marks[-1][0] >= WINDOW_SECONDS / MOST_MARKS:
            self._marks.append((now, self.done))
            while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_SECONDS:
                self._marks.popleft()

    @property
    def seconds(self) -> float:
        """Say how long it has been going."""
        return self._clock() - self.started

    @property
    def rate(self) -> float:
        """Say how many a second, lately."""
        then, before = self._marks[0]
        passed = self._clock() - then
        return (self.done - before) / passed if passed > 0 else 0.0

    @property
    def left(self) -> float | None:
        """Estimate the seconds that are left; None while nothing can be said."""
        if self.total is None or self.rate <= 0:
            return None
        return max(self.total - self.done, 0) / self.rate


def duration(seconds: float) -> str:
    """Write seconds as a person would: "45 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
