"""Statistics of a model's distributions by teacher forcing: calibration and mean sorted output.

The model reads the reference and predicts each of its tokens; its distribution at every position
is compared with the token that stands there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.decoding.padded_batch import group_by_length, pad_batch, pad_sources
from dragoman.evaluate.classification import CALIBRATION_BINS
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.text.special_tokens import BOS, EOS

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
