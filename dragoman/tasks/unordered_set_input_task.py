"""The set task: a number, a label, a count or a clustering of a set, independent of its order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.config import Config
from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.data.batch_plan import Plan
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.data.synthetic_unordered_sets import (
    PROBLEMS,
    ClusteringProblem,
    GeneratedProblem,
    SetArrays,
    UniqueProblem,
)
from dragoman.data.unordered_set_examples import FileSets, GeneratedPlan, GeneratedSets, SetStore
from dragoman.data.unordered_set_parser import is_label, parse_number, parse_set
from dragoman.errors import BundleError, DataError
from dragoman.layers.synthetic_character_image_encoder import (
    IMAGE_SIZE,
    SEGMENT_WIDTH,
    render_strokes,
)
from dragoman.models.set_transformer_and_deep_sets import build_set_transformer
from dragoman.runtime import signals
from dragoman.tasks.non_translation_task import (
    EVALUATION_BATCH_TOKENS,
    NUM_GOLDEN_INPUTS,
    ReadRecords,
    TaskScore,
    TrainingTask,
    padded_length,
)
from dragoman.tasks.unordered_set_objectives import (
    Clustering,
    Counting,
    Regression,
    SetClassification,
    SetObjective,
)
from dragoman.text.vocabulary_and_labels import Labels
from dragoman.training.task_protocol import Loss

if TYPE_CHECKING:  # loading a model imports no trainer
    from dragoman.training.bf16_mixed_precision import Precision
    from dragoman.training.progress_display import Progress

FEATURES_FILE, LABELS_FILE = "features.json", "labels.json"
CLUSTERING_FEATURES = 2


class SetsText(NamedTuple):
    """Statistics of the training records, or the constants of a generated problem."""

    problem: str  # as `sets.problem`, never "auto"
    features: int  # numbers of an element
    shift: tuple[float, ...]  # (F,), mean of each number of the elements
    scale: tuple[float, ...]  # (F,), their deviations
    target_shift: float = 0.0
    target_scale: float = 1.0
    labels: Labels | None = None


# Numbers of [0, 100) have this mean and deviation; images and points are taken as they are.
GENERATED_TEXTS = {
    "maximum": SetsText("maximum", 1, (50.0,), (100 / 12**0.5,), 50.0, 100 / 12**0.5),
    "unique": SetsText("unique", IMAGE_SIZE**2, (0.0,) * IMAGE_SIZE**2, (1.0,) * IMAGE_SIZE**2),
    "clustering": SetsText("clustering", CLUSTERING_FEATURES, (0.0, 0.0), (1.0, 1.0)),
}


@dataclass(frozen=True, kw_only=True)
class SetBatch(TensorBatch):
    """A batch of padded sets."""

    elements: Tensor  # (B, N, F)
    sizes: Tensor  # (B,)
    targets: Tensor  # (B,), or (B, K, 5) for generated mixtures
    counts: NDArray[np.int64]  # (B,), the sizes on the host

    @property
    def mask(self) -> Tensor:
        """True at real elements, (B, N)."""
        positions = torch.arange(self.elements.size(1), device=self.sizes.device)
        return positions < self.sizes.unsqueeze(1)

    @property
    def tokens(self) -> int:
        """The number of real elements."""
        return int(self.counts.sum())

    @property
    def padded_tokens(self) -> int:
        """The number of elements, padding included."""
        return self.elements.size(0) * self.elements.size(1)


class SetsTask(TrainingTask):
    """Regression, classification, counting or clustering of sets."""

    name = "sets"
    learned_settings = ("problem",)
    metrics = {  # noqa: RUF012 - as the base declares it
        "mae": False,
        "mse": False,
        "accuracy": True,
        "log_likelihood": True,
        "log_likelihood_em": True,
        "log_likelihood_oracle": True,
        "log_likelihood_gap": False,
    }
    unit = "sets"
    text: SetsText

    def __init__(self, config: Config, text: SetsText) -> None:
        super().__init__(config, text)
        self.objective = _build_objective(config.sets, text)
        self._shift = np.asarray(text.shift, np.float32)
        self._scale = np.asarray(text.scale, np.float32)

    # Text and examples

    @classmethod
    def is_generated(cls, config: Config) -> bool:
        """Whether `sets.problem` is generated and no training file replaces it."""
        return config.sets.is_generated and not config.data.train

    @classmethod
    def fit_text(cls, config: Config, records: ReadRecords) -> SetsText:
        """Return the kind of problem, and means and deviations of elements and targets."""
        if config.sets.is_generated:
            return GENERATED_TEXTS[config.sets.problem]
        return _fit_text(config.sets, records)

    @classmethod
    def load_text(cls, config: Config, files: Mapping[str, bytes]) -> SetsText:
        """Return what `text_files` wrote."""
        labels = (
            Labels.from_bytes(files[LABELS_FILE], LABELS_FILE) if LABELS_FILE in files else None
        )
        return _read_features(files[FEATURES_FILE], labels)

    def text_files(self) -> dict[str, bytes]:
        """Return the means and deviations, and the labels if there are any."""
        values = {"format": 1, **self.text._asdict()}
        del values["labels"]
        files = {FEATURES_FILE: (json.dumps(values) + "\n").encode()}
        return files | ({LABELS_FILE: self.text.labels.to_bytes()} if self.text.labels else {})

    def encode(self, records: Iterable[Record]) -> FileSets:
        """Return the sets and targets of records."""
        sets, targets = list[NDArray[np.float32]](), list[float]()
        for record in records:
            sets.append(self.encode_set(record.value(self.config.sets.set_field), record))
            targets.append(self._encode_target(record))
        return FileSets(sets, np.array(targets, np.float32), features=self.text.features)

    def encode_set(self, value: Any, record: Record | None = None) -> NDArray[np.float32]:
        """Return a set (n, F) of JSON values; raise DataError, with the record's line if given."""
        return parse_set(
            value, self.config.sets, record, images=self.objective.images, width=self.text.features
        )

    def _encode_target(self, record: Record) -> float:
        """Return the target as a number; clustering has none."""
        field = self.config.sets.target_field
        if isinstance(self.objective, Clustering):
            return 0.0
        if self.text.labels is None:
            return parse_number(record, field)
        label = record.label(field)
        if label not in self.text.labels:
            raise record.error(
                f"must have a label of the training records in {field!r}",
                label,
                f"use one of {', '.join(self.text.labels.names[:8])}",
            )
        return float(self.text.labels.index(label))

    def generate(self, part: str) -> GeneratedSets:
        """Return the generated examples of "train", "valid" or "test"."""
        sets = self.config.sets
        kind = PROBLEMS[sets.problem]
        problem: GeneratedProblem = (
            ClusteringProblem(self.config.train.seed, part=part, components=sets.components)
            if kind is ClusteringProblem
            else kind(self.config.train.seed, part=part)
        )
        return GeneratedSets(problem, sets.epoch_sets if part == "train" else sets.validation_sets)

    # Training

    def build_model(self) -> nn.Module:
        """Build the model, with weights from torch's random number generator."""
        return build_set_transformer(
            self.config.model,
            self.config.sets,
            features=self.text.features,
            outputs=self.objective.outputs,
            vectors=self.objective.vectors,
            images=self.objective.images,
        )

    def plan(self, store: InMemoryExamples, *, batch_tokens: int, seed: int) -> Plan:
        """Assign examples to batches; generated ones never repeat."""
        if isinstance(store, GeneratedSets):
            return GeneratedPlan(store, batch_tokens=batch_tokens, seed=seed)
        return super().plan(store, batch_tokens=batch_tokens, seed=seed)

    def lengths(self, store: InMemoryExamples) -> NDArray[np.int64]:
        """Return the sizes of the sets."""
        assert isinstance(store, SetStore), "sets are kept in a SetStore"
        return store.sizes(np.arange(len(store)))

    def collate(
        self,
        store: InMemoryExamples,
        examples: NDArray[np.int64],
        *,
        shapes: Sequence[BatchShape] = (),
        seed: int = 0,
        training: bool = False,
    ) -> SetBatch:
        """Return padded sets with standardized elements."""
        assert isinstance(store, SetStore), "sets are kept in a SetStore"
        examples = np.asarray(examples, np.int64)
        largest = int(store.sizes(examples).max(initial=1))
        width = padded_length(shapes, largest) if shapes else store.padded_size(largest)
        return self.make_batch(store.arrays(examples, width), examples)

    def make_batch(self, arrays: SetArrays, examples: NDArray[np.int64]) -> SetBatch:
        """Return a batch of padded arrays, whose elements are standardized here."""
        elements = arrays.elements
        if not self.objective.images:
            inside = np.arange(elements.shape[1]) < arrays.sizes[:, None]
            elements = np.where(
                inside[..., None], (elements - self._shift) / self._scale, np.float32(0)
            )
        return SetBatch(
            elements=torch.from_numpy(np.ascontiguousarray(elements)),
            sizes=torch.from_numpy(np.ascontiguousarray(arrays.sizes)),
            targets=torch.from_numpy(np.ascontiguousarray(arrays.targets)),
            counts=arrays.sizes,
            examples=examples,
        )

    def elements(self, batch: SetBatch) -> Tensor:
        """Return the elements that the model takes: generated strokes are drawn as images."""
        if self.objective.images and batch.elements.size(-1) == UniqueProblem.features:
            return render_strokes(batch.elements.view(*batch.elements.shape[:2], -1, SEGMENT_WIDTH))
        return batch.elements

    def loss(self, model: nn.Module, batch: SetBatch) -> Loss:
        """Return the loss of a batch as a sum over its sets."""
        elements, mask = self.elements(batch), batch.mask
        total = self.objective.losses(model(elements, mask), batch.targets, elements, mask).sum()
        # The number of rows as a tensor on the device, without a copy from the host.
        return Loss(total, total.detach(), torch.ones_like(batch.sizes).sum())

    # Evaluation and bundles

    def evaluate(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, float]:
        """Return "loss" and the metrics of the problem, means over the sets."""
        assert isinstance(store, SetStore), "sets are kept in a SetStore"
        parts: dict[str, list[Tensor]] = {}
        groups = list(self._evaluation_groups(store))
        with progress.phase("validating", len(groups), "batches") as phase:
            for examples in groups:
                signals.raise_if_stop_requested()
                batch = self.collate(store, examples).to(device)
                elements, mask = self.elements(batch), batch.mask
                with precision.autocast(device):
                    outputs = model(elements, mask)
                given = (outputs, batch.targets, elements, mask)
                found = {"loss": self.objective.losses(*given), **self.objective.metrics(*given)}
                for name, values in found.items():
                    parts.setdefault(name, []).append(values.double())
                phase.advance()
        return {name: float(torch.cat(values).mean()) for name, values in parts.items()}

    def _evaluation_groups(self, store: SetStore) -> Iterator[NDArray[np.int64]]:
        """Yield all examples in groups of similar sizes."""
        sizes = self.lengths(store)
        order = np.argsort(sizes, kind="stable")
        start = 0
        while start < len(order):
            # Larger sets follow: half the rows that the smallest one would allow.
            rows = max(1, EVALUATION_BATCH_TOKENS // (2 * max(1, int(sizes[order[start]]))))
            yield order[start : start + rows]
            start += rows

    def scores(self, metrics: Mapping[str, float]) -> list[TaskScore]:
        """Return the metrics with the problem that they are of."""
        signature = f"problem:{self.text.problem}"
        if self.is_generated(self.config):
            signature += f"|sets:{self.config.sets.validation_sets}|seed:{self.config.train.seed}"
        return [
            TaskScore(name, metrics[name], signature) for name in self.metrics if name in metrics
        ]

    def golden_inputs(self, records: Iterable[Record]) -> list[Any]:
        """Return a few sets as lists."""
        found: list[NDArray[np.float32]] = []
        for record in records:
            if len(found) == NUM_GOLDEN_INPUTS:
                break
            found.append(self.encode_set(record.fields.get(self.config.sets.set_field), record))
        if not found and self.is_generated(self.config):
            store = self.generate("valid")
            for index in range(NUM_GOLDEN_INPUTS):
                one = np.array([index])
                batch = self.make_batch(store.arrays(one, int(store.sizes(one)[0])), one)
                sets = self.elements(batch)[0].numpy()
                found.append(sets if self.objective.images else sets * self._scale + self._shift)
        return [np.round(each.astype(np.float64), 4).tolist() for each in found]

    def golden_outputs(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """Return the model's outputs for sets, one by one."""
        found = []
        for value in inputs:
            try:
                elements = self.encode_set(value)
            except DataError as error:
                raise ValueError(str(error)) from error
            batch = self.batch_sets([elements]).to(next(model.parameters()).device)
            with torch.no_grad():
                found.append(model(batch.elements, batch.mask)[0].float().tolist())
        return found

    def batch_sets(self, sets: Sequence[NDArray[np.float32]]) -> SetBatch:
        """Return a batch of encoded sets without targets, for prediction."""
        store = FileSets(sets, np.zeros(len(sets), np.float32), features=self.text.features)
        return self.collate(store, np.arange(len(sets)))

    def describe(self) -> str:
        """Return the problem, and the numbers of an element."""
        labels = f", {len(self.text.labels)} labels" if self.text.labels else ""
        return f"{self.text.problem} of sets of {self.text.features}-number elements{labels}"


def _build_objective(sets: SetsConfig, text: SetsText) -> SetObjective:
    """Return the objective of a problem."""
    if text.problem == "clustering":
        return Clustering(components=sets.components, features=text.features)
    if text.problem == "unique":
        return Counting()
    if text.labels is not None:
        return SetClassification(text.labels.names)
    return Regression(squared=sets.loss == "l2", shift=text.target_shift, scale=text.target_scale)


def _fit_text(sets: SetsConfig, records: ReadRecords) -> SetsText:
    """Return the statistics of the training records, read once."""
    count, total, squares = 0, np.zeros(0), np.zeros(0)
    numbers, labels = list[float](), set[str]()
    problem = sets.problem
    for record in records():
        elements = parse_set(
            record.value(sets.set_field), sets, record, width=len(total) or None
        ).astype(np.float64)
        if not len(total):
            total, squares = (np.zeros(elements.shape[1]) for _ in range(2))
        count, total = count + len(elements), total + elements.sum(axis=0)
        squares = squares + np.square(elements).sum(axis=0)
        if problem == "auto":
            has_label = is_label(record.value(sets.target_field))
            problem = "classification" if has_label else "regression"
        if problem == "classification":
            labels.add(record.label(sets.target_field))
        else:
            numbers.append(parse_number(record, sets.target_field))
    if not count:
        raise DataError(
            "training needs at least one set",
            found="none in data.train",
            fix='write one {"set": [...], "target": ...} per line',
        )
    mean = total / count
    shift, scale = tuple(mean.tolist()), _deviations(squares / count - np.square(mean))
    if problem == "classification":
        if len(labels) < 2:
            raise DataError(
                "classification needs at least two labels",
                found=", ".join(sorted(labels)),
                fix=f"check the field {sets.target_field!r}",
            )
        return SetsText(problem, len(mean), shift, scale, labels=Labels.build(labels))
    (deviation,) = _deviations(np.array([np.var(numbers)]))
    return SetsText(problem, len(mean), shift, scale, float(np.mean(numbers)), deviation)


def _deviations(variances: NDArray[np.float64]) -> tuple[float, ...]:
    """Return square roots; 1 for zero variance."""
    return tuple(math.sqrt(each) if each > 1e-12 else 1.0 for each in variances.tolist())


def _read_features(data: bytes, labels: Labels | None) -> SetsText:
    """Return the text of features.json; raise BundleError if it is not valid."""
    try:
        values = json.loads(data)
        text = SetsText(
            problem=str(values["problem"]),
            features=int(values["features"]),
            shift=tuple(map(float, values["shift"])),
            scale=tuple(map(float, values["scale"])),
            target_shift=float(values["target_shift"]),
            target_scale=float(values["target_scale"]),
            labels=labels,
        )
        numbers = (*text.shift, *text.scale, text.target_shift, text.target_scale)
        known = text.problem in ("regression", "classification", *GENERATED_TEXTS)
        if (
            not known
            or (text.problem == "classification") != (labels is not None)
            or not text.features == len(text.shift) == len(text.scale) >= 1
            or not all(map(math.isfinite, numbers))
        ):
            raise ValueError(f"{values!r:.100}")
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise BundleError(
            f"{FEATURES_FILE} must describe the sets of a model",
            found=f"{type(error).__name__}: {error}"[:160],
            fix="copy the model directory again",
        ) from error
    return text
