"""Translation: the loss of a target sentence given its source, and how well a model does on sentences it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.data.batches import Batch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.ops import IGNORE_INDEX, linear_cross_entropy
from dragoman.runtime import signals
from dragoman.training.mixed_precision import Precision
from dragoman.training.progress import Progress, QuietProgress
from dragoman.training.task import Loss
from dragoman.training.torch_compile import CompiledForward

MAX_NLL = 80.0  # a loss whose perplexity still fits a float
LOGITS_MEMORY_DIVISOR = 32  # of a GPU's memory, which is there to be used: one part in so many may hold logits in half precision

ForwardFunction = Callable[
    [EncoderDecoder, Tensor, Tensor | None, Tensor, Tensor | None, dict[str, Tensor]], Tensor
]


def forward(
    model: EncoderDecoder,
    src: Tensor,
    src_mask: Tensor | None,
    tgt_in: Tensor,
    tgt_mask: Tensor | None,
    losses: dict[str, Tensor],
) -> Tensor:
    """Encode and decode with the targets given: (B, S) and (B, T) give (B, T, D)."""
    memory = model.encode(src, src_mask, losses=losses)
    return model.decode(tgt_in, memory, tgt_mask, losses=losses)


class TranslationTask:
    """Label-smoothed cross-entropy of every target piece, Szegedy et al. (2016), as a sum."""

    def __init__(self, *, smoothing: float, forward: ForwardFunction = forward) -> None:
        self.smoothing, self._forward = smoothing, forward

    def with_torch_compile(self) -> TranslationTask:
        """Make the same task, which has the model's blocks compiled at its first pass."""
        return TranslationTask(smoothing=self.smoothing, forward=CompiledForward(self._forward))

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Sum over the valid targets; only there is anything projected to the vocabulary."""
        assert isinstance(model, EncoderDecoder), (
            f"translation needs an EncoderDecoder; found {type(model).__name__}"
        )
        losses: dict[str, Tensor] = {}
        reinforce_alignments = model.reinforce_alignments() if model.training else []
        for part in reinforce_alignments:
            part.discard_log_probs()
        hidden = self._forward(
            model, batch.src, batch.src_mask, batch.tgt_in, batch.tgt_mask, losses
        )
        rows, targets = _select_targets(hidden, batch)
        chunk = (
            {"chunk": _logit_rows_per_chunk(hidden.device, model.output_weight.size(0))}
            if hidden.is_cuda
            else {}
        )
        found = linear_cross_entropy(
            rows, model.output_weight, model.output_bias, targets, smoothing=self.smoothing, **chunk
        )
        if reinforce_alignments:
            reward = _sentence_log_likelihoods(model, hidden, batch)
            losses["policy"] = torch.stack(
                [part.policy_loss(reward) for part in reinforce_alignments]
            ).sum()
        return Loss(sum(losses.values(), found.loss), found.nll, batch.tgt_lengths.sum())


def _logit_rows_per_chunk(device: torch.device, vocabulary: int) -> int:
    """Say how many rows of logits a GPU projects at a time: 32,768 pieces for each of 65,536 rows with 128 GiB."""
    return max(
        512,
        torch.cuda.get_device_properties(device).total_memory
        // (2 * LOGITS_MEMORY_DIVISOR * vocabulary),
    )


def _select_targets(hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Take the rows (N, D) that have a target, with the targets (N,)."""
    mask = batch.tgt_mask
    if mask is None:
        return hidden.flatten(0, 1), batch.tgt_out.flatten()
    if hidden.is_cuda:
        # Choosing rows by a mask asks the device how many there are, and waits; the few padded rows cost less.
        return hidden.flatten(0, 1), batch.tgt_out.masked_fill(~mask, IGNORE_INDEX).flatten()
    return hidden[mask], batch.tgt_out[mask]


@torch.no_grad()
def _sentence_log_likelihoods(model: EncoderDecoder, hidden: Tensor, batch: Batch) -> Tensor:
    """Say how probable each row's targets were, (B,) in logarithms: what choices made on the way are rewarded with."""
    found = (
        model.project(hidden)
        .float()
        .log_softmax(dim=-1)
        .gather(2, batch.tgt_out.unsqueeze(2))
        .squeeze(2)
    )
    return (found if batch.tgt_mask is None else found.masked_fill(~batch.tgt_mask, 0.0)).sum(dim=1)


class ValidationSample(NamedTuple):
    """Sentences that are translated at every validation, always the same ones."""

    src: Sequence[str]
    tgt: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class TranslationValidator:
    """Measures a model on a validation corpus: loss and perplexity a piece, and the score of a translated sample.

    `batches` makes the corpus's batches anew at each call; `translate` and `score` are those of the commands, so that
    training and evaluation cannot disagree (facebookresearch/fairseq#3245).
    """

    batches: Callable[[], Iterable[Batch]]
    count: int  # how many batches that makes
    device: torch.device
    precision: Precision
    sample: ValidationSample | None = None
    translate: Callable[[nn.Module, Sequence[str]], Sequence[str]] | None = None
    score: Callable[[Sequence[str], Sequence[str]], float] | None = None
    progress: Progress = field(default_factory=QuietProgress)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return "loss" and "perplexity", and where a sample is translated "bleu" and "exact", the fraction that equals its reference.

        Raises StoppedError at a request to stop.
        """
        loss = self._loss(model)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, MAX_NLL))}
        if (
            self.sample is not None
            and self.translate is not None
            and self.score is not None
            and len(self.sample.src)
        ):
            signals.raise_if_stop_requested()
            translations = self.translate(model, self.sample.src)
            metrics["bleu"] = self.score(translations, self.sample.tgt)
            same = [
                one.split() == other.split()
                for one, other in zip(translations, self.sample.tgt, strict=True)
            ]
            metrics["exact"] = sum(same) / len(same)
        return metrics

    def _loss(self, model: nn.Module) -> float:
        """Average the negative log-likelihood over all pieces of the corpus; padding, order and batch size do not matter."""
        task = TranslationTask(smoothing=0.0)
        nll, count = 0.0, 0.0
        with self.progress.phase("validating", self.count, "batches") as phase:
            for batch in self.batches():
                signals.raise_if_stop_requested()
                with self.precision.autocast(self.device):
                    loss = task.loss(model, batch.to(self.device))
                nll, count = nll + float(loss.nll), count + float(loss.count)
                phase.advance()
        return nll / max(count, 1.0)
