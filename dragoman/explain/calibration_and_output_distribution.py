"""Statistics of a model over a corpus: calibration, mean sorted distribution.

Of a translation model, teacher forcing gives the distributions: the model reads the reference and
predicts each of its tokens, and its distribution at every position is compared with the reference
token. Of the other tasks, predictions of labels, tags and tokens are compared with what was
expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.inference_batches import group_by_length, pad_batch, pad_sources
from dragoman.evaluate.classification_metrics import CALIBRATION_BINS
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.ops import IGNORE_INDEX
from dragoman.tasks.bert_and_xlnet_language_modeling import MaskedLanguageTask
from dragoman.tasks.classification import ClassificationTask
from dragoman.tasks.language_model import LanguageTask
from dragoman.tasks.non_translation_task import TrainingTask, evaluation_batches
from dragoman.tasks.sentence_pair_classification import PairBatch, PairsTask
from dragoman.tasks.tagging import TagBatch, TaggingTask
from dragoman.text.special_tokens import BOS, EOS
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import Progress, QuietProgress

MAX_TOKENS = 20_000  # target tokens that are measured
_BATCH_TOKENS = 2_048
_MAX_LOGITS = 1 << 23  # sorted together


class TokenStatistics(NamedTuple):
    """The distributions at N positions."""

    confidence: NDArray[np.float64]  # (N,), probability of the most probable token
    right: NDArray[np.bool_]  # (N,), whether that token is the reference's
    reference: NDArray[np.float64]  # (N,), probability of the reference's token
    sorted_mean: NDArray[np.float64]  # (V,), mean probability of each rank, the largest first


class ReliabilityBin(NamedTuple):
    """Predictions whose confidence lies in one interval."""

    low: float
    high: float
    predictions: int
    confidence: float  # mean
    accuracy: float


def measure_pairs(
    model: EncoderDecoder, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> TokenStatistics:
    """Measure a translation model on token ids of sources and references."""
    device = next(model.parameters()).device

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        lengths = [max(len(src), len(tgt)) + 1 for src, tgt in pairs]
        # In the order given, so that a limit on the tokens is not one on the lengths.
        for group in sorted(
            group_by_length(lengths, batch_tokens=_BATCH_TOKENS), key=lambda rows: min(rows)
        ):
            src, src_mask = pad_sources([pairs[row][0] for row in group], device)
            tgt_in, mask = pad_batch([[BOS, *pairs[row][1]] for row in group], device)
            tgt_out, _ = pad_batch([[*pairs[row][1], EOS] for row in group], device)
            hidden = model.decode(tgt_in, model.encode(src, src_mask), mask)
            kept = torch.ones_like(tgt_out, dtype=torch.bool) if mask is None else mask
            yield hidden[kept], tgt_out[kept]

    return _measure(batches, model.project)


def measure_documents(
    model: NeuralLanguageModel, documents: Iterable[Sequence[int]], *, segment: int
) -> TokenStatistics:
    """Measure a language model on token ids of texts, read in segments without a memory."""
    device = next(model.parameters()).device
    rows = [
        ([BOS, *text[:-1]][start : start + segment], list(text[start : start + segment]))
        for text in documents
        for start in range(0, len(text), segment)
    ]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for row_in, row_out in rows:
            tokens = torch.tensor([row_in], device=device)
            yield model.decode(tokens)[0], torch.tensor(row_out, device=device)

    return _measure(batches, model.project)


@torch.inference_mode()
def _measure(
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]], project: Callable[[Tensor], Tensor]
) -> TokenStatistics:
    """Measure batches of hidden states (N, D) with their references (N,), up to MAX_TOKENS."""
    confidence, right, reference = list[Tensor](), list[Tensor](), list[Tensor]()
    total, count = torch.zeros(0, dtype=torch.float64), 0
    for hidden, expected in batches():
        size = max(1, _MAX_LOGITS // max(1, project(hidden[:1]).size(-1)))
        for start in range(0, min(len(expected), MAX_TOKENS - count), size):
            stop = min(start + size, MAX_TOKENS - count)
            probabilities = project(hidden[start:stop]).double().softmax(-1).cpu()
            tokens = expected[start:stop].cpu()
            best = probabilities.max(-1)
            confidence.append(best.values)
            right.append(best.indices == tokens)
            reference.append(probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
            sums = probabilities.sort(-1, descending=True).values.sum(0)
            total = sums if not len(total) else total + sums
        count = sum(len(each) for each in right)
        if count >= MAX_TOKENS:
            break
    if not count:
        empty = np.zeros(0)
        return TokenStatistics(empty, np.zeros(0, np.bool_), empty, empty)
    return TokenStatistics(
        torch.cat(confidence).numpy(),
        torch.cat(right).numpy(),
        torch.cat(reference).numpy(),
        (total / count).numpy(),
    )


def reliability_bins(
    confidence: NDArray[np.floating], right: NDArray[np.bool_], *, bins: int = CALIBRATION_BINS
) -> list[ReliabilityBin]:
    """Return the bins of equal width that hold predictions; a bin includes its upper end."""
    bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return [
        ReliabilityBin(
            low=at / bins,
            high=(at + 1) / bins,
            predictions=int(inside.sum()),
            confidence=float(confidence[inside].mean()),
            accuracy=float(right[inside].mean()),
        )
        for at in range(bins)
        if (inside := bin_of == at).any()
    ]


def smoothed_target(vocabulary: int, smoothing: float) -> NDArray[np.float64]:
    """Return the target of label smoothing sorted by rank, (V,): the reference's token first."""
    target = np.full(vocabulary, smoothing / max(1, vocabulary - 1))
    target[0] = 1.0 - smoothing
    return target


class Predictions(NamedTuple):
    """How sure a model was of N predictions, and whether they were right."""

    confidence: NDArray[np.float64]
    right: NDArray[np.bool_]
    what: str  # in the plural: "labels"


@torch.inference_mode()
def measure_predictions(
    task: TrainingTask,
    model: nn.Module,
    store: InMemoryExamples,
    *,
    progress: Progress | None = None,
) -> Predictions | None:
    """Return the predictions of labelled examples; None for a task without probabilities.

    Of several labels to a text, each is a prediction that it applies or does not. Texts and pairs
    without words have no predictions.
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
        known = task.has_words(store)
        values = task.probabilities(logits)[known].astype(np.float64)
        expected = task.expected(store)[known]
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
    task: TrainingTask, model: nn.Module, store: InMemoryExamples
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
    store: InMemoryExamples,
    device: torch.device,
    progress: Progress,
) -> Predictions | None:
    """Return the labels of sentence pairs; None for a model that has only scores."""
    confidence, right = list[NDArray[np.float64]](), list[NDArray[np.bool_]]()
    has_words = task.has_words(store)
    for batch in evaluation_batches(task, store, device=device, progress=progress):
        assert isinstance(batch, PairBatch), "pairs are collated to a PairBatch"
        output = model(batch.token_ids, batch.flags, batch.lengths)
        if output.labels is None:
            return None
        best = output.labels.double().softmax(dim=1).max(dim=1)
        known = (batch.labels != IGNORE_INDEX).cpu().numpy() & has_words[batch.examples]
        confidence.append(best.values.cpu().numpy()[known])
        right.append((best.indices == batch.labels).cpu().numpy()[known])
    return Predictions(np.concatenate(confidence), np.concatenate(right), "labels")


def _measure_tags(
    task: TaggingTask,
    model: nn.Module,
    store: InMemoryExamples,
    device: torch.device,
    progress: Progress,
) -> Predictions:
    """Return the tags of all tokens with their marginal probabilities."""
    confidence, right = list[float](), list[bool]()
    for batch in evaluation_batches(task, store, device=device, progress=progress):
        assert isinstance(batch, TagBatch), "sentences are collated to a TagBatch"
        for found, ids, size in zip(
            task.predict(model, batch), batch.tags.tolist(), batch.sizes.tolist(), strict=True
        ):
            # A tag that training did not have is `<unknown>`, which no model predicts.
            wanted = task.text.tags_of(ids[:size])
            confidence += found.probabilities
            right += [tag == other for tag, other in zip(found.tags, wanted, strict=True)]
    return Predictions(np.array(confidence), np.array(right, np.bool_), "tags")
