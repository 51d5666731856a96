"""Training state: step counters, best metrics, divergence detection; not the tensors.

`Trainer` restores it. There is no state of a random generator in it: `TrainStep` seeds each
micro-batch from the seed, the step and its index.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from dragoman.checkpoint.checkpoint_io import Checkpoint, has_json_type
from dragoman.data.batch_plan import Cursor
from dragoman.errors import DivergedError
from dragoman.storage.manifest import corrupt_file_error
from dragoman.training.data_loader import GlobalBatch
from dragoman.training.train_step import StepMetrics

logger = logging.getLogger(__name__)

LOWER_IS_BETTER = {
    "loss",
    "perplexity",
    "pseudo_perplexity",
    "bits_per_byte",
    "mae",
    "mse",
    "calibration_error",
    "log_likelihood_gap",
}

MAX_CONSECUTIVE_SKIPS = 10
SKIP_WINDOW = 1000
MAX_SKIP_RATE = 0.01
SPIKE_SIGMAS = 6.0
SPIKE_WINDOW = 500  # steps of the running mean and variance of the loss


class DivergenceDetector:
    """Counts skipped steps and loss spikes, and decides when training has diverged."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.total_skips = int(state.get("total_skips", 0))
        self.recent_skips: deque[int] = deque(state.get("recent_skips", ()))  # within SKIP_WINDOW
        self.consecutive_skips = int(state.get("consecutive_skips", 0))
        # Steps that are not repeated after a rollback.
        self.excluded_steps: set[int] = set(state.get("excluded_steps", ()))
        self.rolled_back = bool(state.get("rolled_back", False))
        self.mean, self.variance, self.seen = (
            float(state.get(key, 0.0)) for key in ("mean", "variance", "seen")
        )
        # Not part of the state: every checkpoint that is saved has the mark in its manifest.
        self.suspect = False

    def record_skip(self, step: int) -> bool:
        """Count a skipped step; return whether training has diverged."""
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
        """Count a finite step; return whether its loss is a spike, six standard deviations high."""
        self.consecutive_skips = 0
        deviation = loss - self.mean
        spike = self.seen >= SPIKE_WINDOW and deviation > SPIKE_SIGMAS * math.sqrt(self.variance)
        self.suspect = self.suspect or spike
        self.seen += 1
        weight = 1 / min(self.seen, SPIKE_WINDOW)
        self.mean += weight * deviation
        self.variance = (1 - weight) * (self.variance + weight * deviation * deviation)
        return spike

    def require_first_rollback(self) -> None:
        """Raise DivergedError if the run was rolled back to a checkpoint before."""
        if self.rolled_back:
            raise DivergedError(
                "gradients must stay finite",
                found=f"{len(self.recent_skips)} steps with gradients that were not, the last of "
                f"them {self.recent_skips[-1]}, after one rollback to a checkpoint",
                fix="lower train.learning_rate or set train.max_grad_norm=1, then resume: "
                "the newest checkpoint is intact",
            )

    def roll_back(self, saved: Mapping[str, Any]) -> DivergenceDetector:
        """Return the detector of a checkpoint, which excludes the steps that were skipped since."""
        restored = DivergenceDetector(saved)
        restored.excluded_steps |= set(self.recent_skips)
        restored.rolled_back = True
        restored.consecutive_skips = 0
        restored.recent_skips.clear()
        return restored

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "total_skips": self.total_skips,
            "recent_skips": list(self.recent_skips),
            "consecutive_skips": self.consecutive_skips,
            "excluded_steps": sorted(self.excluded_steps),
            "rolled_back": self.rolled_back,
            "mean": self.mean,
            "variance": self.variance,
            "seen": self.seen,
        }


@dataclass
class TrainerState:
    """Counters and decisions of a run; `step` is the last step that was done."""

    max_steps: int  # planned steps: the learning rate depends on them
    step: int = 0
    applied_steps: int = 0  # steps that changed the weights
    epoch: int = 0
    batch: int = 0  # the next micro-batch of the epoch
    examples_seen: int = 0
    tokens_seen: int = 0
    validated_step: int = 0  # the last step that was validated
    metrics: dict[str, float] = field(default_factory=dict)  # of that validation
    best: dict[str, float] = field(default_factory=dict)  # metrics of the best one, and its "step"
    validations_since_best: int = 0
    token_limits: dict[str, int] = field(default_factory=dict)  # OOMSplitter.token_limits
    divergence: DivergenceDetector = field(default_factory=DivergenceDetector)
    precision: str = ""
    seconds: float = 0.0  # training time, over all resumes

    @property
    def cursor(self) -> Cursor:
        """The position in the data."""
        return Cursor(self.epoch, self.batch)

    def advance(self, batch: GlobalBatch, lr: float, metrics: StepMetrics) -> dict[str, Any]:
        """Count a step and return its log record, with "diverged" if training has diverged."""
        self.examples_seen += sum(len(examples) for examples in batch.examples)
        self.tokens_seen += metrics.tokens
        record: dict[str, Any] = {"step": batch.step, "lr": lr}
        if batch.step in self.divergence.excluded_steps:
            return record | {"excluded": True}
        record |= {
            "loss": metrics.loss,
            "nll": metrics.nll,
            "grad_norm": metrics.grad_norm,
            "tokens": metrics.tokens,
            "padding": 1 - metrics.tokens / max(metrics.padded_tokens, 1),
        }
        if metrics.is_finite:
            self.applied_steps += 1
            mean = self.divergence.mean
            if self.divergence.record_loss(metrics.loss):
                logger.warning(
                    "loss spike at step %d: %.3f, after a mean of %.3f",
                    batch.step,
                    metrics.loss,
                    mean,
                )
            return record
        # Numbers of examples, never their text.
        examples = [int(example) for examples in batch.examples for example in examples]
        named = f"{len(examples):,} example{'' if len(examples) == 1 else 's'}"
        logger.warning(
            "step %d was skipped: its loss is %.4g, the norm of its gradient %.4g; "
            "log.jsonl lists its %s",
            batch.step,
            metrics.loss,
            metrics.grad_norm,
            named,
        )
        record |= {"skipped": True, "examples": examples}
        return record | ({"diverged": True} if self.divergence.record_skip(batch.step) else {})

    def record_validation(self, step: int, metrics: dict[str, float], by: str) -> bool:
        """Record a validation; return whether it is the best so far by a finite metric.

        Of equal values, as of an accuracy on few examples, the one with the lower loss is better.
        """
        self.validated_step = step
        self.metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        value, best = self.metrics.get(by), self.best.get(by)
        better = value is not None and (
            best is None
            or (value < best if by in LOWER_IS_BETTER else value > best)
            or (value == best and self.metrics.get("loss", 0.0) < self.best.get("loss", 0.0))
        )
        if better:
            self.best = {**self.metrics, "step": step}
        self.validations_since_best = 0 if better else self.validations_since_best + 1
        return better

    def has_reached(self, target_exact: float) -> bool:
        """Whether the last step was validated with this fraction of exact translations.

        Never for 0.
        """
        exact = self.metrics.get("exact", 0.0)
        return 0 < target_exact <= exact and self.validated_step == self.step

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        return state | {"divergence": self.divergence.state_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TrainerState:
        """Return the state that `state_dict` described; missing fields have their defaults."""
        known = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        return cls(**known | {"divergence": DivergenceDetector(state.get("divergence"))})


_DIVERGENCE_TYPES: dict[str, Any] = {
    **dict.fromkeys(("total_skips", "consecutive_skips"), int),
    **dict.fromkeys(("recent_skips", "excluded_steps"), list[int]),
    **dict.fromkeys(("mean", "variance", "seen"), float),
    "rolled_back": bool,
}


def read_trainer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's state; raise CorruptError for a value of a wrong type."""
    state = checkpoint.state
    for name, problem in invalid_state_fields(state):
        raise corrupt_file_error(checkpoint.path / "state.json", f"{name} {problem}")
    return state


def invalid_state_fields(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a state whose values have a wrong type, with what was found."""
    types = get_type_hints(TrainerState) | {"divergence": dict[str, Any]}
    for name, value in state.items():
        if name in types and not has_json_type(value, types[name]):
            yield name, f"{value!r:.100}"
    divergence = state.get("divergence")
    for name, value in divergence.items() if isinstance(divergence, dict) else ():
        if not has_json_type(value, _DIVERGENCE_TYPES.get(name, Any)):
            yield f"divergence.{name}", f"{value!r:.100}"
    if "max_steps" not in state:
        yield "max_steps", "missing"
