"""Keeping a run within its time: how much is left, and how many updates that makes."""

from __future__ import annotations

import time
from collections.abc import Callable

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import ConfigError
from dragoman.training.progress import format_duration
from dragoman.training.train_state import read_train_state

CLOSING_FRACTION, CLOSING_SECONDS = (
    0.03,
    8.0,
)  # of the budget, and more: to score the finished model and to write it
WRITING_SECONDS = 6.0  # of these, at the very end: the bundle, its golden vectors, the curves


class TimeBudget:
    """A time budget that began when the command did; without one there is always time."""

    def __init__(
        self, budget: float, *, spent: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now, self._began, self._spent, self.budget = now, now(), spent, budget
        self._first: tuple[int, float] | None = None
        self.seconds_per_step = 0.0  # seconds a step, as `updates` last reckoned with

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self.budget > 0

    def spend(self, seconds: float) -> None:
        """Count time that earlier starts of the same run took."""
        self._spent += seconds

    def elapsed(self) -> float:
        """Say how long it has been, over all starts."""
        return self._spent + self._now() - self._began

    def closing_seconds(self) -> float:
        """Say how many seconds are kept apart for the end."""
        return CLOSING_FRACTION * self.budget + CLOSING_SECONDS

    def seconds_left(self) -> float:
        """Say how many seconds training may still take, closing time kept apart."""
        if not self.is_limited:
            return float("inf")
        return self.budget - self.closing_seconds() - self.elapsed()

    def too_short_error(self) -> ConfigError:
        """Say that the budget went into everything but training."""
        needed = format_duration(self.elapsed() + self.closing_seconds())
        problem = f"--budget must leave time to train; found {format_duration(self.budget)}, and {needed} go into preparing and writing; give more"
        return ConfigError([problem])

    def scoring_seconds_left(self) -> float:
        """Say how many seconds scoring the finished model may take."""
        if not self.is_limited:
            return float("inf")
        return max(
            0.0, self.budget - CLOSING_FRACTION / 3 * self.budget - WRITING_SECONDS - self.elapsed()
        )

    def plan_steps(
        self,
        done: int,
        seconds_an_update: float,
        *,
        most: int,
        overhead: Callable[[int], float] | None = None,
    ) -> int:
        """Return how many steps there will be in all at the pace so far, validations and checkpoints included.

        Before the first step nothing but `seconds_an_update` is known; `overhead` estimates what so many steps take besides.
        """
        now = self._now()
        if self._first is None:
            self._first = (done, now)
            steps = first = self.seconds_left() / max(1.05 * seconds_an_update, 1e-9)
            for _ in range(
                8 if overhead is not None else 0
            ):  # the overhead depends on the steps, and these on it
                assert overhead is not None, "the loop is empty without"
                besides = overhead(max(1, int(steps)))
                steps = (steps + first * max(0.0, 1 - besides / max(self.seconds_left(), 1e-9))) / 2
            self.seconds_per_step = max(self.seconds_left() / max(steps, 1.0), 1e-9)
        else:
            before, then = self._first
            self.seconds_per_step = max((now - then) / max(done - before, 1), 1e-9)
        return min(most, done + max(0, int(self.seconds_left() / self.seconds_per_step)))


def trained_seconds(run: RunDirectory) -> float:
    """Ask the newest checkpoint how long the run has trained."""
    checkpoint = next(run.verified_checkpoints(), None)
    return float(read_train_state(checkpoint).get("seconds", 0.0)) if checkpoint else 0.0
