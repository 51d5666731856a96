"""Scaled dot-product attention: one function that picks the fastest form, and its reference.

`attend` takes heads, `attend_packed` the output of a layer's packed query-key-value projection.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops import relative_attention
from dragoman.ops.relative_shift import shift_causal


class AttentionOutput(NamedTuple):
    """The weighted sums of the values, and the attention weights."""

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
    distance_scores: Tensor | None = None,
    window: int = 0,
    cuda_graphs: bool = False,
) -> Tensor:
    r"""Return scaled dot-product attention from (B, H, T, Dh) to (B, H, S, Dh): (B, H, T, Dh).

    .. math:: \mathrm{softmax}(q k^\top / \sqrt{d_h} + b)\, v

    `mask` is broadcastable to (B, T, S), or to (B, H, T, S) with four axes; True may be attended
    to. With `causal` the queries are the last T of the S positions, and none attends to a later
    position. With a `window`, T = S and each position attends to those at most `window` away. A
    query that may attend to nothing gets zeros. `bias` is broadcastable to (B, H, T, S); instead of
    it causal attention takes `distance_scores` (B, H, T, S) by distance, S - 1 down to 0.
    `cuda_graphs` allows kernels that pay only when a CUDA graph replays their launches.
    """
    if distance_scores is not None:
        assert causal, "scores by distance are for causal attention"
        assert bias is None, "scores by distance are the bias"
        if (
            mask is None
            and not window
            and relative_attention.is_supported(query, key, value, distance_scores)
        ):
            return relative_attention.attend_by_distance(
                query, key, value, distance_scores, dropout=dropout, scale=scale
            )
        bias, causal = shift_causal(distance_scores), False  # it masks what is later
    if window:
        from dragoman.ops.windowed_attention import attend_windowed, is_faster_windowed  # a cycle

        has_key_mask = mask is None or mask.size(-2) == 1
        if bias is None and has_key_mask and is_faster_windowed(query.size(-2), window):
            return attend_windowed(
                query, key, value, radius=window, mask=mask, causal=causal, dropout=dropout
            )
        mask = _restrict_to_window(mask, query.size(-2), window, query.device)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and query.requires_grad:
        # PyTorch's backward kernel for CPUs is not vectorized in bfloat16: plain matmuls train
        # sentences of 20 to 250 tokens two to five times as fast. In float32 it is the reverse.
        return attend_reference(
            query, key, value, mask=mask, causal=causal, dropout=dropout, scale=scale, bias=bias
        ).context
    if cuda_graphs and _can_use_short_kernels(query, cuda_graphs):
        # Here: that module imports this one.
        from dragoman.ops import short_sequence_attention

        if short_sequence_attention.is_supported(
            query, key, value, mask=mask, dropout=dropout, bias=bias
        ):
            return short_sequence_attention.attend_short(
                query, key, value, mask=mask, causal=causal, scale=scale
            )
    is_square = query.size(-2) == key.size(-2)
    if causal and mask is None and is_square and bias is None:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale
        )
    visible = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
    if causal:
        visible = build_attention_mask(query.size(-2), key.size(-2), visible, True, query.device)
    attn_mask = visible if bias is None else _mask_bias(bias.to(query.dtype), visible)
    context = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout, scale=scale
    )
    if visible is None or (query.device.type == "cpu" and bias is None):
        return context
    # For a query whose keys are all masked PyTorch's kernels return zeros, but cuDNN's in half
    # precision return the mean of all values.
    return context.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


def attend_packed(
    packed_query: Tensor,
    packed_key_value: Tensor | None,
    *,
    heads: int,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    cuda_graphs: bool = False,
) -> Tensor:
    """Return multi-head attention of packed projections, heads concatenated: (B, T, D).

    Self-attention takes queries, keys and values as one (B, T, 3 D); cross-attention takes queries
    (B, T, D) and keys and values (B, S, 2 D). The other arguments are those of `attend`.
    """
    cuda_graphs = _can_use_short_kernels(packed_query, cuda_graphs)
    if cuda_graphs:
        from dragoman.ops import (
            packed_qkv_short_sequence_attention,  # here: that module imports this one
        )

        if packed_qkv_short_sequence_attention.is_supported(
            packed_query, packed_key_value, heads=heads, mask=mask, dropout=dropout
        ):
            return packed_qkv_short_sequence_attention.attend(
                packed_query, packed_key_value, heads=heads, mask=mask, causal=causal
            )
    query, key, value = split_heads(packed_query, packed_key_value, heads)
    context = attend(
        query, key, value, mask=mask, causal=causal, dropout=dropout, cuda_graphs=cuda_graphs
    )
    return context.transpose(1, 2).flatten(2)


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
    """Return what `attend` returns, computed step by step, with the attention weights."""
    scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    visible = build_attention_mask(query.size(-2), key.size(-2), mask, causal, query.device)
    weights = masked_softmax(scores, visible)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return AttentionOutput(weights @ value, weights)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the softmax over the positions where the mask is True; zeros if there is none."""
    if mask is None:
        return scores.softmax(dim=-1)
    # The lowest finite number, not -inf: a fully masked row would become NaN before it becomes
    # zero, and autograd's anomaly detection would stop there.
    masked_out = ~mask
    masked_scores = scores.masked_fill(masked_out, torch.finfo(scores.dtype).min)
    return masked_scores.softmax(dim=-1).masked_fill(masked_out, 0.0)


def build_attention_mask(
    num_queries: int, num_keys: int, mask: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Combine a mask with causality, broadcastable to (B, H, T, S); None if nothing is masked."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if not causal or num_queries == 1:  # the last position attends to all
        return mask
    causal_mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(
        num_keys - num_queries
    )
    return causal_mask if mask is None else mask & causal_mask


def split_heads(
    packed_query: Tensor, packed_key_value: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return views (B, H, T, Dh) of the queries, keys and values of packed projections."""
    batch, length, _ = packed_query.shape
    if packed_key_value is None:
        parts = packed_query.chunk(3, dim=-1)
        query, key, value = (part.view(batch, length, heads, -1).transpose(1, 2) for part in parts)
        return query, key, value
    query = packed_query.view(batch, length, heads, -1).transpose(1, 2)
    key_value = packed_key_value.view(batch, packed_key_value.size(1), 2, heads, -1)
    key, value = key_value.permute(0, 2, 3, 1, 4).unbind(1)
    return query, key, value


def _can_use_short_kernels(query: Tensor, cuda_graphs: bool) -> bool:
    """Whether the Triton kernels for short sentences may run at all, tested before their module."""
    return cuda_graphs and query.is_cuda


def _restrict_to_window(
    mask: Tensor | None, length: int, window: int, device: torch.device
) -> Tensor:
    """Return a mask that also hides pairs of positions more than `window` apart."""
    positions = torch.arange(length, device=device)
    near = (positions - positions.unsqueeze(-1)).abs() <= window  # (T, T)
    return near if mask is None else mask & near


def _mask_bias(bias: Tensor, visible: Tensor | None) -> Tensor:
    """Return a bias that masks what is not visible, for kernels that take one additive mask.

    Half the lowest finite number, so that adding a score cannot reach -inf.
    """
    bias = bias.unsqueeze(0) if bias.dim() == 3 else bias  # kernels take two axes or four
    return bias if visible is None else bias.masked_fill(~visible, torch.finfo(bias.dtype).min / 2)
