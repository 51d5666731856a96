"""Causal attention with a score for each distance, as in Transformer-XL: fused, or shifted first.

PyTorch's fused kernel takes a bias by key: a shifted copy of the scores by distance. It is slow
where the bias gets a gradient. Here one kernel reads the scores where they are. For torch.compile
this is one operator, `dragoman::relative_attention`. Its kernels (in `triton/`) are imported on
first use and compared with the equations below, which replace them where they fail.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dragoman.ops.dropout import MAX_ELEMENTS, draw_seeds, hash_positions
from dragoman.ops.relative_shift import shift_back, shift_causal
from dragoman.ops.verified_kernel_fallback import GuardedKernel

RELATIVE_ATTENTION_KERNEL = GuardedKernel("attention with relative positions")
MIN_QUERIES = 16  # fewer, in decoding, leave most of a tile empty
MAX_HEAD_WIDTH = 128
FULL_TILE = 64  # queries and keys


def is_supported(query: Tensor, key: Tensor, value: Tensor, distance_scores: Tensor) -> bool:
    """Whether the kernels take these: on a GPU, in half precision, for segments of text."""
    return (
        RELATIVE_ATTENTION_KERNEL.can_run(query)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype == distance_scores.dtype
        and key.shape == value.shape == (*query.shape[:2], key.size(2), query.size(3))
        and distance_scores.shape == (*query.shape[:3], key.size(2))
        and query.size(3) % 8 == 0
        and query.size(3) <= MAX_HEAD_WIDTH
        and MIN_QUERIES <= query.size(2) <= key.size(2)
        and 0 < distance_scores.numel() <= MAX_ELEMENTS
    )


def attend_by_distance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_scores: Tensor,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    r"""Return causal attention from the last T of S positions: (B, H, T, Dh).

    .. math:: \mathrm{softmax}(q_t^\top k_s / \sqrt{d_h} + d_{t, t - s})\, v

    `distance_scores` (B, H, T, S) are by distance, S - 1 down to 0.
    """
    seeds = draw_seeds(query.device) if dropout else None
    scale = query.size(-1) ** -0.5 if scale is None else scale
    context: Tensor
    context, _ = torch.ops.dragoman.relative_attention(
        query, key, value, distance_scores.contiguous(), seeds, dropout, scale
    )
    return context


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_scores: Tensor,
    seeds: Tensor | None,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the context, and the log-sum-exp of each query's scores, base 2."""

    def fused() -> tuple[Tensor, Tensor]:
        from dragoman.ops.triton import relative_attention_kernels

        context, log_sums = _empty_outputs(query)
        relative_attention_kernels.forward(
            query,
            key,
            value,
            distance_scores,
            seeds,
            context,
            log_sums,
            scale=scale,
            **_dropout_arguments(dropout),
        )
        return context, log_sums

    def reference() -> tuple[Tensor, Tensor]:
        with torch.autocast(query.device.type, enabled=False):
            context, log_sums = _empty_outputs(query)
            scores = _scores(query, key, distance_scores, scale)
            log_sums.copy_(scores.logsumexp(dim=-1) / math.log(2))
            weights = _drop(scores.softmax(dim=-1), seeds, dropout)
            return context.copy_(weights @ _upcast(value)), log_sums

    if not RELATIVE_ATTENTION_KERNEL.can_run(query):
        return reference()
    variant = ("forward", *_describe(query, key, seeds))
    return RELATIVE_ATTENTION_KERNEL.run(variant, fused, reference)


def _backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    distance_scores: Tensor,
    seeds: Tensor | None,
    context: Tensor,
    log_sums: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and scores by distance."""
    delta = (_upcast(grad_output) * _upcast(context)).sum(dim=-1)  # (B, H, T)

    def fused() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from dragoman.ops.triton import relative_attention_kernels

        grads = _empty_gradients(query, key, value, distance_scores)
        relative_attention_kernels.backward(
            grad_output,
            query,
            key,
            value,
            distance_scores,
            seeds,
            log_sums,
            delta,
            *grads,
            scale=scale,
            **_dropout_arguments(dropout),
        )
        return grads

    def reference() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(query.device.type, enabled=False):
            weights = torch.exp2(
                _scores(query, key, distance_scores, scale) / math.log(2) - log_sums.unsqueeze(-1)
            )
            wide_grad = _upcast(grad_output)
            grad_weights = _drop(wide_grad @ _upcast(value).mT, seeds, dropout)
            grad_scores = weights * (grad_weights - delta.unsqueeze(-1))
            grads = _empty_gradients(query, key, value, distance_scores)
            grads[0].copy_(grad_scores @ _upcast(key) * scale)
            grads[1].copy_(grad_scores.mT @ _upcast(query) * scale)
            grads[2].copy_(_drop(weights, seeds, dropout).mT @ wide_grad)
            grads[3].copy_(shift_back(grad_scores))
            return grads

    if not RELATIVE_ATTENTION_KERNEL.can_run(query):
        return reference()
    variant = ("backward", *_describe(query, key, seeds))
    return RELATIVE_ATTENTION_KERNEL.run(variant, fused, reference)


def _describe(query: Tensor, key: Tensor, seeds: Tensor | None) -> tuple[Any, ...]:
    """Return what a kernel is compiled and verified for; of lengths, whether they fill tiles."""
    fills_tiles = (query.size(2) % FULL_TILE == 0, key.size(2) % FULL_TILE == 0)
    return query.dtype, query.size(3), seeds is not None, *fills_tiles


def _scores(query: Tensor, key: Tensor, distance_scores: Tensor, scale: float) -> Tensor:
    """Return the scores (B, H, T, S) by key, in float32 at least."""
    return _upcast(query) @ _upcast(key).mT * scale + shift_causal(_upcast(distance_scores))


def _drop(weights: Tensor, seeds: Tensor | None, dropout: float) -> Tensor:
    """Apply the dropout of the kernels to attention weights, or to their gradient."""
    if seeds is None:
        return weights
    arguments = _dropout_arguments(dropout)
    keep = hash_positions(weights.shape, seeds) >= arguments["drop_threshold"]
    return torch.where(keep, weights * arguments["keep_scale"], 0.0)


def _dropout_arguments(dropout: float) -> dict[str, Any]:
    """Return the least hash that is kept, in the range of int32, and the scale of what is kept."""
    threshold = min(round(dropout * 2**32), 2**32 - 1) - 2**31
    return {"drop_threshold": threshold, "keep_scale": 1 / (1 - dropout) if dropout < 1 else 0.0}


def _upcast(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _empty_heads(x: Tensor) -> Tensor:
    """Allocate (B, H, T, Dh) stored as (B, T, H, Dh), the layout of the surrounding projections."""
    rows, heads, length, width = x.shape
    return x.new_empty(rows, length, heads, width).transpose(1, 2)


def _empty_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    log_sums = query.new_empty(
        query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32)
    )
    return _empty_heads(query), log_sums


def _empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, distance_scores: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        _empty_heads(query),
        _empty_heads(key),
        _empty_heads(value),
        torch.empty_like(distance_scores, memory_format=torch.contiguous_format),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.dropout, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _autograd_backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.dragoman.relative_attention_backward(
        grad_output, *ctx.saved_tensors, ctx.dropout, ctx.scale
    )
    return *grads, None, None, None


_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor distance_scores, Tensor? seeds"
_operator = torch.library.custom_op(
    "dragoman::relative_attention",
    _forward,
    mutates_args=(),
    schema=f"({_INPUTS}, float dropout, float scale) -> (Tensor, Tensor)",
)
_operator.register_fake(lambda query, *_: _empty_outputs(query))
_operator.register_autograd(_autograd_backward, setup_context=_setup_context)
_backward_operator = torch.library.custom_op(
    "dragoman::relative_attention_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad_output, {_INPUTS}, Tensor context, Tensor log_sums, float dropout, "
    "float scale) -> (Tensor, Tensor, Tensor, Tensor)",
)
_backward_operator.register_fake(
    lambda _grad_output, query, key, value, distance_scores, *_: _empty_gradients(
        query, key, value, distance_scores
    )
)
