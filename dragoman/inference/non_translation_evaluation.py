"""Evaluation of a model of any task but translation, by the task's own metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dragoman._version import __version__
from dragoman.bundle import TaskBundle
from dragoman.bundle.non_translation_bundle_loader import build_loaded_task_model, task_weights
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import open_records
from dragoman.errors import ConfigError, DataError
from dragoman.runtime.device import choose_device
from dragoman.tasks.non_translation_task import TaskScore, TrainingTask, check_finite_outputs
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import Progress, QuietProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskEvaluation:
    """The scores of a test set."""

    task: str
    scores: list[TaskScore]
    loss: float
    examples: int
    unit: str  # what an example is, such as "examples"
    seconds: float
    skipped: dict[str, int]  # what was left out, by reason
    rows: list[dict[str, Any]]  # a table, such as that of the classes; empty if there is none

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "task": self.task,
            "scores": {
                each.name: {"score": each.value, "signature": each.signature}
                for each in self.scores
            },
            **({"table": self.rows} if self.rows else {}),
            "loss": self.loss,
            "examples": self.examples,
            "skipped": self.skipped,
            "speed": {
                "seconds": round(self.seconds, 3),
                "examples_per_second": round(self.examples / max(self.seconds, 1e-9), 2),
            },
        }


def evaluate_task(
    path: str | Path,
    files: Sequence[Path | str],
    *,
    device: str = "auto",
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> TaskEvaluation:
    """Score a model on labelled files; a generated problem needs none.

    `overrides` are settings of the task's own section, such as a longer memory of a language
    model. Numbers are float32, so that a score does not depend on the device's precision.
    """
    progress = progress or QuietProgress()
    where = choose_device(device)
    bundle = TaskBundle.load(path, device=where)
    task, model = bundle.task, bundle.model
    if overrides:
        task, model = override_model(task, model, overrides)
    if files:
        with progress.phase("reading the test set"):
            reader = open_records(task.config, files)
            store = task.encode(reader())
            store.skipped |= reader.skipped
    elif task.is_generated(task.config):
        store = task.generate("test")
    else:
        raise ConfigError(
            [
                f"a model of the task {task.name} is evaluated on labelled files; "
                "found none; pass --test FILE"
            ]
        )
    check_examples(store, files)
    started = time.monotonic()
    with torch.no_grad():
        metrics, rows = task.evaluate_in_detail(
            model,
            store,
            device=where,
            precision=Precision(torch.float32, "evaluation"),
            progress=progress,
        )
    seconds = time.monotonic() - started
    check_finite_outputs(torch.tensor(metrics["loss"]))
    signed = [
        each._replace(signature="|".join(filter(None, [each.signature, _version()])))
        for each in task.scores(metrics)
    ]
    if not signed:
        raise DataError(
            f"{' and '.join(map(str, files))} must have labels or scores, as in training",
            found=f"none in {len(store):,} {task.unit}",
            fix=f"name their fields (dragoman settings {task.name})",
        )
    return TaskEvaluation(
        task=task.name,
        scores=signed,
        loss=metrics["loss"],
        examples=len(store),
        unit=task.unit,
        seconds=seconds,
        skipped=store.skipped,
        rows=list(rows),
    )


class OverriddenModel(NamedTuple):
    """A task with settings changed for an evaluation, and its model."""

    task: TrainingTask
    model: nn.Module


def override_model(
    task: TrainingTask, model: nn.Module, overrides: Sequence[str]
) -> OverriddenModel:
    """Return a task with settings changed, and its model with the trained weights.

    Weights that are settings, such as thresholds that were not tuned, are those of `overrides`.
    """
    changed = override_settings(task, overrides)
    weights = {**model.state_dict(), **changed.fixed_weights()}
    device = next(iter(weights.values())).device
    return OverriddenModel(changed, build_loaded_task_model(changed, weights).to(device))


def override_settings(task: TrainingTask, overrides: Sequence[str]) -> TrainingTask:
    """Return a task with settings changed for an evaluation, for the same weights.

    Raise ConfigError for a setting of another section, or one that needs other weights.
    """
    wrong = [each for each in overrides if not each.startswith((f"{task.name}.", "data."))]
    if wrong:
        raise ConfigError(
            [
                f"--set must change a setting of {task.name} or data in an evaluation; "
                f"found {wrong[0]!r:.60}; leave it out"
            ]
        )
    config = task.override_config(overrides)
    for name in task.learned_settings:
        trained, found = (getattr(getattr(each, task.name), name) for each in (task.config, config))
        if found != trained:
            raise ConfigError(
                [
                    f"{task.name}.{name} must be that of training in an evaluation; found "
                    f"{found!s:.60} instead of {trained!s:.60}; leave it out, or train another "
                    "model"
                ]
            )
    changed = type(task)(config, task.text)
    if _weight_shapes(changed) != _weight_shapes(task):
        raise ConfigError(
            [
                "--set must keep the architecture of a trained model in an evaluation; found "
                f"{', '.join(overrides):.120}; leave it out, or train another model"
            ]
        )
    return changed


def _weight_shapes(task: TrainingTask) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in task_weights(task).items()}


def _version() -> str:
    return f"dragoman:{__version__}"


def check_examples(store: InMemoryExamples, files: Sequence[Path | str]) -> None:
    """Raise DataError if files hold no examples to score."""
    if not len(store):
        raise DataError(
            f"{' and '.join(map(str, files))} must hold examples to score",
            found=", ".join(f"{count:,} {reason}" for reason, count in store.skipped.items())
            or "none",
            fix="check the path, or what wrote the file",
        )
