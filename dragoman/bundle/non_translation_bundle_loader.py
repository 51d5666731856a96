"""The bundle of a task other than translation: its task and its model."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.bundle import format as layout
from dragoman.bundle.reader import (
    BundleContents,
    listed_fields,
    manifest_parameters,
    read_bundle,
    read_finite_tensors,
    require_task,
)
from dragoman.config import Config
from dragoman.config.root_config import TASK_STACKS, TRANSLATE
from dragoman.errors import BundleError, ConfigError, CorruptError
from dragoman.models.block_validation import count_layers
from dragoman.models.factory import skip_initialization
from dragoman.storage.manifest import canonical_json
from dragoman.storage.tensor_files import read_header
from dragoman.tasks.non_translation_task import TrainingTask, load_task

GOLDEN_FORMAT = 1
TOLERANCE = 1e-3  # of a number in an output: float32 on another CPU differs by about 1e-5
DEVICE_TOLERANCE = 2e-2  # matrix multiplications of other devices have lower precision
MAX_CASES = 16


class TaskBundle:
    """A verified model directory of a task other than translation."""

    def __init__(
        self, contents: BundleContents, *, device: str | torch.device = "cpu", check: bool = True
    ) -> None:
        self.path, self.config = contents.path, contents.config
        self.card, self.manifest, self.golden = contents.card, contents.manifest, contents.golden
        kind = load_task(self.config.task)
        self.task = kind(self.config, load_task_text(kind, self.config, contents.read_text_files()))
        self._device, self._check = torch.device(device), check

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        task: str = "",
        device: str | torch.device = "cpu",
        check_golden: bool = True,
    ) -> TaskBundle:
        """Read and verify a bundle; with `task`, raise BundleError if it is of another one."""
        contents = read_bundle(Path(path))
        if task or contents.config.task == TRANSLATE:
            require_task(contents, task or "predict")
        return cls(contents, device=device, check=check_golden)

    def __repr__(self) -> str:
        """Return the directory, task, recipe and number of parameters."""
        recipe = f"{self.config.recipe or 'none':.60}"
        return (
            f"TaskBundle({str(self.path)!r}, task {self.config.task}, recipe {recipe}, "
            f"{self.parameters:,} parameters)"
        )

    @functools.cached_property
    def model(self) -> nn.Module:
        """The model in evaluation mode, weights loaded and golden vectors checked."""
        weights = read_task_weights(self.path / layout.WEIGHTS, self.task)
        model = build_loaded_task_model(self.task, weights).to(self._device)
        if self._check:
            check_task_golden(self.task, model, self.golden, str(self.path / layout.GOLDEN))
        return model

    @property
    def parameters(self) -> int:
        """The number of parameters in the manifest; 0 if it has none."""
        return manifest_parameters(self.manifest)

    def golden_inputs(self) -> list[Any]:
        """Return the inputs of the golden vectors; empty if the file has none."""
        cases = self.golden.get("cases")
        cases = cases if isinstance(cases, list) else []
        return [case["input"] for case in cases if isinstance(case, dict) and "input" in case]

    def manifest_fields(self) -> Mapping[str, Any]:
        """Return the manifest without its file list: release, parameters and further fields."""
        return listed_fields(self.manifest)


def task_text_files(task: TrainingTask) -> dict[str, bytes]:
    """Return the files of text/ of a task, with text.json, which names the task."""
    files = task.text_files()
    unknown = sorted(set(files) - set(layout.TEXT_FILES))
    assert not unknown, f"bundle/format.py must list {unknown}"
    listed = canonical_json({"format": 1, "task": task.name, "files": sorted(files)})
    return {**files, "text.json": listed}


def load_task_text(kind: type[TrainingTask], config: Config, files: Mapping[str, bytes]) -> Any:
    """Return a task's text from its files; raise BundleError if they are of another task."""
    try:
        found = json.loads(files["text.json"])
    except (KeyError, ValueError, RecursionError) as error:
        raise BundleError(
            "text/text.json must be a JSON object",
            found=f"{type(error).__name__}: {error}"[:120],
            fix="copy the model directory again",
        ) from error
    if not isinstance(found, dict) or found.get("task") != kind.name:
        task = found.get("task") if isinstance(found, dict) else found
        raise BundleError(
            f"text/text.json must be of task {kind.name}",
            found=f"{task!r:.60}",
            fix="copy the model directory again",
        )
    named = {name: data for name, data in files.items() if name != "text.json"}
    try:
        return kind.load_text(config, named)
    except KeyError as error:
        raise BundleError(
            f"text/ must hold the files of task {kind.name}",
            found=f"no {error}; {', '.join(sorted(named)) or 'none'}",
            fix="copy the model directory again",
        ) from error


def build_loaded_task_model(task: TrainingTask, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a task's model with the given weights, on the CPU, in evaluation mode."""
    model = _build_meta(task)
    model.load_state_dict(dict(weights), assign=True)
    return model.eval().requires_grad_(False)


def read_task_weights(path: Path, task: TrainingTask) -> dict[str, Tensor]:
    """Read weights; names, shapes and dtypes are checked before anything is allocated."""
    try:
        layers = count_layers(task.config.model, TASK_STACKS[task.config.task])
        tensors = len(read_header(path))
        if layers > tensors:
            raise BundleError(
                f"{path} must hold the weights of the model's {layers:,} layers",
                found=f"{tensors:,} tensors",
                fix="copy the model directory again",
            )
        expected = task_weights(task)
    except ConfigError as error:
        must = f"{path.parent / layout.CONFIG} must describe a model that can be built"
        raise BundleError(
            must, found="; ".join(error.problems), fix="use the dragoman that wrote it"
        ) from error
    return read_finite_tensors(path, expected)


def make_task_golden(task: TrainingTask, model: nn.Module, inputs: Sequence[Any]) -> dict[str, Any]:
    """Return golden vectors: inputs with their outputs, in float32 on the CPU."""
    inputs = list(inputs)[:MAX_CASES]
    with torch.inference_mode():
        outputs = task.golden_outputs(model, inputs) if inputs else []
    cases = [
        {"input": one, "output": _rounded(other)}
        for one, other in zip(inputs, outputs, strict=True)
    ]
    return {"format": GOLDEN_FORMAT, "task": task.name, "cases": cases}


def check_task_golden(
    task: TrainingTask, model: nn.Module, golden: Mapping[str, Any], where: str
) -> None:
    """Raise CorruptError, naming the file `where`, if an output differs now."""
    cases = golden.get("cases")
    if (
        golden.get("format") != GOLDEN_FORMAT
        or golden.get("task") != task.name
        or not isinstance(cases, list)
        or len(cases) > MAX_CASES
        or not all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in cases)
    ):
        raise BundleError(
            f"{where} must hold at most {MAX_CASES} cases of task {task.name}",
            found=f"format {golden.get('format')!r:.40}, task {golden.get('task')!r:.40}",
            fix="copy the model directory again",
        )
    try:
        with torch.inference_mode():
            inputs = [case["input"] for case in cases]
            outputs = task.golden_outputs(model, inputs) if inputs else []
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise BundleError(
            f"{where} must hold inputs of task {task.name}",
            found=f"{type(error).__name__}: {error}"[:120],
            fix="copy the model directory again",
        ) from error
    on_cpu = next(model.parameters()).device.type == "cpu"
    tolerance = TOLERANCE if on_cpu else DEVICE_TOLERANCE
    for number, (case, output) in enumerate(zip(cases, outputs, strict=True), 1):
        difference = largest_difference(case["output"], output)
        if not difference <= tolerance:
            what = "another output" if math.isinf(difference) else f"one {difference:.2g} off"
            raise CorruptError(
                f"{where}, case {number} ({case['input']!r:.60}) must have its recorded output",
                found=f"{what}: {output!r:.120}",
                fix="this release or device computes something else; "
                "compare with the CPU and with the release in card.md",
            )


def task_weights(task: TrainingTask) -> dict[str, Tensor]:
    """Return the weights of a task's model as meta tensors: names, shapes and dtypes."""
    return dict(_build_meta(task).state_dict())


def _build_meta(task: TrainingTask) -> nn.Module:
    """Build a task's model on the meta device."""
    with torch.device("meta"), skip_initialization():
        return task.build_model()


def _rounded(value: Any) -> Any:
    """Round the numbers of a JSON value to six digits after the point."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def largest_difference(expected: Any, found: Any) -> float:
    """Return the largest difference of numbers in two JSON values, relative above one.

    Infinity for different texts, names or lengths.
    """
    if all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in (expected, found)
    ):
        difference = abs(expected - found) / max(1.0, abs(expected))
        return difference if math.isfinite(difference) else math.inf
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs = [(value, found[key]) for key, value in expected.items()]
    elif isinstance(expected, list) and isinstance(found, (list, tuple)):
        if len(expected) != len(found):
            return math.inf
        pairs = list(zip(expected, found, strict=True))
    else:
        return 0.0 if expected == found else math.inf
    return max((largest_difference(one, other) for one, other in pairs), default=0.0)
