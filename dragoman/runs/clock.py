"""Keeping a run within its time: how much is left, and how many updates that makes."""

from __future__ import annotations

import time
from collections.abc import Callable

from dragoman.errors import ConfigError
from dragoman.training.checkpoint import RunDirectory
from dragoman.training.meter import duration

CLOSING_SHARE, CLOSING_SECONDS = 0.03, 8.0  # of the budget, and more: to score the finished model and to write it
WRITING_SECONDS = 6.0  # of these, at the very end: the bundle, its golden vectors, the curves


class Clock:
    """A time budget that began when the command did; without one there is always time."""

    def __init__(self, budget: float, *, spent: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began, self._spent, self.budget = now, now(), spent, budget
        self._first: tuple[int, float] | None = None
        self.pace = 0.0  # seconds a step, as `updates` last reckoned with

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self.budget > 0

    def spend(self, seconds: float) -> None:
        """Count time that earlier starts of the same run took."""
        self._spent += seconds

    def elapsed(self) -> float:
        """Say how long it has been, over all starts."""
        return self._spent + self._now() - self._began

    def closing(self) -> float:
        """Say how many seconds are kept apart for the end."""
        return CLOSING_SHARE * self.budget + CLOSING_SECONDS

    def left(self) -> float:
        """Say how many seconds training may still take, closing time kept apart."""
        if not self.limited:
            return float("inf")
        return self.budget - self.closing() - self.elapsed()

    def too_short(self) -> ConfigError:
        """Say that the budget went into everything but training."""
        needed = duration(self.elapsed() + self.closing())
        problem = f"--budget must leave time to train; found {duration(self.budget)}, and {needed} go into preparing and writing; give more"
        return ConfigError([problem])

    def left_to_score(self) -> float:
        """Say how many seconds scoring the finished model may take."""
        if not self.limited:
            return float("inf")
        return max(0.0, self.budget - CLOSING_SHARE / 3 * self.budget - WRITING_SECONDS - self.elapsed())

    def updates(self, done: int, seconds_an_update: float, *, most: int, overhead: Callable[[int], float] | None = None) -> int:
        """Return how many steps there will be in all at the pace so far, validations and checkpoints included.

        Before the first step nothing but `seconds_an_update` is known; `overhead` estimates what so many steps take besides.
        """
        now = self._now()
        if self._first is None:
            self._first = (done, now)
            steps = first = self.left() / max(1.05 * seconds_an_update, 1e-9)
            for _ in range(8 if overhead is not None else 0):  # the overhead depends on the steps, and these on it
                assert overhead is not None, "the loop is empty without"
                besides = overhead(max(1, int(steps)))
                steps = (steps + first * max(0.0, 1 - besides / max(self.left(), 1e-9))) / 2
            self.pace = max(self.left() / max(steps, 1.0), 1e-9)
        else:
            before, then = self._first
            self.pace = max((now - then) / max(done - before, 1), 1e-9)
        return min(most, done + max(0, int(self.left() / self.pace)))


def seconds_spent(run: RunDirectory) -> float:
    """Ask the newest checkpoint how long the run has trained."""
    checkpoint = next(run.verified(), None)
    return float(checkpoint.standing.get("seconds", 0.0)) if checkpoint else 0.0
