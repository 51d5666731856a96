"""Pooling of a sequence to one vector, and attention with one query per label."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.attention.pooling import Pooled
from dragoman.attention.recorder import AttentionRecord, RecordableAttention
from dragoman.layers.rnn import last_bidirectional_states, last_state
from dragoman.ops import masked_softmax
from dragoman.ops.pooling import max_pool, mean_pool


class MeanPooling(nn.Module):
    """The mean of the real positions; zeros for an empty sequence."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return mean_pool(x, mask)


class MaxPooling(nn.Module):
    """The maximum of each feature over the real positions; zeros for an empty sequence."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return max_pool(x, mask)


class LastPooling(nn.Module):
    """The last real position: the final state of a forward RNN or a causal convolution."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return last_state(x, mask)


class LastBidirectionalPooling(nn.Module):
    """The final states of both directions of a bidirectional RNN, concatenated."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return last_bidirectional_states(x, mask)


class LabelAttention(RecordableAttention):
    r"""Attention pooling with one trained query per label.

    .. math:: \alpha_l = \mathrm{softmax}(u_l^\top H), \quad v_l = H \alpha_l^\top

    Mullenbach et al. (2018), section 2.2. With a `score_width` the keys are tanh(W h), as in Hu et
    al. (2018) and Vu et al. (2020).
    """

    def __init__(self, width: int, *, labels: int, score_width: int = 0) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, score_width, bias=False) if score_width else None
        self.queries = nn.Linear(score_width or width, labels, bias=False)  # u, one row per label

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Pooled:
        """Pool (B, S, D) with a mask (B, S) to one vector per label, (B, C, D)."""
        keys = x if self.hidden is None else torch.tanh(self.hidden(x))
        scores = self.queries(keys).transpose(1, 2)  # (B, C, S)
        weights = masked_softmax(scores, None if mask is None else mask.unsqueeze(1))
        weights = self.apply_edits(weights.unsqueeze(1)).squeeze(1)
        vectors = weights @ x
        self.emit_record(
            AttentionRecord(weights.unsqueeze(1), x.unsqueeze(1), vectors.unsqueeze(1))
        )
        return Pooled(vectors, weights)


class LabelOutput(nn.Module):
    r"""A logit for each label from the label's own vector: :math:`\beta_l^\top v_l + b_l`."""

    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(labels, width))  # beta
        self.bias = nn.Parameter(torch.zeros(labels))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return logits (B, C) of vectors (B, C, D)."""
        return (vectors * self.weight).sum(dim=-1) + self.bias
