"""Attention for short sentences straight from a layer's products, whose gradients are written where those products want them.

Queries, keys and values that are cut out of one product have gradients of their own, which PyTorch copies together again on the way
back. The kernels of `short_tiles.py` read and write at any stride: here they leave all three in one tensor from the start. For a compiler
this is one operator, `dragoman::packed_attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.ops.short_attention import backward_into, can_attend_short, forward_into


class SplitHeads(NamedTuple):
    """Views of products as (B, H, T, Dh), nothing copied."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def split(cls, packed_query: Tensor, packed_key_value: Tensor | None, heads: int) -> SplitHeads:
        """Cut (B, T, 3 D) into its three parts, or (B, T, D) and (B, S, 2 D) into one and two."""
        if packed_key_value is None:
            return cls(*_split_heads(packed_query, 3, heads))
        return cls(*_split_heads(packed_query, 1, heads), *_split_heads(packed_key_value, 2, heads))


def attend_packed(
    packed_query: Tensor, packed_key_value: Tensor | None, *, heads: int, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor | None:  # fmt: skip
    """Attend within (B, T, 3 D), or from (B, T, D) to (B, S, 2 D): (B, T, D); None where that is not for these kernels to do."""
    if (
        not _is_on_gpu(packed_query)
        or not packed_query.is_contiguous()
        or (packed_key_value is not None and not packed_key_value.is_contiguous())
    ):
        return None
    split_heads = SplitHeads.split(packed_query, packed_key_value, heads)
    if not can_attend_short(*split_heads, mask=mask, dropout=dropout, bias=None):
        return None
    if mask is not None:
        mask = mask.flatten(1, -2)[:, 0].expand(
            split_heads.key.size(0), split_heads.key.size(2)
        )  # (B, S)
    context: Tensor = torch.ops.dragoman.packed_attention(
        packed_query, packed_key_value, mask, heads, causal, split_heads.query.size(-1) ** -0.5
    )
    return context


def _is_on_gpu(packed_query: Tensor) -> bool:
    """Ask first what costs nothing to ask: most calls are on a CPU."""
    return packed_query.is_cuda


def _split_heads(x: Tensor, split_heads: int, heads: int) -> tuple[Tensor, ...]:
    return x.view(x.size(0), x.size(1), split_heads, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


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
    """Fill the context through a view of it."""
    context = _empty_context(packed_query, packed_key_value)
    forward_into(
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
    """Fill the gradients of both products through views of them; the second has no numbers where there is one product."""
    grad_packed_query, grad_packed_key_value = _empty_grads(
        grad_output, packed_query, packed_key_value
    )
    grads = SplitHeads.split(
        grad_packed_query, None if packed_key_value is None else grad_packed_key_value, heads
    )
    (grad_heads,) = _split_heads(grad_output.contiguous(), 1, heads)
    backward_into(
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
    return torch.empty_like(packed_query), packed_query.new_empty(
        0
    ) if packed_key_value is None else torch.empty_like(packed_key_value)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what went in and nothing else."""
    packed_query, packed_key_value, mask, ctx.heads, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(packed_query, packed_key_value, mask)


def _autograd_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    packed_query, packed_key_value, mask = ctx.saved_tensors
    first, second = torch.ops.dragoman.packed_attention_backward(
        grad_output, packed_query, packed_key_value, mask, ctx.heads, ctx.causal, ctx.scale
    )
    return first, None if packed_key_value is None else second, None, None, None, None


_INPUTS = "Tensor asking, Tensor? told, Tensor? mask, int heads, bool causal, float scale"
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
    schema=f"(Tensor outer, {_INPUTS}) -> (Tensor, Tensor)",
)
_backward_operator.register_fake(_empty_grads)
