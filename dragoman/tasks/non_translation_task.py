"""`TrainingTask`, base class of every task but translation, for runs, bundles and commands.

Translation has a class of its own, in `translation.py`. The trainer itself calls only `loss`.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.config import Config, apply_overrides
from dragoman.data.batch_plan import BatchPlan, Plan, smallest_fitting_shape
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.errors import DivergedError
from dragoman.registry import catalogue
from dragoman.runtime import signals

if TYPE_CHECKING:  # loading a model imports no part of training
    from dragoman.training.bf16_mixed_precision import Precision
    from dragoman.training.progress_display import Progress
    from dragoman.training.task_protocol import Loss

EVALUATION_BATCH_TOKENS = 16_000  # padded; without gradients, so it fits wherever training does
NUM_GOLDEN_INPUTS = 3

ReadRecords = Callable[[], Iterator[Record]]


class TaskScore(NamedTuple):
    """A metric of a data set, and how it was computed."""

    name: str
    value: float
    signature: str


class DetailedMetrics(NamedTuple):
    """Metrics of a data set, and a table such as that of its classes."""

    metrics: dict[str, float]
    rows: Sequence[dict[str, str | float | int]] = ()  # with equal keys, the columns


class TrainingTask(abc.ABC):
    """What is an example, a batch, a loss, a metric and a prediction.

    An instance belongs to one configuration and one `text`: the vocabularies and label sets that
    were learned from the training records, and that a bundle carries.
    """

    name: ClassVar[str]  # as --task names it, and its section of the configuration
    # Metrics of validation besides "loss", and whether higher is better.
    metrics: ClassVar[Mapping[str, bool]] = {}
    unit: ClassVar[str] = "examples"  # the unit of an epoch, in messages
    max_epochs: ClassVar[float] = 0.0  # of a recipe's own number of steps; 0 for any number
    # Settings of its section that an evaluation cannot change, besides those of weights' shapes.
    learned_settings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Config, text: Any) -> None:
        self.config, self.text = config, text

    # Text and examples

    @classmethod
    @abc.abstractmethod
    def fit_text(cls, config: Config, records: ReadRecords) -> Any:
        """Return the vocabularies and label sets of the training records."""

    @classmethod
    @abc.abstractmethod
    def load_text(cls, config: Config, files: Mapping[str, bytes]) -> Any:
        """Return what `text_files` wrote; raise BundleError for a file that is not valid."""

    @abc.abstractmethod
    def text_files(self) -> dict[str, bytes]:
        """Return the files of a bundle's text/ folder, by name (see bundle/format.py)."""

    @abc.abstractmethod
    def encode(self, records: Iterable[Record]) -> InMemoryExamples:
        """Return the records as arrays of ids; raise DataError for a bad one."""

    @classmethod
    def is_generated(cls, config: Config) -> bool:
        """Whether examples are generated, so that no training file is needed."""
        return False

    def generate(self, part: str) -> InMemoryExamples:
        """Return the generated examples of "train", "valid" or "test"."""
        raise NotImplementedError

    # Training

    @abc.abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model, with weights from torch's random number generator."""

    def plan(self, store: InMemoryExamples, *, batch_tokens: int, seed: int) -> Plan:
        """Assign examples to batches of similar lengths."""
        lengths = np.maximum(self.lengths(store), 1)
        # The plan counts an EOS token on each side; the second side is empty.
        return BatchPlan(lengths - 1, np.zeros_like(lengths), batch_tokens=batch_tokens, seed=seed)

    def lengths(self, store: InMemoryExamples) -> NDArray[np.int64]:
        """Return the padded length that an example needs, for batches of similar lengths."""
        raise NotImplementedError

    @abc.abstractmethod
    def collate(
        self,
        store: InMemoryExamples,
        examples: NDArray[np.int64],
        *,
        shapes: Sequence[BatchShape] = (),
        seed: int = 0,
        training: bool = False,
    ) -> TensorBatch:
        """Return a padded batch; `seed` is for random draws in training."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of a batch as sums; called within autocast."""

    # Evaluation and bundles

    @abc.abstractmethod
    def evaluate(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, float]:
        """Return "loss" and the task's metrics on a data set; called without gradients."""

    def evaluate_in_detail(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> DetailedMetrics:
        """Return what `evaluate` returns, with a table where the task has one."""
        return DetailedMetrics(
            self.evaluate(model, store, device=device, precision=precision, progress=progress)
        )

    def num_scored(self, store: InMemoryExamples) -> int:
        """Return the number of labels that metrics such as an accuracy are the mean of."""
        return len(store)

    @property
    def tunes_weights(self) -> bool:
        """Whether `finish` tunes weights of a final model, trained or averaged."""
        return False

    def finish(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, torch.Tensor]:
        """Return weights of the final model that are tuned on validation data, such as thresholds.

        They replace those of the same name. Called if `tunes_weights`.
        """
        return {}

    def override_config(self, overrides: Sequence[str]) -> Config:
        """Return the settings with some of them changed for an evaluation."""
        return apply_overrides(self.config, overrides)

    def fixed_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that are settings and not trained; by default there are none."""
        return {}

    def scores(self, metrics: Mapping[str, float]) -> list[TaskScore]:
        """Return the metrics to be reported, with signatures."""
        return [TaskScore(name, metrics[name], "") for name in self.metrics if name in metrics]

    @abc.abstractmethod
    def golden_inputs(self, records: Iterable[Record]) -> list[Any]:
        """Return a few inputs as JSON values, whose outputs a bundle records."""

    @abc.abstractmethod
    def golden_outputs(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of inputs, computed in one batch, as JSON values.

        Numbers are compared with a tolerance. Raise TypeError, ValueError or KeyError for an
        input that is not valid.
        """

    def describe(self) -> str:
        """Return a summary of the preprocessor: sizes of vocabularies and label sets."""
        return ""

    # State carried from one training step to the next, such as Transformer-XL's memory.

    def carried_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint must hold besides weights and optimizer."""
        return {}

    def load_carried_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore `carried_state`; with an empty mapping, start from zero."""
        assert not state, f"task {self.name} carries no state; found {sorted(state)}"


def load_task(name: str) -> type[TrainingTask]:
    """Return the class of a task other than translation."""
    found = catalogue("task").load(name)
    assert issubclass(found, TrainingTask), f"{name} must be a TrainingTask"
    return found


def padded_length(shapes: Sequence[BatchShape], longest: int) -> int:
    """Return the length that a batch is padded to, given its longest example."""
    return smallest_fitting_shape(list(shapes), longest, 1).src if shapes else max(longest, 1)


def evaluation_batches(
    task: TrainingTask,
    store: InMemoryExamples,
    *,
    device: torch.device,
    progress: Progress,
    batch_tokens: int = EVALUATION_BATCH_TOKENS,
    what: str = "validating",
) -> Iterator[TensorBatch]:
    """Yield all examples in batches on a device; raise StoppedError at a stop request."""
    plan = task.plan(store, batch_tokens=batch_tokens, seed=0)
    assert isinstance(plan, BatchPlan), f"task {task.name} needs its own evaluation batches"
    with progress.phase(what, plan.batches(0), "batches") as phase:
        for examples in plan.epoch(0):
            signals.raise_if_stop_requested()
            yield task.collate(store, examples).to(device)
            phase.advance()


def check_finite_outputs(outputs: Tensor) -> None:
    """Raise DivergedError if a model's outputs have NaN or infinite values."""
    if not outputs.isfinite().all():
        found = "NaN" if outputs.isnan().any() else "infinity"
        raise DivergedError(
            "a model's outputs must be finite numbers",
            found=found,
            fix="its weights are damaged or training diverged: use an earlier checkpoint",
        )


def find_fields(find: Callable[[Record], Any]) -> Callable[[Record], Any]:
    """Return `find` with its result cached by file: columns are found in its first record."""
    found: dict[Any, Any] = {}

    @functools.wraps(find)
    def cached(record: Record) -> Any:
        if record.file not in found:
            found[record.file] = find(record)
        return found[record.file]

    return cached
