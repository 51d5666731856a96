"""The translation task: examples, batches, loss, and validation by loss and BLEU.

Label-smoothed cross-entropy and the KL terms of R-Drop and SimCut are `linear_cross_entropy` and
`linear_consistency_loss` in `ops/fused_linear_cross_entropy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config import TrainConfig
from dragoman.data.collate import Batch
from dragoman.errors import ConfigError
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.ops import (
    IGNORE_INDEX,
    ConsistencyWeights,
    CrossEntropyOutput,
    linear_consistency_loss,
    linear_cross_entropy,
)
from dragoman.runtime import signals
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import Progress, QuietProgress
from dragoman.training.task_protocol import Loss

MAX_NLL = 80.0  # a loss whose perplexity still fits a float


@dataclass(frozen=True, kw_only=True, slots=True)
class Regularization:
    """Regularization of training: terms beside the cross-entropy, and input noise; 0 for none."""

    r_drop: float = 0.0  # alpha of Liang et al. (2021)
    simcut: float = 0.0  # alpha of Gao et al. (2022)
    simcut_probability: float = 0.05  # of a token's embedding to be cut to zero
    word_dropout: float = 0.0  # probability of a token to become <unk>

    @classmethod
    def of(cls, config: TrainConfig) -> Regularization:
        """Return that of a training configuration."""
        return cls(
            r_drop=config.r_drop,
            simcut=config.simcut,
            simcut_probability=config.simcut_probability,
            word_dropout=config.word_dropout,
        )

    @property
    def consistency_weights(self) -> ConsistencyWeights | None:
        """Return the weights of the loss of two passes; None where one is enough."""
        if self.simcut:
            return ConsistencyWeights.simcut(self.simcut)
        return ConsistencyWeights.r_drop(self.r_drop) if self.r_drop else None


class TranslationTask:
    """Label-smoothed cross-entropy of the target tokens, Szegedy et al. (2016), as a sum.

    In training, R-Drop or SimCut compute every pair twice, as two rows of one pass.
    """

    def __init__(
        self,
        *,
        smoothing: float,
        regularization: Regularization | None = None,
        num_tags: int = 0,  # language tags, whose ids follow those of the special tokens
    ) -> None:
        self.num_tags = num_tags
        self.smoothing, self.regularization = smoothing, regularization or Regularization()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss over the target tokens; padding is not projected to the vocabulary."""
        assert isinstance(model, EncoderDecoder), (
            f"translation needs an EncoderDecoder; found {type(model).__name__}"
        )
        losses: dict[str, Tensor] = {}  # auxiliary losses, which layers add
        hard_alignments = model.reinforce_alignments() if model.training else []
        for alignment in hard_alignments:
            alignment.discard_log_probs()
        added = self.regularization
        src, tgt_in = batch.src, batch.tgt_in
        if model.training and added.word_dropout:
            src, tgt_in = (
                drop_words(ids, added.word_dropout, self.num_tags) for ids in (src, tgt_in)
            )
        consistency = added.consistency_weights if model.training else None
        if consistency is not None and hard_alignments:
            raise ConfigError(
                [
                    "train.r_drop and train.simcut need attention with a gradient; found "
                    "alignments that are sampled (REINFORCE); set both to 0"
                ]
            )
        compute_loss: Callable[..., CrossEntropyOutput] = linear_cross_entropy
        if consistency is None:
            embedded = model.embed_source(src), model.embed_target(tgt_in)
            masks = batch.src_mask, batch.tgt_mask
            hidden = model.hidden_embedded(*embedded, *masks, losses=losses)
        else:
            hidden = self._hidden_twice(model, src, tgt_in, batch, losses)
            compute_loss = partial(linear_consistency_loss, weights=consistency)
        rows, targets = _select_targets(hidden, batch)
        cross_entropy = compute_loss(
            rows, model.output_weight, model.output_bias, targets, smoothing=self.smoothing
        )
        if hard_alignments:
            reward = _sentence_log_likelihoods(model, hidden, batch)
            losses["policy"] = torch.stack(
                [alignment.policy_loss(reward) for alignment in hard_alignments]
            ).sum()
        total = sum(losses.values(), cross_entropy.loss)
        return Loss(total, cross_entropy.nll, batch.tgt_lengths.sum())

    def _hidden_twice(
        self,
        model: EncoderDecoder,
        src: Tensor,
        tgt_in: Tensor,
        batch: Batch,
        losses: dict[str, Tensor],
    ) -> Tensor:
        """Return the decoder's outputs (2, B, T, D) of two passes with different dropout.

        For SimCut the inputs of the second are cut. Auxiliary losses are those of both, halved.
        """
        embedded = others = model.embed_source(src), model.embed_target(tgt_in)
        if self.regularization.simcut:
            p = self.regularization.simcut_probability
            others = (
                cut_tokens(embedded[0], src, p, self.num_tags),
                cut_tokens(embedded[1], tgt_in, p, self.num_tags),
            )
        masks = (
            None if mask is None else torch.cat([mask, mask])
            for mask in (batch.src_mask, batch.tgt_mask)
        )
        both = (torch.cat(pair) for pair in zip(embedded, others, strict=True))
        doubled: dict[str, Tensor] = {}
        hidden = model.hidden_embedded(*both, *masks, losses=doubled)
        losses |= {name: loss / 2 for name, loss in doubled.items()}
        return hidden.view(2, *batch.tgt_in.shape, -1)


def drop_words(ids: Tensor, p: float, num_tags: int = 0) -> Tensor:
    """Replace each token (B, T) by <unk> with probability p, but not special tokens and tags.

    Gal and Ghahramani (2016), "word dropout"; Sennrich et al. (2016).
    """
    dropped = torch.rand(ids.shape, device=ids.device) < p
    return ids.masked_fill(dropped & ~_is_special(ids, num_tags), UNK)


def cut_tokens(embedded: Tensor, ids: Tensor, p: float, num_tags: int = 0) -> Tensor:
    """Set the embedding (B, T, D) of each token (B, T) to zero with probability p: token cutoff.

    Shen et al. (2020), as used by SimCut (Gao et al. 2022). Special tokens and language tags stay:
    the released code spares the source's </s> and the decoder's first token too.
    """
    kept = torch.rand(ids.shape, device=ids.device) >= p
    kept |= _is_special(ids, num_tags)
    return embedded * kept.unsqueeze(-1).to(embedded.dtype)


def _is_special(ids: Tensor, num_tags: int) -> Tensor:
    """Whether each token (B, T) is padding, a boundary of the sentence or a language tag."""
    special = (ids == PAD) | (ids == BOS) | (ids == EOS)
    if num_tags:
        special |= (ids >= len(SPECIAL_TOKENS)) & (ids < len(SPECIAL_TOKENS) + num_tags)
    return special


def _select_targets(hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the hidden states (..., N, D) of the target tokens, and the targets (N,)."""
    mask = batch.tgt_mask
    if mask is None:
        return hidden.flatten(-3, -2), batch.tgt_out.flatten()
    if hidden.is_cuda:
        # Boolean indexing synchronizes with the device; projecting the few padded rows costs less.
        return hidden.flatten(-3, -2), batch.tgt_out.masked_fill(~mask, IGNORE_INDEX).flatten()
    return hidden[..., mask, :], batch.tgt_out[mask]


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


@dataclass(frozen=True, kw_only=True)
class MultilingualValidator:
    """Validates a multilingual model on each of its directions."""

    validators: Mapping[str, TranslationValidator]  # by direction, such as de-en

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Return the means over the directions, then the loss and BLEU of each: "loss_de-en"."""
        found = {name: validate(model) for name, validate in self.validators.items()}
        common = [
            metric
            for metric in ("loss", "bleu", "exact")
            if all(metric in metrics for metrics in found.values())
        ]
        means = {
            metric: sum(metrics[metric] for metrics in found.values()) / len(found)
            for metric in common
        }
        of_each = {
            f"{metric}_{name}": metrics[metric]
            for name, metrics in found.items()
            for metric in ("loss", "bleu")
            if metric in metrics
        }
        perplexity = math.exp(min(means["loss"], MAX_NLL))
        return {"loss": means["loss"], "perplexity": perplexity, **means, **of_each}
