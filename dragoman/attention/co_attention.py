"""Co-attention: two sequences attend to each other by one matrix of scores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from dragoman.attention.argument_checks import check_key_mask, check_same_batch
from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.ops import attend, attend_reference


class CoAttended(NamedTuple):
    """The context vectors of both sequences, each attending to the other."""

    first: Tensor  # (B, T, D), weighted sums of the second sequence
    second: Tensor  # (B, S, D), weighted sums of the first sequence


class SoftAlignment(RecordableAttention):
    r"""One direction of co-attention: unscaled dot-product attention with one head.

    .. math:: \tilde a_t = \sum_s \mathrm{softmax}_s(q_t^\top k_s)\, b_s
    """

    cuda_graphs = False  # whether CUDA graphs replay this layer; set by the trainer

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        """Attend from (B, T, A) to (B, S, A) and values (B, S, D); `mask` is (B, S)."""
        heads = [part.unsqueeze(1) for part in (query, key, value)]  # (B, 1, ...)
        key_mask = None if mask is None else mask.unsqueeze(1)
        if self.hooks is None:
            return attend(*heads, mask=key_mask, scale=1.0, cuda_graphs=self.cuda_graphs).squeeze(1)
        weights = self.apply_edits(attend_reference(*heads, mask=key_mask, scale=1.0).weights)
        context = weights @ heads[2]
        self.emit_record(AttentionRecord(weights, heads[2], context))
        return context.squeeze(1)


class CoAttention(nn.Module):
    r"""Soft alignment of two sequences in both directions.

    .. math:: e_{ts} = F(a_t)^\top F(b_s), \quad
        \tilde a_t = \sum_s \mathrm{softmax}_s(e_{ts})\, b_s, \quad
        \tilde b_s = \sum_t \mathrm{softmax}_t(e_{ts})\, a_t

    Parikh et al. (2016), equations 1 and 2, with a feed-forward network F; Chen et al. (2017),
    equations 11 to 13, without one. Each direction has records of its own, `a` and `b`.
    """

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.projection = nn.Identity() if projection is None else projection  # F
        self.a, self.b = SoftAlignment(), SoftAlignment()

    def forward(
        self,
        first: Tensor,
        second: Tensor,
        *,
        first_mask: Tensor | None = None,
        second_mask: Tensor | None = None,
    ) -> CoAttended:
        """Align (B, T, D) and (B, S, D), real where the masks (B, T) and (B, S) are True."""
        check_same_batch(first, second, 1, "two sequences that attend to each other")
        check_key_mask(first_mask, first.size(0), first.size(1))
        check_key_mask(second_mask, second.size(0), second.size(1))
        query, key = self.projection(first), self.projection(second)
        return CoAttended(
            self.a(query, key, second, mask=second_mask),
            self.b(key, query, first, mask=first_mask),
        )
