"""The run's accounts: every update counted once, and the state that a checkpoint carries beside its tensors."""

from __future__ import annotations

import logging
from typing import Any

from dragoman.config import TrainConfig
from dragoman.errors import DivergedError
from dragoman.training.divergence import DivergenceWatch
from dragoman.training.feed import Update
from dragoman.training.memory import MemoryGuard
from dragoman.training.precision import Precision
from dragoman.training.standing import Standing
from dragoman.training.update import Figures

log = logging.getLogger(__name__)


class Ledger:
    """Where a run stands, what was skipped, and what fits into memory."""

    def __init__(self, config: TrainConfig, precision: Precision, *, replanned: bool) -> None:
        self._config, self._precision = config, precision
        self._keep_plan = replanned or bool(config.budget)
        self.standing = Standing(steps=config.steps)
        self.divergence = DivergenceWatch()
        self.guard = MemoryGuard()

    def count(self, update: Update, learning_rate: float, figures: Figures) -> dict[str, Any]:
        """Count an update in, and turn it into a line of the log; "diverged" in it means that the rule has struck."""
        standing = self.standing
        standing.examples_seen += sum(len(examples) for examples in update.examples)
        standing.tokens_seen += figures.tokens
        record: dict[str, Any] = {"update": update.number, "lr": learning_rate}
        if update.number in self.divergence.excluded:
            return record | {"excluded": True}
        record |= {"loss": figures.total, "nll": figures.nll, "norm": figures.norm, "tokens": figures.tokens}
        record["padding"] = 1 - figures.tokens / max(figures.slots, 1)
        if figures.finite:
            standing.applied += 1
            mean = self.divergence.mean
            if self.divergence.accept(figures.total):
                log.warning("the loss of update %d stands out: %.3f after a mean of %.3f", update.number, figures.total, mean)
            return record
        # Numbers of examples, never their text.
        examples = [int(example) for examples in update.examples for example in examples]
        named = f"{len(examples):,} example{'' if len(examples) == 1 else 's'}"
        log.warning("update %d is not finite and was skipped; the log names its %s", update.number, named)
        return record | {"skipped": True, "examples": examples} | ({"diverged": True} if self.divergence.skip(update.number) else {})

    def export_state(self) -> dict[str, Any]:
        """Give everything as JSON."""
        standing = self.standing
        standing.caps, standing.divergence, standing.precision = self.guard.caps, self.divergence.export_state(), self._precision.name
        return standing.export_state()

    def take(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or from the start without one."""
        planned = self.standing.steps
        self.standing = Standing.from_state(state) if state is not None else Standing(steps=planned)
        if state is None:
            return
        if not self._keep_plan:
            self.standing.steps = self._config.steps  # a person may ask for more updates, or fewer, at a resume
        if self.standing.precision and self.standing.precision != self._precision.name:
            log.warning("resume is not bit-exact: precision %s -> %s", self.standing.precision, self._precision.name)
        self.guard.caps.clear()
        self.guard.caps.update(self.standing.caps)
        self.divergence = DivergenceWatch(self.standing.divergence)

    def may_roll_back(self) -> None:
        """Refuse a second return to a checkpoint."""
        recent = self.divergence.recent
        if self.divergence.rolled_back:
            raise DivergedError(
                "training must stay within finite numbers",
                found=f"{len(recent)} updates that did not, the last of them {recent[-1]}, after one return to a checkpoint",
                fix="lower train.learning_rate or set train.clip=1, then resume: the newest checkpoint is intact",
            )

    def roll_back(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, passing over the updates that were skipped since."""
        before, last = self.divergence, self.standing.update
        self.take(state)
        self.divergence = before.roll_back(self.standing.divergence)
        log.warning("updates up to %d would not stay finite; back to %d, passing over %d", last, self.standing.update, len(before.recent))
