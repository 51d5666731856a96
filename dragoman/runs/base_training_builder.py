"""The interface of run builders: the task-specific parts of a training run.

Implemented by `translation_training_builder.py` and, for other tasks,
`non_translation_training_builder.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.bundle import Card, CardScore
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config
from dragoman.data.batch_plan import Plan
from dragoman.runs.output_directory_and_resume_checks import DataFile
from dragoman.runs.time_budget import TimeBudget
from dragoman.training.data_loader import CollateFunction
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.progress_display import Progress
from dragoman.training.task_protocol import Task
from dragoman.training.trainer import RecordCallback, ReplanSteps, Trainer, ValidateFunction

VALIDATION_BATCH_TOKENS = 4000  # padded; without gradients, so it fits wherever training does


class DataSummary(NamedTuple):
    """Numbers of the data, for the estimate of a run."""

    train: int
    valid: int
    unit: str  # "pairs"
    details: str  # "vocabulary size 8,000"


class RunBuilder(abc.ABC):
    """Builds the parts of a training run."""

    prepared: Any  # with `digest`, `files` and `written`

    def __init__(self, config: Config, *, device: torch.device, progress: Progress) -> None:
        self.config, self.device, self.progress = config, device, progress
        self.weights: Path | None = None  # initial weights, for fine-tuning

    @property
    @abc.abstractmethod
    def plan(self) -> Plan:
        """Assignment of examples to batches."""

    @property
    @abc.abstractmethod
    def task(self) -> Task:
        """The loss."""

    @property
    @abc.abstractmethod
    def validator(self) -> ValidateFunction | None:
        """The validation function; None without validation data."""

    @abc.abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model on the device."""

    @abc.abstractmethod
    def collate_function(self) -> CollateFunction:
        """Return the function that makes a training batch of examples."""

    @abc.abstractmethod
    def tokens_per_step(self) -> float:
        """Return the mean tokens per step."""

    @abc.abstractmethod
    def max_useful_steps(self) -> int:
        """Return the steps that a time budget may plan at most."""

    @abc.abstractmethod
    def data_summary(self) -> DataSummary:
        """Return the numbers of the data."""

    def describe_data(self) -> str:
        """Return the numbers of the data as text."""
        data = self.data_summary()
        details = f"; {data.details}" if data.details else ""
        return f"{data.train:,} training and {data.valid:,} validation {data.unit}{details}"

    def min_step_seconds(self, model: nn.Module) -> float:
        """Return seconds that a training step takes at least, without running one; 0 if unknown."""
        return 0.0

    @abc.abstractmethod
    def validation_seconds(self, model: nn.Module) -> float:
        """Return the estimated seconds of one validation."""

    def finish(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the final weights, with those that are tuned on validation data."""
        return weights

    @abc.abstractmethod
    def score(self, weights: Mapping[str, Tensor], time_budget: TimeBudget) -> list[CardScore]:
        """Return the scores of the final weights on validation data."""

    @abc.abstractmethod
    def data_rows(self) -> dict[str, str]:
        """Return the rows of the model card about the data."""

    @abc.abstractmethod
    def write(
        self, path: Path, weights: Mapping[str, Tensor], card: Card, fields: Mapping[str, Any]
    ) -> str:
        """Write the bundle; return the command that uses it, up to the text it takes."""

    @property
    def digest(self) -> str:
        """Hash of the prepared data."""
        return str(self.prepared.digest)

    @property
    def files(self) -> list[DataFile]:
        """The files that were read, with their hashes."""
        return list(self.prepared.files)

    def build_trainer(
        self,
        run: RunDirectory,
        *,
        world: ProcessGroup,
        deadline: Callable[[], float] | None,
        replan: ReplanSteps | None,
        on_record: RecordCallback | None = None,
    ) -> Trainer:
        """Build the trainer with its model, data and validator."""
        return Trainer(
            model=self.build_model(),
            task=self.task,
            plan=self.plan,
            collate=self.collate_function(),
            config=self.config.train,
            run=run,
            width=self.config.model.width,
            validate=self.validator,
            progress=self.progress,
            distributed=world,
            deadline=deadline,
            replan=replan,
            on_record=on_record,
        )

    def steps_of(self, epochs: float) -> int:
        """Return the steps of a number of epochs."""
        return max(
            1, round(epochs * self.plan.batches(0) / self.config.train.gradient_accumulation)
        )

    def epochs_of(self, steps: int) -> float:
        """Return the epochs of a number of steps."""
        return steps * self.config.train.gradient_accumulation / self.plan.batches(0)
