"""Training state: step counters, best metrics, divergence detection; everything of a run that is not a tensor."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from dragoman.checkpoint.checkpoint import Checkpoint, has_json_type
from dragoman.config import TrainConfig
from dragoman.data.batches import Cursor
from dragoman.errors import DivergedError
from dragoman.storage.manifest import corrupt_file_error
from dragoman.training.data_loader import GlobalBatch
from dragoman.training.mixed_precision import Precision
from dragoman.training.train_step import OOMSplitter, StepMetrics

HIGHER_IS_BETTER = {"loss": False, "bleu": True}


@dataclass
class TrainState:
    """Counters and decisions of a run; `update` is the number of the last update that was done."""

    steps: int  # planned updates: what the learning rate is a function of
    step: int = 0
    applied_steps: int = 0  # updates that changed the weights
    epoch: int = 0
    batch: int = 0  # the next micro-batch of the epoch
    examples_seen: int = 0
    tokens_seen: int = 0
    validated: int = 0  # the last update that was validated
    metrics: dict[str, float] = field(default_factory=dict)  # of that validation
    best: dict[str, float] = field(default_factory=dict)  # its metrics, and "update"
    validations_since_best: int = 0  # validations since the best
    token_limits: dict[str, int] = field(
        default_factory=dict
    )  # what fits into memory, see memory.py
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

    def record_validation(self, step: int, metrics: dict[str, float], by: str) -> bool:
        """Take in a validation; True when it is the best so far, which one without a finite figure never is."""
        self.validated, self.metrics = (
            step,
            {name: value for name, value in metrics.items() if math.isfinite(value)},
        )
        value, best = self.metrics.get(by), self.best.get(by)
        better = value is not None and (
            best is None or (value > best if HIGHER_IS_BETTER[by] else value < best)
        )
        if better:
            self.best = {**self.metrics, "step": step}
        self.validations_since_best = 0 if better else self.validations_since_best + 1
        return better

    def has_reached(self, target_exact: float) -> bool:
        """Whether the newest step was validated and translates this fraction of the sample exactly; never for 0."""
        return 0 < target_exact <= self.metrics.get("exact", 0.0) and self.validated == self.step

    def state_dict(self) -> dict[str, Any]:
        """Give everything as JSON."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> TrainState:
        """Take back what `export_state` gave; what a later version adds has its default."""
        known = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        return cls(**known)


MAX_CONSECUTIVE_SKIPS = 10
SKIP_WINDOW = 1000
MAX_SKIP_RATE = 0.01
SPIKE_SIGMAS = 6.0
SPIKE_WINDOW = 500  # updates that the running mean and variance of the loss look back on


class DivergenceDetector:
    """Counts what was skipped and says when that is too much; its state is plain JSON."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self.total_skips = int(state.get("total_skips", 0))
        self.recent_skips: deque[int] = deque(
            state.get("recent_skips", ())
        )  # numbers of the updates skipped within the window
        self.consecutive_skips = int(state.get("consecutive_skips", 0))
        self.excluded_steps: set[int] = set(
            state.get("excluded_steps", ())
        )  # updates that a rollback passes over
        self.rolled_back = bool(state.get("rolled_back", False))
        self.mean, self.variance, self.seen = (
            float(state.get(key, 0.0)) for key in ("mean", "variance", "seen")
        )
        self.suspect = bool(state.get("suspect", False))

    def record_skip(self, step: int) -> bool:
        """Count a skipped update; True when the rule says that training has diverged."""
        self.total_skips += 1
        self.consecutive_skips += 1
        self.recent_skips.append(step)
        while self.recent_skips and self.recent_skips[0] <= step - SKIP_WINDOW:
            self.recent_skips.popleft()
        return (
            self.consecutive_skips >= MAX_CONSECUTIVE_SKIPS
            or len(self.recent_skips) > MAX_SKIP_RATE * SKIP_WINDOW
        )

    def record_loss(self, loss: float) -> bool:
        """Count an applied update; True when its loss stands more than six standard deviations above the mean."""
        self.consecutive_skips = 0
        deviation = loss - self.mean
        spike = self.seen >= SPIKE_WINDOW and deviation > SPIKE_SIGMAS * math.sqrt(self.variance)
        self.suspect = self.suspect or spike
        self.seen += 1
        share = 1 / min(self.seen, SPIKE_WINDOW)
        self.mean += share * deviation
        self.variance = (1 - share) * (self.variance + share * deviation * deviation)
        return spike

    def roll_back(self, published: dict[str, Any]) -> DivergenceDetector:
        """Make the watch for a second try: counters as published, but knowing what to pass over, and that this was the one chance."""
        restored = DivergenceDetector(published)
        restored.excluded_steps |= set(self.recent_skips)
        restored.rolled_back = True
        restored.consecutive_skips = 0
        restored.recent_skips.clear()
        return restored

    def state_dict(self) -> dict[str, Any]:
        """Give the state as JSON."""
        return {
            "total_skips": self.total_skips,
            "recent_skips": list(self.recent_skips),
            "consecutive_skips": self.consecutive_skips,
            "excluded_steps": sorted(self.excluded_steps),
            "rolled_back": self.rolled_back,
            "mean": self.mean,
            "variance": self.variance,
            "seen": self.seen,
            "suspect": self.suspect,
        }


logger = logging.getLogger(__name__)


class TrainStateTracker:
    """Where a run stands, what was skipped, and what fits into memory."""

    def __init__(self, config: TrainConfig, precision: Precision, *, replanned: bool) -> None:
        self._config, self._precision = config, precision
        self._keep_planned_steps = replanned or bool(config.time_budget)
        self.train_state = TrainState(steps=config.steps)
        self.divergence = DivergenceDetector()
        self.oom_splitter = OOMSplitter()

    def advance(
        self, update: GlobalBatch, learning_rate: float, step_metrics: StepMetrics
    ) -> dict[str, Any]:
        """Count an update in, and turn it into a line of the log; "diverged" in it means that the rule has struck."""
        train_state = self.train_state
        train_state.examples_seen += sum(len(examples) for examples in update.examples)
        train_state.tokens_seen += step_metrics.tokens
        record: dict[str, Any] = {"step": update.number, "lr": learning_rate}
        if update.number in self.divergence.excluded_steps:
            return record | {"excluded": True}
        record |= {
            "loss": step_metrics.total,
            "nll": step_metrics.nll,
            "grad_norm": step_metrics.grad_norm,
            "tokens": step_metrics.tokens,
        }
        record["padding"] = 1 - step_metrics.tokens / max(step_metrics.padded_tokens, 1)
        if step_metrics.is_finite:
            train_state.applied_steps += 1
            mean = self.divergence.mean
            if self.divergence.record_loss(step_metrics.total):
                logger.warning(
                    "the loss of update %d stands out: %.3f after a mean of %.3f",
                    update.number,
                    step_metrics.total,
                    mean,
                )
            return record
        # Numbers of examples, never their text.
        examples = [int(example) for examples in update.examples for example in examples]
        named = f"{len(examples):,} example{'' if len(examples) == 1 else 's'}"
        logger.warning(
            "update %d is not finite and was skipped; the log names its %s", update.number, named
        )
        return (
            record
            | {"skipped": True, "examples": examples}
            | ({"diverged": True} if self.divergence.record_skip(update.number) else {})
        )

    def state_dict(self) -> dict[str, Any]:
        """Give everything as JSON."""
        train_state = self.train_state
        train_state.token_limits, train_state.divergence, train_state.precision = (
            self.oom_splitter.token_limits,
            self.divergence.state_dict(),
            self._precision.name,
        )
        return train_state.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or from the start without one."""
        planned = self.train_state.steps
        self.train_state = (
            TrainState.from_state_dict(state) if state is not None else TrainState(steps=planned)
        )
        if state is None:
            return
        if not self._keep_planned_steps:
            self.train_state.steps = (
                self._config.steps
            )  # a person may ask for more updates, or fewer, at a resume
        if self.train_state.precision and self.train_state.precision != self._precision.name:
            logger.warning(
                "resume is not bit-exact: precision %s -> %s",
                self.train_state.precision,
                self._precision.name,
            )
        self.oom_splitter.token_limits.clear()
        self.oom_splitter.token_limits.update(self.train_state.token_limits)
        self.divergence = DivergenceDetector(self.train_state.divergence)

    def require_first_rollback(self) -> None:
        """Refuse a second return to a checkpoint."""
        recent_skips = self.divergence.recent_skips
        if self.divergence.rolled_back:
            raise DivergedError(
                "training must stay within finite numbers",
                found=f"{len(recent_skips)} updates that did not, the last of them {recent_skips[-1]}, after one return to a checkpoint",
                fix="lower train.learning_rate or set train.max_grad_norm=1, then resume: the newest checkpoint is intact",
            )

    def roll_back(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, passing over the updates that were skipped since."""
        before, last = self.divergence, self.train_state.step
        self.load_state_dict(state)
        self.divergence = before.roll_back(self.train_state.divergence)
        logger.warning(
            "updates up to %d would not stay finite; back to %d, passing over %d",
            last,
            self.train_state.step,
            len(before.recent_skips),
        )


_DIVERGENCE_TYPES: dict[str, Any] = {
    **dict.fromkeys(("total_skips", "consecutive_skips"), int),
    **dict.fromkeys(("recent_skips", "excluded_steps"), list[int]),
    **dict.fromkeys(("mean", "variance", "seen"), float),
    **dict.fromkeys(("rolled_back", "suspect"), bool),
}


def read_train_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's state; raise CorruptError where a value has a type that the trainer never writes."""
    state = checkpoint.state
    for name, problem in invalid_state_fields(state):
        raise corrupt_file_error(checkpoint.path / "state.json", f"{name} {problem}")
    return state


def invalid_state_fields(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names in a checkpoint's state whose values are of another type than a run writes, with what was found."""
    hints = get_type_hints(TrainState)
    for name, value in state.items():
        if name in hints and not has_json_type(value, hints[name]):
            yield name, f"{value!r:.100}"
    divergence = state.get("divergence")
    for name, value in divergence.items() if isinstance(divergence, dict) else ():
        if not has_json_type(value, _DIVERGENCE_TYPES.get(name, Any)):
            yield f"divergence.{name}", f"{value!r:.100}"
    if "steps" not in state:
        yield "steps", "missing"
