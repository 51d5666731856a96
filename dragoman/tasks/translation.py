"""The translation task: label-smoothed cross-entropy loss, and validation by loss and BLEU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.data.collate import Batch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.ops import IGNORE_INDEX, linear_cross_entropy
from dragoman.runtime import signals
from dragoman.training.mixed_precision import Precision
from dragoman.training.progress import Progress, QuietProgress
from dragoman.training.task import Loss

MAX_NLL = 80.0  # a loss whose perplexity still fits a float


class TranslationTask:
    """Label-smoothed cross-entropy of the target tokens, Szegedy et al. (2016), as a sum."""

    def __init__(self, *, smoothing: float) -> None:
        self.smoothing = smoothing

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss over the target tokens; padding is not projected to the vocabulary."""
        assert isinstance(model, EncoderDecoder), (
            f"translation needs an EncoderDecoder; found {type(model).__name__}"
        )
        losses: dict[str, Tensor] = {}  # auxiliary losses, which layers add
        hard_alignments = model.reinforce_alignments() if model.training else []
        for alignment in hard_alignments:
            alignment.discard_log_probs()
        hidden = model.hidden(  # (B, T, D)
            batch.src, batch.tgt_in, batch.src_mask, batch.tgt_mask, losses=losses
        )
        rows, targets = _select_targets(hidden, batch)
        cross_entropy = linear_cross_entropy(
            rows, model.output_weight, model.output_bias, targets, smoothing=self.smoothing
        )
        if hard_alignments:
            reward = _sentence_log_likelihoods(model, hidden, batch)
            losses["policy"] = torch.stack(
                [alignment.policy_loss(reward) for alignment in hard_alignments]
            ).sum()
        total = sum(losses.values(), cross_entropy.loss)
        return Loss(total, cross_entropy.nll, batch.tgt_lengths.sum())


def _select_targets(hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden states (N, D) of the target tokens, and the targets (N,)."""
    mask = batch.tgt_mask
    if mask is None:
        return hidden.flatten(0, 1), batch.tgt_out.flatten()
    if hidden.is_cuda:
        # Boolean indexing synchronizes with the device; projecting the few padded rows costs less.
        return hidden.flatten(0, 1), batch.tgt_out.masked_fill(~mask, IGNORE_INDEX).flatten()
    return hidden[mask], batch.tgt_out[mask]


@torch.no_grad()
def _sentence_log_likelihoods(model: EncoderDecoder, hidden: Tensor, batch: Batch) -> Tensor:
    """Return the log-probability of each row's targets, (B,): the reward of hard attention."""
    log_probs = (
        model.project(hidden)
        .float()
        .log_softmax(dim=-1)
        .gather(2, batch.tgt_out.unsqueeze(2))
        .squeeze(2)
    )
    if batch.tgt_mask is not None:
        log_probs = log_probs.masked_fill(~batch.tgt_mask, 0.0)
    return log_probs.sum(dim=1)


class ValidationSample(NamedTuple):
    """Sentence pairs that every validation translates."""

    src: Sequence[str]
    tgt: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class TranslationValidator:
    """Validates a model: loss and perplexity per token on a corpus, BLEU of a translated sample.

    `batches` returns the corpus's batches; `translate` and `score` are those of the commands, so
    that training and evaluation cannot disagree (facebookresearch/fairseq#3245).
    """

    batches: Callable[[], Iterable[Batch]]
    count: int  # number of batches
    device: torch.device
    precision: Precision
    sample: ValidationSample | None = None
    translate: Callable[[nn.Module, Sequence[str]], Sequence[str]] | None = None
    score: Callable[[Sequence[str], Sequence[str]], float] | None = None
    progress: Progress = field(default_factory=QuietProgress)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return "loss" and "perplexity"; with a sample also "bleu" and "exact".

        "exact" is the fraction of translations that equal their reference. Raises StoppedError at a
        stop request.
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
        """Return the negative log-likelihood per target token of the corpus."""
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
