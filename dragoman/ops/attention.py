"""Attention by scaled dot products: in the fused forms, PyTorch's and our own, and step by step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.attention_mask import build_attention_mask, masked_softmax
from dragoman.ops.short_attention import attend_short, can_attend_short


class AttentionOutput(NamedTuple):
    """The weighted sums of the values, and the weights."""

    context: Tensor  # (B, H, T, Dh)
    weights: Tensor  # (B, H, T, S)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    r"""Scaled dot-product attention, fused: (B, H, T, Dh) looks at (B, H, S, Dh).

    .. math:: \mathrm{softmax}(q k^\top / \sqrt{d_h})\, v

    `mask` is broadcastable to (B, T, S), or has four axes when heads differ. With `causal` the queries are the last T
    of the S positions and none sees past itself. A query that may see nothing gets zeros. `bias`, broadcastable to
    (B, H, T, S), is added to the scores: the fused kernels take it in the mask's stead, with what is hidden pushed out of sight.
    """
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and query.requires_grad:
        # The fused kernel's way back is not vectorised in bfloat16 on CPUs: plain products train sentences of 20 to 250
        # pieces two to five times as fast (docs/log.md). In float32 it is the other way round.
        return attend_reference(
            query, key, value, mask=mask, causal=causal, dropout=dropout, scale=scale, bias=bias
        ).context
    if can_attend_short(query, key, value, mask=mask, dropout=dropout, bias=bias):
        return attend_short(query, key, value, mask=mask, causal=causal, scale=scale)
    is_square = query.size(-2) == key.size(-2)
    if causal and mask is None and is_square and bias is None:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale
        )
    visible = build_attention_mask(query.size(-2), key.size(-2), mask, causal, query.device)
    attn_mask = visible if bias is None else _mask_bias(bias.to(query.dtype), visible)
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout, scale=scale
    )
    if visible is None or (query.device.type == "cpu" and bias is None):
        return context
    # PyTorch's own kernels give zeros to a query that sees nothing; cuDNN's, in half precision, gives the mean of all values.
    return context.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> AttentionOutput:
    """Do what `attend` does step by step, and show the weights."""
    scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    visible = build_attention_mask(query.size(-2), key.size(-2), mask, causal, query.device)
    weights = masked_softmax(scores, visible)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return AttentionOutput(weights @ value, weights)


def _mask_bias(bias: Tensor, visible: Tensor | None) -> Tensor:
    """Push what is not visible out of sight of a bias; half the lowest number, so that adding a score cannot reach -inf."""
    bias = (
        bias.unsqueeze(0) if bias.dim() == 3 else bias
    )  # the fused kernels know masks of two axes and of four
    return bias if visible is None else bias.masked_fill(~visible, torch.finfo(bias.dtype).min / 2)
