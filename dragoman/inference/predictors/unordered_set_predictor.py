"""Predictor of sets: a number, a label, a count or clusters for each set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dragoman.data.labeled_records import TEXT, Record
from dragoman.errors import DataError, escape_unprintable
from dragoman.inference.predictors.base import Predictor
from dragoman.models.set_transformer_and_deep_sets import SetTransformer
from dragoman.tasks.unordered_set_input_task import SetsTask

if TYPE_CHECKING:
    from dragoman.explain.task_explainers.base import TaskExplainer

EMPTY_NOTE = "the line is empty: there is no set"
InputSet = Sequence[Any]  # numbers, or equally long vectors
EncodedSet = NDArray[np.float32]  # (n, F)


class EmptyLine(list[Any]):
    """An empty line of a file, which keeps its position and has no prediction."""


@dataclass(frozen=True, slots=True)
class SetPrediction:
    """The prediction for a set: the fields that its problem has."""

    value: float | None = None  # of regression
    label: str | None = None  # of classification
    probabilities: dict[str, float] | None = None  # of classification, by label
    count: int | None = None  # of counting
    rate: float | None = None  # of counting: the Poisson rate
    components: list[dict[str, Any]] | None = None  # of clustering: weight, mean, deviation
    clusters: list[int] | None = None  # of clustering: the component of each element
    notes: tuple[str, ...] = ()

    def to_line(self, *, top: int = 1) -> str:
        """Return a number, labels with their probabilities, or the clusters of the elements."""
        if self.probabilities is not None:
            ranked = sorted(self.probabilities.items(), key=lambda each: -each[1])[: max(1, top)]
            return "\t".join(f"{escape_unprintable(label)}\t{value:.4f}" for label, value in ranked)
        if self.clusters is not None:
            return " ".join(map(str, self.clusters))
        if self.count is not None:
            return str(self.count)
        return "" if self.value is None else f"{self.value:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the problem as JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found = {name: value for name, value in values.items() if value not in (None, ())}
        return found | ({"notes": list(self.notes)} if self.notes else {})


class SetModel(Predictor[InputSet, EncodedSet, SetPrediction]):
    """Predicts for sets: `SetModel.load("dir").predict([[3, 1, 2], [10.5]])`."""

    task_name = "sets"
    task: SetsTask

    @property
    def has_alternatives(self) -> bool:
        """Whether the model was trained with labels."""
        return self.task.text.labels is not None

    def read_record(self, record: Record, *, text_field: str = "") -> InputSet:
        """Return the set in a record: a line with a JSON list, or the field of `sets.set_field`."""
        field = text_field or self.config.sets.set_field
        value = record.fields.get(field, None if text_field else record.fields.get(TEXT))
        if isinstance(value, str) and not value.strip() and field not in record.fields:
            return EmptyLine()
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise record.error(
                    "must be a JSON list of numbers", repr(value), "write [1.5, 2, 7]"
                ) from None
        if value is None:
            value = record.value(field)
        self.task.encode_set(value, record)
        found: InputSet = value
        return found

    def check_inputs(self, inputs: Iterable[Any]) -> Iterable[InputSet]:
        """Raise DataError unless the inputs are an iterable of sets."""
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
            raise DataError(
                "inputs must be a list of sets", found=f"{inputs!r:.80}", fix="write [[1, 2, 3]]"
            )
        return inputs

    def size(self, example: InputSet) -> int:
        """Return a bound on an input's memory: the numbers of its elements."""
        return len(example) * self.task.text.features if isinstance(example, (list, tuple)) else 1

    def encode(self, inputs: Sequence[InputSet]) -> list[EncodedSet]:
        """Return sets (n, F); raise DataError for an invalid one."""
        return [
            np.zeros((0, self.task.text.features), np.float32)
            if isinstance(each, EmptyLine)
            else self.task.encode_set(each.tolist() if isinstance(each, np.ndarray) else each)
            for each in inputs
        ]

    def task_input(self, example: InputSet) -> TaskExplainer:  # type: ignore[override]
        """Return a set to be explained; a text is read as a JSON list."""
        from dragoman.explain.task_explainers.unordered_set_model import SetInput

        assert isinstance(self.model, SetTransformer), "the model of a bundle of sets"
        if isinstance(example, str):
            [example] = self.read_arguments([example])
        [elements] = self.encode([example])
        if not len(elements):
            raise DataError(
                "a set to explain must have elements", found="an empty line", fix="leave it out"
            )
        return SetInput(self.model, self.task, elements)

    def repeat_input(self, request: Mapping[str, Any]) -> TaskExplainer:
        """Return the set of an explanation."""
        return self.task_input(request["set"])

    def length(self, encoded: EncodedSet) -> int:
        """Return the number of elements."""
        return len(encoded)

    def predict_batch(
        self, model: nn.Module, encoded: Sequence[EncodedSet], device: torch.device
    ) -> list[SetPrediction]:
        """Return the predictions of a batch; an empty line has none."""
        sets = [each for each in encoded if len(each)]
        found = iter(self._predict_sets(model, sets, device) if sets else ())
        empty = SetPrediction(notes=(EMPTY_NOTE,))
        return [next(found) if len(each) else empty for each in encoded]

    def _predict_sets(
        self, model: nn.Module, encoded: Sequence[EncodedSet], device: torch.device
    ) -> list[SetPrediction]:
        """Return the predictions of a batch of sets with elements."""
        batch = self.task.batch_sets(encoded).to(device)
        outputs = model(batch.elements, batch.mask)
        for elements, output in zip(encoded, outputs, strict=True):
            if not output.isfinite().all():
                raise DataError(
                    "a set must have numbers for which the model's outputs are finite",
                    found=f"{output.flatten()[0].item()} for {elements.squeeze().tolist()!r:.60}",
                    fix="pass numbers of the size of those of training",
                )
        found = self.task.objective.predictions(outputs, batch.elements, batch.mask)
        return [SetPrediction(**each) for each in found]
