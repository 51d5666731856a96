"""Time budget of a run: the time left and the number of steps that fit into it.

`TrainingRun` in training_run.py plans the steps with it at the start (`_choose_steps`) and again at
every checkpoint; `Trainer` in training/trainer.py stops before the deadline. The model size for a
budget is chosen by `choose_config` of auto_config.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import ConfigError
from dragoman.training.progress_display import format_duration
from dragoman.training.trainer_state import read_trainer_state

# Reserved after training, to score the final model and write the bundle: a fraction of the
# budget and a constant. The last seconds are for the bundle, golden vectors and curves.
CLOSING_FRACTION, CLOSING_SECONDS = 0.03, 8.0
WRITING_SECONDS = 6.0


class TimeBudget:
    """A time budget in seconds, from the start of the command; 0 is unlimited."""

    def __init__(
        self, seconds: float, *, spent: float = 0.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now, self._began, self._spent, self.seconds = now, now(), spent, seconds
        self._first: tuple[int, float] | None = None
        self.seconds_per_step = 0.0  # with validations and checkpoints, from the last plan_steps

    @property
    def is_limited(self) -> bool:
        """Whether there is a time budget."""
        return self.seconds > 0

    def spend(self, seconds: float) -> None:
        """Add the time of earlier processes of the same run."""
        self._spent += seconds

    def elapsed(self) -> float:
        """Return the seconds used so far, over all processes of the run."""
        return self._spent + self._now() - self._began

    def closing_seconds(self) -> float:
        """Return the seconds reserved after training."""
        return CLOSING_FRACTION * self.seconds + CLOSING_SECONDS

    def seconds_left(self) -> float:
        """Return the seconds left for training."""
        if not self.is_limited:
            return float("inf")
        return self.seconds - self.closing_seconds() - self.elapsed()

    def too_short_error(self, seconds_per_step: float = 0.0) -> ConfigError:
        """Return the error for a budget that leaves no time to train, or none for a slow step."""
        needed = format_duration(self.elapsed() + self.closing_seconds())
        step = (
            f", and one training step about {format_duration(seconds_per_step)}"
            if seconds_per_step >= 1
            else ""
        )
        return ConfigError(
            [
                f"the time budget must leave time to train; found {format_duration(self.seconds)}, "
                f"of which preparation and writing take {needed}{step}; increase it, or choose a "
                "smaller model"
            ]
        )

    def scoring_seconds_left(self) -> float:
        """Return the seconds left for scoring the final model."""
        if not self.is_limited:
            return float("inf")
        return max(
            0.0,
            self.seconds - CLOSING_FRACTION / 3 * self.seconds - WRITING_SECONDS - self.elapsed(),
        )

    def plan_steps(
        self,
        done: int,
        seconds_per_step: float,
        *,
        most: int,
        overhead: Callable[[int], float] | None = None,
    ) -> int:
        """Return the total number of steps, at most `most`, that fits into the time budget.

        The first call uses `seconds_per_step`, and `overhead` for the seconds of validations and
        checkpoints of a number of steps; later calls use the measured time since then.
        """
        now = self._now()
        if self._first is None:
            self._first = (done, now)
            steps = first = self.seconds_left() / max(1.05 * seconds_per_step, 1e-9)
            if overhead is not None:
                for _ in range(8):  # fixed point: the overhead depends on the steps
                    fraction = overhead(max(1, int(steps))) / max(self.seconds_left(), 1e-9)
                    steps = (steps + first * max(0.0, 1 - fraction)) / 2
            self.seconds_per_step = max(self.seconds_left() / max(steps, 1.0), 1e-9)
        else:
            before, then = self._first
            self.seconds_per_step = max((now - then) / max(done - before, 1), 1e-9)
        return min(most, done + max(0, int(self.seconds_left() / self.seconds_per_step)))


def trained_seconds(run: RunDirectory) -> float:
    """Return the training time recorded in the latest checkpoint."""
    checkpoint = next(run.verified_checkpoints(), None)
    return float(read_trainer_state(checkpoint).get("seconds", 0.0)) if checkpoint else 0.0
