"""Triton attention for short sentences on packed projections, with gradients packed likewise.

Queries, keys and values that are split from one projection have separate gradients, which PyTorch
concatenates in the backward pass. The kernels of `short_sequence_attention` read and write any
strides, so here they write all three into one tensor. For torch.compile this is one operator,
`dragoman::packed_attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.ops import short_sequence_attention


class SplitHeads(NamedTuple):
    """Views of packed projections as (B, H, T, Dh)."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def split(cls, packed_query: Tensor, packed_key_value: Tensor | None, heads: int) -> SplitHeads:
        """Split (B, T, 3 D) into three parts, or (B, T, D) and (B, S, 2 D) into one and two."""
        if packed_key_value is None:
            return cls(*_split_heads(packed_query, 3, heads))
        return cls(*_split_heads(packed_query, 1, heads), *_split_heads(packed_key_value, 2, heads))


def is_supported(
    packed_query: Tensor,
    packed_key_value: Tensor | None,
    *,
    heads: int,
    mask: Tensor | None,
    dropout: float,
) -> bool:
    """Whether `attend` takes these: contiguous, and what `short_sequence_attention` supports."""
    if not packed_query.is_contiguous():
        return False
    if packed_key_value is not None and not packed_key_value.is_contiguous():
        return False
    split = SplitHeads.split(packed_query, packed_key_value, heads)
    return short_sequence_attention.is_supported(*split, mask=mask, dropout=dropout, bias=None)


def attend(
    packed_query: Tensor,
    packed_key_value: Tensor | None,
    *,
    heads: int,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Return attention within (B, T, 3 D), or from (B, T, D) to (B, S, 2 D): (B, T, D)."""
    split = SplitHeads.split(packed_query, packed_key_value, heads)
    if mask is not None:
        mask = short_sequence_attention.flatten_key_mask(mask, split.key)
    context: Tensor = torch.ops.dragoman.packed_attention(
        packed_query, packed_key_value, mask, heads, causal, split.query.size(-1) ** -0.5
    )
    return context


def _split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    return x.view(x.size(0), x.size(1), parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def _empty_context(packed_query: Tensor, packed_key_value: Tensor | None) -> Tensor:
    width = packed_query.size(2) // 3 if packed_key_value is None else packed_query.size(2)
    return packed_query.new_empty(packed_query.size(0), packed_query.size(1), width)


def _forward(
    packed_query: Tensor,
    packed_key_value: Tensor | None,
    mask: Tensor | None,
    heads: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """Write the context through a view with heads."""
    context = _empty_context(packed_query, packed_key_value)
    short_sequence_attention.forward_into(
        _split_heads(context, 1, heads)[0],
        *SplitHeads.split(packed_query, packed_key_value, heads),
        mask,
        causal,
        scale,
    )
    return context


def _backward(
    grad_output: Tensor,
    packed_query: Tensor,
    packed_key_value: Tensor | None,
    mask: Tensor | None,
    heads: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of both packed projections; the second is empty for self-attention."""
    grad_packed_query, grad_packed_key_value = _empty_grads(
        grad_output, packed_query, packed_key_value
    )
    grads = SplitHeads.split(
        grad_packed_query, None if packed_key_value is None else grad_packed_key_value, heads
    )
    (grad_heads,) = _split_heads(grad_output.contiguous(), 1, heads)
    short_sequence_attention.backward_into(
        grads,
        grad_heads,
        *SplitHeads.split(packed_query, packed_key_value, heads),
        mask,
        causal,
        scale,
    )
    return grad_packed_query, grad_packed_key_value


def _empty_grads(
    _grad_output: Tensor, packed_query: Tensor, packed_key_value: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    grad_packed_query = torch.empty_like(packed_query)
    if packed_key_value is None:
        return grad_packed_query, packed_query.new_empty(0)
    return grad_packed_query, torch.empty_like(packed_key_value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the inputs only."""
    packed_query, packed_key_value, mask, ctx.heads, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(packed_query, packed_key_value, mask)


def _autograd_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    packed_query, packed_key_value, mask = ctx.saved_tensors
    grad_query, grad_key_value = torch.ops.dragoman.packed_attention_backward(
        grad_output, packed_query, packed_key_value, mask, ctx.heads, ctx.causal, ctx.scale
    )
    grad_key_value = None if packed_key_value is None else grad_key_value
    return grad_query, grad_key_value, None, None, None, None


_INPUTS = (
    "Tensor packed_query, Tensor? packed_key_value, Tensor? mask, "
    "int heads, bool causal, float scale"
)
_operator = torch.library.custom_op(
    "dragoman::packed_attention", _forward, mutates_args=(), schema=f"({_INPUTS}) -> Tensor"
)
_operator.register_fake(
    lambda packed_query, packed_key_value, *_: _empty_context(packed_query, packed_key_value)
)
_operator.register_autograd(_autograd_backward, setup_context=_setup_context)
_backward_operator = torch.library.custom_op(
    "dragoman::packed_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad_output, {_INPUTS}) -> (Tensor, Tensor)",
)
_backward_operator.register_fake(_empty_grads)
