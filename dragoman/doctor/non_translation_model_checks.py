"""Checks of models of other tasks than translation, on the inputs of their golden vectors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dragoman.bundle import TaskBundle
from dragoman.bundle import format as layout
from dragoman.bundle.non_translation_bundle_loader import (
    DEVICE_TOLERANCE,
    TOLERANCE,
    build_loaded_task_model,
    largest_difference,
    load_task_text,
    read_task_weights,
    task_text_files,
)
from dragoman.doctor.check_result import (
    CheckResult,
    Measurement,
    NotApplicableError,
    run_named_checks,
)
from dragoman.runtime.device import choose_device
from dragoman.tasks.non_translation_task import load_task

BF16_TOLERANCE = 0.1  # of a probability, and a fraction of a larger score or log-probability


class TaskModelUnderTest:
    """A model of another task, with the inputs of its golden vectors."""

    def __init__(self, path: str | Path, *, device: str | torch.device = "auto") -> None:
        self.bundle = TaskBundle.load(path, check_golden=False)
        self.task, self.device = self.bundle.task, choose_device(device)
        self.inputs = self.bundle.golden_inputs()
        self.origin = f"{len(self.inputs)} golden inputs"

    @functools.cached_property
    def model(self) -> nn.Module:
        """The model in evaluation mode on the device."""
        weights = read_task_weights(self.bundle.path / layout.WEIGHTS, self.task)
        return build_loaded_task_model(self.task, weights).to(self.device)

    @property
    def tolerance(self) -> float:
        """The tolerance of numbers in an output."""
        return TOLERANCE if self.device.type == "cpu" else DEVICE_TOLERANCE

    def outputs(self, inputs: list[Any]) -> list[Any]:
        """Return the outputs of inputs in one batch."""
        if not inputs:
            raise NotApplicableError("the model has no golden inputs")
        with torch.inference_mode():
            return self.task.golden_outputs(self.model, inputs)

    @functools.cached_property
    def single_outputs(self) -> list[Any]:
        """The outputs of the inputs one by one."""
        return [self.outputs([each])[0] for each in self.inputs]


def check_finite_weights(subject: TaskModelUnderTest) -> Measurement:
    """Count the weights that are NaN or infinite."""
    weights = [
        tensor for tensor in subject.model.state_dict().values() if tensor.is_floating_point()
    ]
    wrong = sum(int((~tensor.isfinite()).sum()) for tensor in weights)
    return Measurement(wrong, 0, f"{sum(tensor.numel() for tensor in weights):,} weights")


def check_text_files(subject: TaskModelUnderTest) -> Measurement:
    """Write vocabularies and label sets, read them again, and count files that differ."""
    kind = load_task(subject.task.name)
    files = task_text_files(subject.task)
    again = task_text_files(
        kind(subject.task.config, load_task_text(kind, subject.task.config, files))
    )
    changed = [name for name in files if again.get(name) != files[name]]
    return Measurement(len(changed), 0, ", ".join(changed) or f"{len(files)} files")


def check_golden_vectors(subject: TaskModelUnderTest) -> Measurement:
    """Compare outputs with those stored with the model."""
    cases = subject.bundle.golden["cases"]
    outputs = subject.single_outputs
    if not cases:
        raise NotApplicableError("the model has no golden inputs")
    errors = [
        largest_difference(case["output"], output)
        for case, output in zip(cases, outputs, strict=True)
    ]
    return Measurement(max(errors), subject.tolerance, f"{len(cases)} inputs")


def check_batch_independence(subject: TaskModelUnderTest) -> Measurement:
    """Compare outputs of single inputs with those of the inputs in one batch, in two orders."""
    inputs, alone = subject.inputs, subject.single_outputs
    together = subject.outputs(inputs)
    backwards = subject.outputs(inputs[::-1])[::-1]
    errors = [
        largest_difference(_plain(one), _plain(other))
        for found in (together, backwards)
        for one, other in zip(alone, found, strict=True)
    ]
    return Measurement(
        max(errors), subject.tolerance, f"alone, and {len(inputs)} in a batch with padding"
    )


def check_repeatable(subject: TaskModelUnderTest) -> Measurement:
    """Compare two runs of the same batch: nothing random, and no state between calls."""
    first, second = subject.outputs(subject.inputs), subject.outputs(subject.inputs)
    return Measurement(largest_difference(_plain(first), _plain(second)), 0.0, "the same batch")


def check_bfloat16(subject: TaskModelUnderTest) -> Measurement:
    """Compare outputs in bfloat16 with those in float32; labels may differ where they tie."""
    with torch.autocast(subject.device.type, dtype=torch.bfloat16):
        found = subject.outputs(subject.inputs)
    numbers = [
        largest_difference(one, other)
        for alone, half in zip(subject.single_outputs, found, strict=True)
        for one, other in zip(_numbers(alone), _numbers(half), strict=False)
    ]
    if not numbers:
        raise NotApplicableError("its outputs have no numbers")
    return Measurement(max(numbers), BF16_TOLERANCE, "differences of output values")


TaskCheck = Callable[[TaskModelUnderTest], Measurement]
TASK_CHECKS: dict[str, TaskCheck] = {
    "finite weights": check_finite_weights,
    "vocabularies and labels": check_text_files,
    "golden vectors": check_golden_vectors,
    "batch independence": check_batch_independence,
    "repeatable": check_repeatable,
    "bfloat16": check_bfloat16,
}


def run_task_checks(
    subject: TaskModelUnderTest, *, on_check: Callable[[str], None] = lambda name: None
) -> Iterator[CheckResult]:
    """Run every check in turn and yield its result; an exception fails the check."""
    checks = {name: functools.partial(check, subject) for name, check in TASK_CHECKS.items()}
    return run_named_checks(checks, on_check=on_check)


def _plain(value: Any) -> Any:
    """Return a value as JSON reads it: tuples as lists."""
    return json.loads(json.dumps(value))


def _numbers(value: Any) -> list[float]:
    """Return the fractional numbers of a JSON value, in order."""
    if isinstance(value, float):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [number for each in value for number in _numbers(each)]
        if isinstance(value, (list, tuple))
        else []
    )
