"""Attention for short sentences straight from a layer's products, whose gradients are written where those products want them.

Queries, keys and values that are cut out of one product have gradients of their own, which PyTorch copies together again on the way
back. The kernels of `short_tiles.py` read and write at any stride: here they leave all three in one tensor from the start. For a compiler
this is one operator, `dragoman::packed_attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.kernels.short_attention import backward_into, forward_into, is_short


class Heads(NamedTuple):
    """Views of products as (B, H, T, Dh), nothing copied."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, asking: Tensor, told: Tensor | None, heads: int) -> Heads:
        """Cut (B, T, 3 D) into its three parts, or (B, T, D) and (B, S, 2 D) into one and two."""
        if told is None:
            return cls(*_cut(asking, 3, heads))
        return cls(*_cut(asking, 1, heads), *_cut(told, 2, heads))


def attend_packed(
    asking: Tensor, told: Tensor | None, *, heads: int, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor | None:  # fmt: skip
    """Attend within (B, T, 3 D), or from (B, T, D) to (B, S, 2 D): (B, T, D); None where that is not for these kernels to do."""
    if not _may(asking) or not asking.is_contiguous() or (told is not None and not told.is_contiguous()):
        return None
    parts = Heads.of(asking, told, heads)
    if not is_short(*parts, mask=mask, dropout=dropout, bias=None):
        return None
    if mask is not None:
        mask = mask.flatten(1, -2)[:, 0].expand(parts.key.size(0), parts.key.size(2))  # (B, S)
    context: Tensor = torch.ops.dragoman.packed_attention(asking, told, mask, heads, causal, parts.query.size(-1) ** -0.5)
    return context


def _may(asking: Tensor) -> bool:
    """Ask first what costs nothing to ask: most calls are on a CPU."""
    return asking.is_cuda


def _cut(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    return x.view(x.size(0), x.size(1), parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def _context_like(asking: Tensor, told: Tensor | None) -> Tensor:
    width = asking.size(2) // 3 if told is None else asking.size(2)
    return asking.new_empty(asking.size(0), asking.size(1), width)


def _forward(asking: Tensor, told: Tensor | None, mask: Tensor | None, heads: int, causal: bool, scale: float) -> Tensor:
    """Fill the context through a view of it."""
    context = _context_like(asking, told)
    forward_into(_cut(context, 1, heads)[0], *Heads.of(asking, told, heads), mask, causal, scale)
    return context


def _backward(
    outer: Tensor, asking: Tensor, told: Tensor | None, mask: Tensor | None, heads: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Fill the gradients of both products through views of them; the second has no numbers where there is one product."""
    grad_asking, grad_told = _grads_like(outer, asking, told)
    grads = Heads.of(grad_asking, None if told is None else grad_told, heads)
    (along,) = _cut(outer.contiguous(), 1, heads)
    backward_into(grads, along, *Heads.of(asking, told, heads), mask, causal, scale)
    return grad_asking, grad_told


def _grads_like(_outer: Tensor, asking: Tensor, told: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(asking), asking.new_empty(0) if told is None else torch.empty_like(told)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what went in and nothing else."""
    asking, told, mask, ctx.heads, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(asking, told, mask)


def _differentiate(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
    asking, told, mask = ctx.saved_tensors
    first, second = torch.ops.dragoman.packed_attention_backward(outer, asking, told, mask, ctx.heads, ctx.causal, ctx.scale)
    return first, None if told is None else second, None, None, None, None


_INPUTS = "Tensor asking, Tensor? told, Tensor? mask, int heads, bool causal, float scale"
_operator = torch.library.custom_op("dragoman::packed_attention", _forward, mutates_args=(), schema=f"({_INPUTS}) -> Tensor")
_operator.register_fake(lambda asking, told, *_: _context_like(asking, told))
_operator.register_autograd(_differentiate, setup_context=_keep)
_backward_operator = torch.library.custom_op(
    "dragoman::packed_attention_backward", _backward, mutates_args=(), schema=f"(Tensor outer, {_INPUTS}) -> (Tensor, Tensor)"
)
_backward_operator.register_fake(_grads_like)
