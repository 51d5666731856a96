"""Attention as a dense softmax layer whose output multiplies its input: no queries, no keys."""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.attention.argument_checks import check_key_mask, check_sequence
from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax


class FeatureGate(nn.Module):
    r"""Weight the features of a vector by a softmax over them.

    .. math:: y = x \odot \mathrm{softmax}(W x + b)

    The simplest attention of Keras tutorials, a dense layer merged by multiplication; see the
    `PositionGate` for positions.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Gate (..., D)."""
        return x * self.dense(x).softmax(dim=-1)


class PositionGate(RecordableAttention):
    r"""Weight the positions of a sequence of one length by a softmax over them, for each feature.

    .. math:: y_{sd} = x_{sd}\, \mathrm{softmax}_s(\textstyle\sum_r W_{sr} x_{rd} + b_s)

    W is a matrix of positions, so the length is fixed and every position has a meaning of its own:
    a fully connected layer, where attention has scores that are functions of queries and keys.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self.dense = nn.Linear(length, length)

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Gate (B, S, D), S being the length that it was built for, with a mask (B, S)."""
        check_sequence(x, x.size(-1), "a sequence to gate")
        if x.size(1) != self.length:
            raise DragomanError(
                f"a sequence must have the {self.length} positions of its gate",
                found=f"{x.size(1)}",
                fix="pad it, or use attention, whose length is free",
            )
        check_key_mask(mask, x.size(0), x.size(1))
        inputs = x if mask is None else x.masked_fill(~mask.unsqueeze(2), 0.0)
        scores = self.dense(inputs.transpose(1, 2))  # (B, D, S)
        weights = masked_softmax(scores, None if mask is None else mask.unsqueeze(1))
        weights = self.apply_edits(weights.unsqueeze(1)).squeeze(1)
        gated = x * weights.transpose(1, 2)
        self.emit_record(AttentionRecord(weights.unsqueeze(1), x.unsqueeze(1), gated.unsqueeze(1)))
        return gated
