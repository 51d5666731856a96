"""Attention for short sentences on a GPU, in training: a sentence's whole head in one tile.

PyTorch's fused kernels cut sequences into tiles of 64 or 128 rows, most of which a sentence of 20 pieces leaves empty. Here one
program holds all queries and keys of a head, so the way back needs nothing but what went in. The kernels are Triton's
(`short_tiles.py`), imported at the first use; where they cannot run, the plain equations below stand in for the call, and PyTorch's
kernels for those that follow. For a compiler all this is one operator, `dragoman::short_attention`.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from dragoman.ops.attention_mask import build_attention_mask, masked_softmax

logger = logging.getLogger(__name__)

MAX_LENGTH = 64  # queries and keys; past it PyTorch's tiles are full
HEAD_WIDTHS = (16, 32, 64, 128)
MAX_TILE_ELEMENTS = (
    128 * 64
)  # numbers of a head's queries or keys: four such tiles are held at a time

_enabled = False  # a trainer that replays its launches turns it on: launched one by one, these take the host too long


def enable_short_attention(wanted: bool) -> None:
    """Let `attend` use the kernels for short sentences, or keep it from them; for the whole process."""
    global _enabled
    _enabled = wanted


def uses_cuda_graphs() -> bool:
    """Say whether launches are replayed, so that kernels of our own cost the host no time."""
    return _enabled


def can_attend_short(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    dropout: float,
    bias: Tensor | None,
) -> bool:
    """Say whether `attend_short` is the way for these: on a GPU, in half precision, in training, short, hidden by key if at all.

    Without gradients it is not: a search has one query at a time, and each of its lengths would wait for a compiler.
    """
    if not (_enabled and query.is_cuda and query.requires_grad) or dropout or bias is not None:
        return False
    return _is_supported(query, key, value) and (mask is None or _is_key_mask(mask))


def attend_short(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Do what `attend` does, (B, H, T, Dh) to (B, H, S, Dh), for a mask (B, 1, S) or (B, 1, 1, S); the result lies as (B, T, H, Dh)."""
    if mask is not None:
        mask = mask.flatten(1, -2)[:, 0].expand(key.size(0), key.size(2))  # (B, S)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    context: Tensor = torch.ops.dragoman.short_attention(query, key, value, mask, causal, scale)
    return context


def _is_supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Say whether the kernels take tensors of these shapes and types."""
    if (
        query.dim() != 4
        or query.dtype not in (torch.bfloat16, torch.float16)
        or not (query.dtype == key.dtype == value.dtype)
    ):
        return False
    rows, heads, queries, width = query.shape
    if (
        key.shape != value.shape
        or key.shape != (rows, heads, key.size(2), width)
        or width not in HEAD_WIDTHS
    ):
        return False
    return rows > 0 and all(
        0 < length <= min(MAX_LENGTH, MAX_TILE_ELEMENTS // width)
        for length in (queries, key.size(2))
    )


def _is_key_mask(mask: Tensor) -> bool:
    """Say whether a mask hides keys from all queries and heads alike."""
    return (
        mask.dtype == torch.bool
        and mask.dim() in (3, 4)
        and all(size == 1 for size in mask.shape[1:-1])
    )


def _can_run_triton(query: Tensor) -> bool:
    """Say whether to try Triton's kernels."""
    return _enabled and query.is_cuda


def _disable_triton(error: Exception) -> None:
    """Tell once that the kernels do not run here, and use them no more."""
    found = " ".join(str(error).split())[:200]
    logger.warning(
        "attention for short sentences does not run here (%s: %s): PyTorch's own is used",
        type(error).__name__,
        found,
    )
    enable_short_attention(False)


def _empty_heads(x: Tensor) -> Tensor:
    """Make room for heads (B, H, T, Dh) that lie as (B, T, H, Dh), as the products on either side want them."""
    rows, heads, length, width = x.shape
    return x.new_empty(rows, length, heads, width).transpose(1, 2)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    context = _empty_heads(query)
    forward_into(context, query, key, value, mask, causal, scale)
    return context


def forward_into(
    context: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    """Fill the context, of any strides, by the tiles, or by the equations where those do not run; the mask is (B, S)."""
    if _can_run_triton(query):
        try:
            from dragoman.ops.triton import short_attention_kernels

            short_attention_kernels.forward(
                query, key, value, mask, context, causal=causal, scale=scale
            )
            return
        except Exception as error:  # whatever a missing package, a compiler or a driver may raise
            _disable_triton(error)
    with torch.autocast(query.device.type, enabled=False):
        context.copy_(_attention_weights(query, key, mask, causal, scale) @ _upcast(value))


def _backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty_heads(query), _empty_heads(key), _empty_heads(value)
    backward_into(grads, grad_output, query, key, value, mask, causal, scale)
    return grads


def backward_into(
    grads: tuple[Tensor, Tensor, Tensor],
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> None:
    """Fill the gradients of queries, keys and values, of any strides, from that of the context."""
    if _can_run_triton(query):
        try:
            from dragoman.ops.triton import short_attention_kernels

            short_attention_kernels.backward(
                grad_output, query, key, value, mask, *grads, causal=causal, scale=scale
            )
            return
        except Exception as error:
            _disable_triton(error)
    with torch.autocast(query.device.type, enabled=False):
        weights, wide_grad = (
            _attention_weights(query, key, mask, causal, scale),
            _upcast(grad_output),
        )
        grad_weights = wide_grad @ _upcast(value).mT  # the gradient of the weights
        scores = (
            weights * (grad_weights - (weights * grad_weights).sum(dim=-1, keepdim=True)) * scale
        )
        grads[0].copy_(scores @ _upcast(key))
        grads[1].copy_(scores.mT @ _upcast(query))
        grads[2].copy_(weights.mT @ wide_grad)


def _attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Compute the weights (B, H, T, S) from their definition, in float32 at least."""
    visible = build_attention_mask(
        query.size(2),
        key.size(2),
        None if mask is None else mask.unsqueeze(1),
        causal,
        query.device,
    )
    return masked_softmax(_upcast(query) @ _upcast(key).mT * scale, visible)


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what went in: for rows as short as these, computing the weights again costs less than reading them."""
    query, key, value, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, mask)


def _autograd_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.dragoman.short_attention_backward(
        grad_output, *ctx.saved_tensors, ctx.causal, ctx.scale
    )
    return *grads, None, None, None


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, float scale"
_operator = torch.library.custom_op(
    "dragoman::short_attention", _forward, mutates_args=(), schema=f"({_INPUTS}) -> Tensor"
)
_operator.register_fake(lambda query, *_: _empty_heads(query))
_operator.register_autograd(_autograd_backward, setup_context=_setup_context)
_backward_operator = torch.library.custom_op(
    "dragoman::short_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor outer, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
_backward_operator.register_fake(
    lambda _grad_output, query, key, value, *_: (
        _empty_heads(query),
        _empty_heads(key),
        _empty_heads(value),
    )
)
