"""Where a run stands: all that is not a tensor, as plain JSON, so that a resumed run goes on as if nothing had been.

Nothing in it depends on the clock except `seconds`, which only a time budget reads.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from dragoman.data.batches import Cursor

HIGHER_IS_BETTER = {"loss": False, "bleu": True}


@dataclass
class Standing:
    """Counters and decisions of a run; `update` is the number of the last update that was done."""

    steps: int  # planned updates: what the learning rate is a function of
    update: int = 0
    applied: int = 0  # updates that changed the weights
    epoch: int = 0
    batch: int = 0  # the next micro-batch of the epoch
    examples_seen: int = 0
    tokens_seen: int = 0
    validated: int = 0  # the last update that was validated
    metrics: dict[str, float] = field(default_factory=dict)  # of that validation
    best: dict[str, float] = field(default_factory=dict)  # its metrics, and "update"
    stale: int = 0  # validations since the best
    caps: dict[str, int] = field(default_factory=dict)  # what fits into memory, see memory.py
    divergence: dict[str, Any] = field(default_factory=dict)  # see divergence.py
    precision: str = ""
    seconds: float = 0.0  # spent in training, over all starts

    @property
    def cursor(self) -> Cursor:
        """Give the position in the data."""
        return Cursor(self.epoch, self.batch)

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self.epoch, self.batch = cursor

    def judge(self, update: int, metrics: dict[str, float], by: str) -> bool:
        """Take in a validation; True when it is the best so far, which one without a finite figure never is."""
        self.validated, self.metrics = update, {name: value for name, value in metrics.items() if math.isfinite(value)}
        value, best = self.metrics.get(by), self.best.get(by)
        better = value is not None and (best is None or (value > best if HIGHER_IS_BETTER[by] else value < best))
        if better:
            self.best = {**self.metrics, "update": update}
        self.stale = 0 if better else self.stale + 1
        return better

    def reached(self, target_exact: float) -> bool:
        """Whether the newest step was validated and translates this fraction of the sample exactly; never for 0."""
        return 0 < target_exact <= self.metrics.get("exact", 0.0) and self.validated == self.update

    def export_state(self) -> dict[str, Any]:
        """Give everything as JSON."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Standing:
        """Take back what `export_state` gave; what a later version adds has its default."""
        known = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        return cls(**known)
