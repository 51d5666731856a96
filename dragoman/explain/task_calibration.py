"""Confidence and correctness of the predictions of labels, tags and tokens, for calibration."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dragoman.data.example_store import ExampleStore
from dragoman.explain.token_statistics import TokenStatistics, measure_documents
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.ops import IGNORE_INDEX
from dragoman.tasks.base import TrainingTask, evaluation_batches
from dragoman.tasks.classification import ClassificationTask
from dragoman.tasks.language import LanguageTask
from dragoman.tasks.masked import MaskedLanguageTask
from dragoman.tasks.pairs import PairBatch, PairsTask
from dragoman.tasks.tagging import TagBatch, TaggingTask
from dragoman.training.mixed_precision import Precision
from dragoman.training.progress import Progress, QuietProgress


class Predictions(NamedTuple):
    """How sure a model was of N predictions, and whether they were right."""

    confidence: NDArray[np.float64]
    right: NDArray[np.bool_]
    what: str  # in the plural: "labels"


@torch.inference_mode()
def measure_predictions(
    task: TrainingTask,
    model: nn.Module,
    store: ExampleStore,
    *,
    progress: Progress | None = None,
) -> Predictions | None:
    """Return the predictions of labelled examples; None for a task without probabilities.

    Of several labels to a text, each is a prediction that it applies or does not.
    """
    progress = progress or QuietProgress()
    device = next(model.parameters()).device
    if isinstance(task, ClassificationTask):
        logits = task.logits(
            model,
            store,
            device=device,
            precision=Precision(torch.float32, "evaluation"),
            progress=progress,
        )
        values, expected = task.probabilities(logits).astype(np.float64), task.expected(store)
        if task.text.multi_label:
            sure = np.maximum(values, 1.0 - values).ravel()
            return Predictions(sure, ((values >= 0.5) == expected).ravel(), "labels")
        best = values.argmax(axis=1)
        rows = np.arange(len(best))
        return Predictions(values[rows, best], expected[rows, best], "labels")
    if isinstance(task, PairsTask):
        return _measure_pairs(task, model, store, device, progress)
    if isinstance(task, TaggingTask):
        return _measure_tags(task, model, store, device, progress)
    found = measure_text(task, model, store)
    return None if found is None else Predictions(found.confidence, found.right, "tokens")


def measure_text(
    task: TrainingTask, model: nn.Module, store: ExampleStore
) -> TokenStatistics | None:
    """Return the token distributions of a language model on a text; None for any other model."""
    if (
        not isinstance(task, LanguageTask)
        or isinstance(task, MaskedLanguageTask)
        or not isinstance(model, NeuralLanguageModel)
    ):
        return None
    stream = task.stream(store)
    documents = np.split(stream.targets, stream.starts[1:])
    return measure_documents(
        model, [document.tolist() for document in documents], segment=task.language.segment
    )


def _measure_pairs(
    task: PairsTask,
    model: nn.Module,
    store: ExampleStore,
    device: torch.device,
    progress: Progress,
) -> Predictions | None:
    """Return the labels of sentence pairs; None for a model that has only scores."""
    confidence, right = list[NDArray[np.float64]](), list[NDArray[np.bool_]]()
    for batch in evaluation_batches(task, store, device=device, progress=progress):
        assert isinstance(batch, PairBatch), "pairs are collated to a PairBatch"
        output = model(batch.token_ids, batch.flags, batch.lengths)
        if output.labels is None:
            return None
        best = output.labels.double().softmax(dim=1).max(dim=1)
        known = (batch.labels != IGNORE_INDEX).cpu().numpy()
        confidence.append(best.values.cpu().numpy()[known])
        right.append((best.indices == batch.labels).cpu().numpy()[known])
    return Predictions(np.concatenate(confidence), np.concatenate(right), "labels")


def _measure_tags(
    task: TaggingTask,
    model: nn.Module,
    store: ExampleStore,
    device: torch.device,
    progress: Progress,
) -> Predictions:
    """Return the tags of all tokens with their marginal probabilities."""
    confidence, right = list[float](), list[bool]()
    known = len(task.text.names)
    for batch in evaluation_batches(task, store, device=device, progress=progress):
        assert isinstance(batch, TagBatch), "sentences are collated to a TagBatch"
        for found, ids, size in zip(
            task.predict(model, batch), batch.tags.tolist(), batch.sizes.tolist(), strict=True
        ):
            # A tag that training did not have is never right.
            seen = [min(each, known - 1) for each in ids[:size]]
            wanted = task.text.tags_of(seen)
            confidence += found.probabilities
            right += [
                tag == other and each < known
                for tag, other, each in zip(found.tags, wanted, ids[:size], strict=True)
            ]
    return Predictions(np.array(confidence), np.array(right, np.bool_), "tags")
