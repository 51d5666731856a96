"""Attention pooling: a sequence of any length to one vector, or to several."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.argument_checks import check_key_mask, check_sequence
from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax


class Pooled(NamedTuple):
    """Pooled vectors and their attention weights."""

    vectors: Tensor  # (B, D), or (B, R, D) for several hops
    weights: Tensor  # (B, S), or (B, R, S); a row sums to 1, or to 0 if everything is masked


class StructuredPooling(RecordableAttention):
    r"""Structured self-attention pooling: several weighted sums (hops) of a sequence.

    .. math:: A = \mathrm{softmax}(W_2 \tanh(W_1 H^\top + b)), \quad M = A H

    Lin et al. (2017), "A Structured Self-attentive Sentence Embedding", who have no b and use 30
    hops. Add `overlap_penalty` to the loss to make the hops differ.
    """

    def __init__(self, width: int, *, hops: int, score_width: int = 0, bias: bool = False) -> None:
        super().__init__()
        if hops < 1 or width < 1:
            raise DragomanError(
                "pooling needs a width and at least one hop",
                found=f"hops={hops} and width={width}",
                fix="raise them",
            )
        self.width, self.hops = width, hops
        self.hidden = nn.Linear(width, score_width or width, bias=bias)  # W_1 and b
        self.queries = nn.Linear(score_width or width, hops, bias=False)  # W_2

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Pooled:
        """Pool (B, S, D) with a mask (B, S) to (B, R, D)."""
        check_sequence(x, self.width, "a sequence to pool")
        check_key_mask(mask, x.size(0), x.size(1))
        scores = self.queries(torch.tanh(self.hidden(x))).transpose(1, 2)  # (B, R, S)
        weights = masked_softmax(scores, None if mask is None else mask.unsqueeze(1))
        weights = self.apply_edits(weights.unsqueeze(1)).squeeze(1)
        vectors = weights @ x
        self.emit_record(
            AttentionRecord(weights.unsqueeze(1), x.unsqueeze(1), vectors.unsqueeze(1))
        )
        return Pooled(vectors, weights)


class AttentionPooling(StructuredPooling):
    r"""Attention pooling with one trained query: a weighted mean of the sequence.

    .. math:: \alpha_s = \mathrm{softmax}_s(u^\top \tanh(W h_s + b)), \quad
        v = \textstyle\sum_s \alpha_s h_s

    Yang et al. (2016), "Hierarchical Attention Networks"; the feed-forward attention of Raffel and
    Ellis (2015) has this form. With u = 0 it is the mean. A fully masked sequence gives zeros.
    """

    def __init__(self, width: int, *, score_width: int = 0, bias: bool = True) -> None:
        super().__init__(width, hops=1, score_width=score_width, bias=bias)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Pooled:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        vectors, weights = super().forward(x, mask=mask)
        return Pooled(vectors.squeeze(1), weights.squeeze(1))


class MultiDimensionalPooling(nn.Module):
    r"""Pool a sequence with weights for each feature: a vector of scores for every position.

    .. math:: v_d = \textstyle\sum_s \mathrm{softmax}_s(W_2\, \sigma(W_1 h_s + b_1) + b_2)_{sd}\,
        h_{sd}

    Shen et al. (2018), "DiSAN", source2token self-attention, sigma being ELU as there.
    """

    def __init__(self, width: int, *, score_width: int = 0) -> None:
        super().__init__()
        self.width = width
        self.hidden = nn.Linear(width, score_width or width)  # W_1 and b_1
        self.scores = nn.Linear(score_width or width, width)  # W_2 and b_2

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Pooled:
        """Pool (B, S, D) with a mask (B, S) to (B, D); weights are (B, D, S)."""
        check_sequence(x, self.width, "a sequence to pool")
        check_key_mask(mask, x.size(0), x.size(1))
        scores = self.scores(torch.nn.functional.elu(self.hidden(x))).transpose(1, 2)  # (B, D, S)
        weights = masked_softmax(scores, None if mask is None else mask.unsqueeze(1))
        return Pooled((weights * x.transpose(1, 2)).sum(dim=2), weights)


def overlap_penalty(weights: Tensor, *, rows: Tensor | None = None) -> Tensor:
    r"""Return the overlap penalty (B,) of attention weights (B, R, S).

    .. math:: P = \lVert A A^\top - I \rVert_F^2

    Lin et al. (2017), who add it to the loss. It is 0 if each row is one-hot in a column of its
    own, and grows as rows overlap or spread out. For self-attention, whose rows are positions,
    `rows` (B, R) masks padding.
    """
    if weights.dim() != 3:
        raise DragomanError(
            "weights must be (B, R, S)",
            found=f"shape {tuple(weights.shape)}",
            fix="one row alone has nothing to overlap with",
        )
    check_key_mask(rows, weights.size(0), weights.size(1))
    difference = weights @ weights.transpose(1, 2) - torch.eye(
        weights.size(1), dtype=weights.dtype, device=weights.device
    )
    if rows is not None:
        difference = difference.masked_fill(~(rows.unsqueeze(1) & rows.unsqueeze(2)), 0.0)
    return difference.square().sum(dim=(1, 2))
