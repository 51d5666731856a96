"""Triton kernels of `short_sequence_attention.py`: a program per sentence and head, in one tile.

The caller validates shapes and dtypes. Tiles are powers of two, at least 16, as tensor cores
require; positions past the end are loaded as zeros and masked. Matmuls accumulate in float32. No
two programs write to the same address, so results are deterministic.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # GPUs compute powers of two


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    context: Tensor,
    *,
    causal: bool,
    scale: float,
) -> None:
    """Write the context (B, H, T, Dh) of queries (B, H, T, Dh), keys (B, H, S, Dh), mask (B, S)."""
    query, key, value = _row_contiguous(query), _row_contiguous(key), _row_contiguous(value)
    launch = _LaunchSizes(query, key)
    with torch.cuda.device_of(query):
        _forward[launch.grid](
            query,
            key,
            value,
            _mask_bytes(mask, query),
            context,
            *_strides(query),
            *_strides(key),
            *_strides(value),
            *_strides(context),
            *_mask_strides(mask),
            query.size(1),
            query.size(2),
            key.size(2),
            scale * LOG2_E,
            CAUSAL=causal,
            MASKED=mask is not None,
            **launch.tiles,
            num_warps=launch.warps_forward,
            num_stages=1,
        )


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    *,
    causal: bool,
    scale: float,
) -> None:
    """Write the gradients of queries, keys and values."""
    grad_output, query, key, value = (
        _row_contiguous(grad_output),
        _row_contiguous(query),
        _row_contiguous(key),
        _row_contiguous(value),
    )
    launch = _LaunchSizes(query, key)
    with torch.cuda.device_of(query):
        _backward[launch.grid](
            grad_output,
            query,
            key,
            value,
            _mask_bytes(mask, query),
            grad_query,
            grad_key,
            grad_value,
            *_strides(grad_output),
            *_strides(query),
            *_strides(key),
            *_strides(value),
            *_strides(grad_query),
            *_strides(grad_key),
            *_strides(grad_value),
            *_mask_strides(mask),
            query.size(1),
            query.size(2),
            key.size(2),
            scale,
            scale * LOG2_E,
            CAUSAL=causal,
            MASKED=mask is not None,
            **launch.tiles,
            num_warps=launch.warps_backward,
            num_stages=1,
        )


class _LaunchSizes:
    """Grid, tile sizes and numbers of warps."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.grid = (query.size(0) * query.size(1),)
        self.tiles = {
            "TILE_T": _tile_rows(query.size(2)),
            "TILE_S": _tile_rows(key.size(2)),
            "WIDTH": query.size(3),
        }
        rows = max(self.tiles["TILE_T"], self.tiles["TILE_S"])
        # As few warps as keep everything in registers, by the assembler's report for an H200; from
        # 64 rows on four or more, which larger matmuls need.
        self.warps_forward = 1 if rows <= 32 else 4
        self.warps_backward = rows // 16


def _tile_rows(length: int) -> int:
    """Return the next power of two that tensor cores support."""
    return max(16, 1 << (length - 1).bit_length())


def _row_contiguous(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _mask_bytes(mask: Tensor | None, query: Tensor) -> Tensor:
    """Return a mask as bytes; without one, any tensor, which is not read."""
    return query if mask is None else mask.view(torch.uint8)


def _mask_strides(mask: Tensor | None) -> tuple[int, int]:
    return (0, 0) if mask is None else (mask.stride(0), mask.stride(1))


@triton.jit
def _load(
    start: tl.tensor, stride: tl.tensor, length: tl.tensor, TILE: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Load one head (TILE, WIDTH), with zeros past its length."""
    rows = tl.arange(0, TILE)
    pointers = start + rows[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers, mask=rows[:, None] < length, other=0.0)


@triton.jit
def _store(
    start: tl.tensor,
    stride: tl.tensor,
    length: tl.tensor,
    values: tl.tensor,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Store one head up to its length, in the dtype of the tensor."""
    rows = tl.arange(0, TILE)
    pointers = start + rows[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    tl.store(pointers, values.to(start.dtype.element_ty), mask=rows[:, None] < length)


@triton.jit
def _attention_weights(
    q: tl.tensor,
    k: tl.tensor,
    mask: tl.tensor,
    mask_stride: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    log2_scale: tl.tensor,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_S: tl.constexpr,
) -> tl.tensor:
    """Return the attention weights (TILE_T, TILE_S); zeros if all keys are masked."""
    scores = tl.dot(q, tl.trans(k)) * log2_scale
    t = tl.arange(0, TILE_T)
    s = tl.arange(0, TILE_S)
    visible = (s < keys)[None, :]
    if MASKED:
        visible = visible & (tl.load(mask + s * mask_stride, mask=s < keys, other=0) != 0)[None, :]
    if CAUSAL:
        visible = visible & (s[None, :] <= t[:, None] + (keys - queries))
    scores = tl.where(visible, scores, float("-inf"))
    max_scores = tl.max(scores, 1)
    max_scores = tl.where(max_scores == float("-inf"), 0.0, max_scores)
    exp_scores = tl.exp2(scores - max_scores[:, None])
    total = tl.sum(exp_scores, 1)
    return exp_scores / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["mask_b", "mask_s", "heads", "queries", "keys"])
def _forward(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    mask: tl.tensor,
    context: tl.tensor,
    query_b: tl.tensor,
    query_h: tl.tensor,
    query_t: tl.tensor,
    key_b: tl.tensor,
    key_h: tl.tensor,
    key_s: tl.tensor,
    value_b: tl.tensor,
    value_h: tl.tensor,
    value_s: tl.tensor,
    context_b: tl.tensor,
    context_h: tl.tensor,
    context_t: tl.tensor,
    mask_b: tl.tensor,
    mask_s: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    log2_scale: tl.tensor,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_S: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Attend in one head of one sentence."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    q = _load(query + b * query_b + h * query_h, query_t, queries, TILE_T, WIDTH)
    k = _load(key + b * key_b + h * key_h, key_s, keys, TILE_S, WIDTH)
    v = _load(value + b * value_b + h * value_h, value_s, keys, TILE_S, WIDTH)
    weights = _attention_weights(
        q, k, mask + b * mask_b, mask_s, queries, keys, log2_scale, CAUSAL, MASKED, TILE_T, TILE_S
    )
    output = tl.dot(weights.to(v.dtype), v)
    _store(context + b * context_b + h * context_h, context_t, queries, output, TILE_T, WIDTH)


@triton.jit(do_not_specialize=["mask_b", "mask_s", "heads", "queries", "keys"])
def _backward(
    grad_output: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    mask: tl.tensor,
    grad_query: tl.tensor,
    grad_key: tl.tensor,
    grad_value: tl.tensor,
    grad_output_b: tl.tensor,
    grad_output_h: tl.tensor,
    grad_output_t: tl.tensor,
    query_b: tl.tensor,
    query_h: tl.tensor,
    query_t: tl.tensor,
    key_b: tl.tensor,
    key_h: tl.tensor,
    key_s: tl.tensor,
    value_b: tl.tensor,
    value_h: tl.tensor,
    value_s: tl.tensor,
    grad_query_b: tl.tensor,
    grad_query_h: tl.tensor,
    grad_query_t: tl.tensor,
    grad_key_b: tl.tensor,
    grad_key_h: tl.tensor,
    grad_key_s: tl.tensor,
    grad_value_b: tl.tensor,
    grad_value_h: tl.tensor,
    grad_value_s: tl.tensor,
    mask_b: tl.tensor,
    mask_s: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    log2_scale: tl.tensor,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_S: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Recompute the weights of one head, then the gradients of values, softmax and scores."""
    b = (tl.program_id(0) // heads).to(tl.int64)
    h = (tl.program_id(0) % heads).to(tl.int64)
    q = _load(query + b * query_b + h * query_h, query_t, queries, TILE_T, WIDTH)
    k = _load(key + b * key_b + h * key_h, key_s, keys, TILE_S, WIDTH)
    v = _load(value + b * value_b + h * value_h, value_s, keys, TILE_S, WIDTH)
    o = _load(
        grad_output + b * grad_output_b + h * grad_output_h, grad_output_t, queries, TILE_T, WIDTH
    )
    weights = _attention_weights(
        q, k, mask + b * mask_b, mask_s, queries, keys, log2_scale, CAUSAL, MASKED, TILE_T, TILE_S
    )
    grad_weights = tl.dot(o, tl.trans(v))
    scores = weights * (grad_weights - tl.sum(weights * grad_weights, 1)[:, None]) * scale
    _store(
        grad_value + b * grad_value_b + h * grad_value_h,
        grad_value_s,
        keys,
        tl.dot(tl.trans(weights.to(o.dtype)), o),
        TILE_S,
        WIDTH,
    )
    half_scores = scores.to(q.dtype)
    _store(
        grad_query + b * grad_query_b + h * grad_query_h,
        grad_query_t,
        queries,
        tl.dot(half_scores, k),
        TILE_T,
        WIDTH,
    )
    _store(
        grad_key + b * grad_key_b + h * grad_key_h,
        grad_key_s,
        keys,
        tl.dot(tl.trans(half_scores), q),
        TILE_S,
        WIDTH,
    )
