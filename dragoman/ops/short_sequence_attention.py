"""Triton attention kernels for training on short sentences: one program per sentence and head.

PyTorch's fused kernels use tiles of 64 or 128 rows, most of which a sentence of 20 tokens leaves
empty. Here one program holds all queries and keys of a head, so the backward pass needs only the
inputs. Its kernels (in `triton/`) are imported on first use; where they
fail, the equations below replace that call and PyTorch's kernels the following ones. For
torch.compile all this is one operator, `dragoman::short_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dragoman.ops.attention import build_attention_mask, masked_softmax
from dragoman.ops.verified_kernel_fallback import GuardedKernel

MAX_LENGTH = 64  # queries and keys; longer ones fill PyTorch's tiles
HEAD_WIDTHS = (16, 32, 64, 128)
MAX_TILE_ELEMENTS = 128 * 64  # of a head's queries or keys: four such tiles are held at a time

SHORT_ATTENTION_KERNEL = GuardedKernel("attention of short sentences")


def is_supported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    dropout: float,
    bias: Tensor | None,
) -> bool:
    """Whether `attend_short` takes these: on a GPU, half precision, training, short, key mask.

    Without gradients it does not: a decoding step has one query, and each key length would have to
    be compiled. Launched one by one the kernels cost the host more time than they save, so `attend`
    uses them only under CUDA graphs.
    """
    if not (SHORT_ATTENTION_KERNEL.can_run(query) and query.requires_grad):
        return False
    if dropout or bias is not None:
        return False
    return _has_supported_shape(query, key, value) and (mask is None or _is_key_mask(mask))


def attend_short(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return what `attend` returns, for a mask (B, 1, S) or (B, 1, 1, S)."""
    if mask is not None:
        mask = flatten_key_mask(mask, key)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    context: Tensor = torch.ops.dragoman.short_attention(query, key, value, mask, causal, scale)
    return context


def flatten_key_mask(mask: Tensor, key: Tensor) -> Tensor:
    """Return a mask (B, 1, S) or (B, 1, 1, S) as (B, S) for keys (B, H, S, Dh)."""
    return mask.flatten(1, -2)[:, 0].expand(key.size(0), key.size(2))


def _has_supported_shape(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels support tensors of these shapes and dtypes."""
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
    """Whether a mask hides the same keys from all queries and heads."""
    return (
        mask.dtype == torch.bool
        and mask.dim() in (3, 4)
        and all(size == 1 for size in mask.shape[1:-1])
    )


def _empty_heads(x: Tensor) -> Tensor:
    """Allocate (B, H, T, Dh) stored as (B, T, H, Dh), the layout of the surrounding projections."""
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
    """Write the context, of any strides, with the kernel or its equations; the mask is (B, S)."""

    def fused() -> None:
        from dragoman.ops.triton import short_sequence_attention_kernels

        short_sequence_attention_kernels.forward(
            query, key, value, mask, context, causal=causal, scale=scale
        )

    if SHORT_ATTENTION_KERNEL.can_run(query) and SHORT_ATTENTION_KERNEL.try_run(fused):
        return
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
    """Write the gradients of queries, keys and values, of any strides."""

    def fused() -> None:
        from dragoman.ops.triton import short_sequence_attention_kernels

        short_sequence_attention_kernels.backward(
            grad_output, query, key, value, mask, *grads, causal=causal, scale=scale
        )

    if SHORT_ATTENTION_KERNEL.can_run(query) and SHORT_ATTENTION_KERNEL.try_run(fused):
        return
    with torch.autocast(query.device.type, enabled=False):
        weights, wide_grad = (
            _attention_weights(query, key, mask, causal, scale),
            _upcast(grad_output),
        )
        grad_weights = wide_grad @ _upcast(value).mT
        scores = (
            weights * (grad_weights - (weights * grad_weights).sum(dim=-1, keepdim=True)) * scale
        )
        grads[0].copy_(scores @ _upcast(key))
        grads[1].copy_(scores.mT @ _upcast(query))
        grads[2].copy_(weights.mT @ wide_grad)


def _attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return the attention weights (B, H, T, S), in float32 at least."""
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
    """Save the inputs only: recomputing such short weights is cheaper than loading them."""
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
    schema=f"(Tensor grad_output, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
)
_backward_operator.register_fake(
    lambda _grad_output, query, key, value, *_: (
        _empty_heads(query),
        _empty_heads(key),
        _empty_heads(value),
    )
)
