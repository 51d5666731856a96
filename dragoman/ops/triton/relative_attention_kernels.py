"""Triton kernels of `relative_attention.py`: causal attention with a score for each distance.

The caller validates shapes and dtypes. Row t of the scores by distance is read T - 1 - t columns to
the right, which is Transformer-XL's relative shift, so that no shifted copy is written. Tiles are
FlashAttention's (Dao 2023): the softmax is rescaled on the way, and the backward pass recomputes
the weights from their log-sum-exp. Matmuls accumulate in float32. No two programs write to the same
address, so results are deterministic.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # GPUs compute powers of two
TILE = 64  # queries and keys of a tile: FULL_TILE of relative_attention.py
NARROW_TILE = 32  # keys of a tile where the gradients of the scores are written, to fit registers


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    seeds: Tensor | None,
    context: Tensor,
    log_sums: Tensor,
    *,
    scale: float,
    drop_threshold: int,
    keep_scale: float,
) -> None:
    """Write the context (B, H, T, Dh) and the log-sum-exp (B, H, T) of the scores, base 2.

    `scores` (B, H, T, S) are by distance, S - 1 down to 0, and contiguous.
    """
    query, key, value = _aligned(query), _aligned(key), _aligned(value)
    with torch.cuda.device_of(query):
        _forward[_grid(query, query.size(2))](
            query,
            key,
            value,
            scores,
            scores if seeds is None else seeds,
            context,
            log_sums,
            *_strides(query),
            *_strides(key),
            *_strides(value),
            *_strides(context),
            query.size(1),
            query.size(2),
            key.size(2),
            scale * LOG2_E,
            drop_threshold,
            keep_scale,
            **launch_options(query.size(3), seeds is not None),
            num_stages=2,
        )


def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Tensor,
    seeds: Tensor | None,
    log_sums: Tensor,
    delta: Tensor,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_scores: Tensor,
    *,
    scale: float,
    drop_threshold: int,
    keep_scale: float,
) -> None:
    """Write the gradients; `delta` (B, H, T) is the sum of output times its gradient."""
    grad_output, query, key, value = (_aligned(each) for each in (grad_output, query, key, value))
    inputs = (grad_output, query, key, value, scores, scores if seeds is None else seeds)
    strides = [stride for each in (grad_output, query, key, value) for stride in _strides(each)]
    sizes = (query.size(1), query.size(2), key.size(2), scale, drop_threshold, keep_scale)
    options = launch_options(query.size(3), seeds is not None)
    with torch.cuda.device_of(query):
        _backward_keys[_grid(query, key.size(2))](
            *inputs,
            log_sums,
            delta,
            grad_key,
            grad_value,
            *strides,
            *_strides(grad_key),
            *_strides(grad_value),
            *sizes,
            **options,
            num_stages=1,
        )
        _backward_queries[_grid(query, query.size(2))](
            *inputs,
            log_sums,
            delta,
            grad_query,
            grad_scores,
            *strides,
            *_strides(grad_query),
            *sizes,
            **(options | {"COLUMNS": NARROW_TILE}),
            num_stages=1,
        )


def _grid(query: Tensor, length: int) -> tuple[int, int]:
    """Return the grid: tiles of a sequence, and heads."""
    return triton.cdiv(length, TILE), query.size(0) * query.size(1)


def launch_options(width: int, dropout: bool) -> dict[str, Any]:
    """Return the constants that kernels are compiled with, for a head width."""
    return {
        "DROPOUT": dropout,
        "ROWS": TILE,
        "COLUMNS": TILE,
        "WIDTH": width,
        "TILE_WIDTH": max(16, triton.next_power_of_2(width)),
        "num_warps": 4 if width <= 64 else 8,  # nothing spills, by the assembler's report
    }


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous, with rows at multiples of 16 bytes."""
    is_aligned = x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if is_aligned and x.data_ptr() % 16 == 0 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of all axes but the last, in vectors of 8 elements."""
    return tuple(stride // 8 for stride in x.stride()[:-1])


@triton.jit
def _head(
    start: tl.tensor, b: tl.tensor, stride_b: tl.tensor, h: tl.tensor, stride_h: tl.tensor
) -> tl.tensor:
    """Return the pointer to one head. The factor tells the compiler that 16 bytes are aligned."""
    return start + b * (stride_b * 8) + h * (stride_h * 8)


@triton.jit
def _load(
    start: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
) -> tl.tensor:
    """Load rows of one head, with zeros past its length and its width."""
    features = tl.arange(0, TILE_WIDTH)
    inside = (rows[:, None] < length) & (features[None, :] < WIDTH)
    pointers = start + rows[:, None] * (stride * 8) + features[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _store(
    start: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    values: tl.tensor,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
) -> None:
    """Store rows of one head up to its length and width, in the dtype of the tensor."""
    features = tl.arange(0, TILE_WIDTH)
    inside = (rows[:, None] < length) & (features[None, :] < WIDTH)
    pointers = start + rows[:, None] * (stride * 8) + features[None, :]
    tl.store(pointers, values.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _visible(t: tl.tensor, s: tl.tensor, queries: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Return which keys of a tile come no later than a query."""
    return (s[None, :] <= t[:, None] + (keys - queries)) & (t[:, None] < queries)


@triton.jit
def _distance_offsets(t: tl.tensor, s: tl.tensor, queries: tl.tensor, keys: tl.tensor) -> tl.tensor:
    """Return where the scores of a tile are among those by distance: T - 1 - t columns on."""
    return (t * (keys - 1) + (queries - 1))[:, None] + s[None, :]


@triton.jit
def _scores(
    q: tl.tensor,
    k: tl.tensor,
    by_distance: tl.tensor,
    offsets: tl.tensor,
    visible: tl.tensor,
    log2_scale: tl.tensor,
) -> tl.tensor:
    """Return the scores of a tile, base 2; -inf where nothing is visible."""
    relative = tl.load(by_distance + offsets, mask=visible, other=0.0).to(tl.float32)
    scores = tl.dot(q, tl.trans(k)) * log2_scale + relative * 1.4426950408889634
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _keep_mask(
    seeds: tl.tensor,
    head: tl.tensor,
    t: tl.tensor,
    s: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    drop_threshold: tl.tensor,
) -> tl.tensor:
    """Return which weights dropout keeps, by the hash of `ops.dropout.hash_positions`."""
    first = tl.load(seeds).to(tl.int32).to(tl.uint32, bitcast=True)
    second = tl.load(seeds + 1).to(tl.int32).to(tl.uint32, bitcast=True)
    position = (head * queries + t[:, None]) * keys + s[None, :]
    bits = position.to(tl.int32).to(tl.uint32, bitcast=True) ^ first
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) ^ second
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    bits = bits ^ (bits >> 16)
    return bits.to(tl.int32, bitcast=True) >= drop_threshold


@triton.jit(do_not_specialize=["heads", "queries", "keys", "drop_threshold"])
def _forward(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    by_distance: tl.tensor,
    seeds: tl.tensor,
    context: tl.tensor,
    log_sums: tl.tensor,
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
    heads: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    log2_scale: tl.tensor,
    drop_threshold: tl.tensor,
    keep_scale: tl.tensor,
    DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
) -> None:
    """Attend from one tile of queries of one head."""
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    by_distance += head.to(tl.int64) * queries * keys
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _load(_head(query, b, query_b, h, query_h), query_t, t, queries, WIDTH, TILE_WIDTH)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, TILE_WIDTH], tl.float32)
    end = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS + keys - queries)
    for start in range(0, end, COLUMNS):
        s = start + tl.arange(0, COLUMNS)
        k = _load(_head(key, b, key_b, h, key_h), key_s, s, keys, WIDTH, TILE_WIDTH)
        v = _load(_head(value, b, value_b, h, value_h), value_s, s, keys, WIDTH, TILE_WIDTH)
        visible = _visible(t, s, queries, keys)
        offsets = _distance_offsets(t, s, queries, keys)
        scores = _scores(q, k, by_distance, offsets, visible, log2_scale)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # Rows past the end see nothing at all.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(largest - shift)
        total = total * rescale + tl.sum(weights, 1)
        if DROPOUT:
            keep = _keep_mask(seeds, head, t, s, queries, keys, drop_threshold)
            weights = tl.where(keep, weights * keep_scale, 0.0)
        output = output * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = new_largest
    total = tl.where(total == 0.0, 1.0, total)
    start_output = _head(context, b, context_b, h, context_h)
    _store(start_output, context_t, t, queries, output / total[:, None], WIDTH, TILE_WIDTH)
    log_sum = tl.where(largest == float("-inf"), 0.0, largest) + tl.log2(total)
    tl.store(log_sums + head.to(tl.int64) * queries + t, log_sum, mask=t < queries)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "drop_threshold"])
def _backward_keys(
    grad_output: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    by_distance: tl.tensor,
    seeds: tl.tensor,
    log_sums: tl.tensor,
    delta: tl.tensor,
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
    grad_key_b: tl.tensor,
    grad_key_h: tl.tensor,
    grad_key_s: tl.tensor,
    grad_value_b: tl.tensor,
    grad_value_h: tl.tensor,
    grad_value_s: tl.tensor,
    heads: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    drop_threshold: tl.tensor,
    keep_scale: tl.tensor,
    DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
) -> None:
    """Write the gradients of one tile of keys and values of one head."""
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    by_distance += head.to(tl.int64) * queries * keys
    log_sums += head.to(tl.int64) * queries
    delta += head.to(tl.int64) * queries
    first = tl.program_id(0) * COLUMNS
    s = first + tl.arange(0, COLUMNS)
    k = _load(_head(key, b, key_b, h, key_h), key_s, s, keys, WIDTH, TILE_WIDTH)
    v = _load(_head(value, b, value_b, h, value_h), value_s, s, keys, WIDTH, TILE_WIDTH)
    key_sum = tl.zeros([COLUMNS, TILE_WIDTH], tl.float32)
    value_sum = tl.zeros([COLUMNS, TILE_WIDTH], tl.float32)
    # The first query that sees the first key of the tile, rounded down to a tile.
    begin = tl.maximum(0, first - (keys - queries)) // ROWS * ROWS
    for start in range(begin, queries, ROWS):
        t = start + tl.arange(0, ROWS)
        q = _load(_head(query, b, query_b, h, query_h), query_t, t, queries, WIDTH, TILE_WIDTH)
        o = _load(
            _head(grad_output, b, grad_output_b, h, grad_output_h),
            grad_output_t,
            t,
            queries,
            WIDTH,
            TILE_WIDTH,
        )
        log_sum = tl.load(log_sums + t, mask=t < queries, other=0.0)
        row_delta = tl.load(delta + t, mask=t < queries, other=0.0)
        visible = _visible(t, s, queries, keys)
        offsets = _distance_offsets(t, s, queries, keys)
        scores = _scores(q, k, by_distance, offsets, visible, scale * 1.4426950408889634)
        weights = tl.exp2(scores - log_sum[:, None])
        grad_weights = tl.dot(o, tl.trans(v))
        kept = weights
        if DROPOUT:
            keep = _keep_mask(seeds, head, t, s, queries, keys, drop_threshold)
            kept = tl.where(keep, weights * keep_scale, 0.0)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        value_sum += tl.dot(tl.trans(kept.to(o.dtype)), o)
        grad = weights * (grad_weights - row_delta[:, None])
        key_sum += tl.dot(tl.trans(grad.to(q.dtype)), q)
    start_key = _head(grad_key, b, grad_key_b, h, grad_key_h)
    _store(start_key, grad_key_s, s, keys, key_sum * scale, WIDTH, TILE_WIDTH)
    start_value = _head(grad_value, b, grad_value_b, h, grad_value_h)
    _store(start_value, grad_value_s, s, keys, value_sum, WIDTH, TILE_WIDTH)


@triton.jit(do_not_specialize=["heads", "queries", "keys", "drop_threshold"])
def _backward_queries(
    grad_output: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    by_distance: tl.tensor,
    seeds: tl.tensor,
    log_sums: tl.tensor,
    delta: tl.tensor,
    grad_query: tl.tensor,
    grad_scores: tl.tensor,
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
    heads: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    drop_threshold: tl.tensor,
    keep_scale: tl.tensor,
    DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
) -> None:
    """Write the gradients of one tile of queries of one head, and of their scores by distance."""
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    by_distance += head.to(tl.int64) * queries * keys
    grad_scores += head.to(tl.int64) * queries * keys
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    q = _load(_head(query, b, query_b, h, query_h), query_t, t, queries, WIDTH, TILE_WIDTH)
    start_output = _head(grad_output, b, grad_output_b, h, grad_output_h)
    o = _load(start_output, grad_output_t, t, queries, WIDTH, TILE_WIDTH)
    log_sum = tl.load(log_sums + head.to(tl.int64) * queries + t, mask=t < queries, other=0.0)
    row_delta = tl.load(delta + head.to(tl.int64) * queries + t, mask=t < queries, other=0.0)
    query_sum = tl.zeros([ROWS, TILE_WIDTH], tl.float32)
    end = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS + keys - queries)
    for start in range(0, end, COLUMNS):
        s = start + tl.arange(0, COLUMNS)
        k = _load(_head(key, b, key_b, h, key_h), key_s, s, keys, WIDTH, TILE_WIDTH)
        v = _load(_head(value, b, value_b, h, value_h), value_s, s, keys, WIDTH, TILE_WIDTH)
        visible = _visible(t, s, queries, keys)
        offsets = _distance_offsets(t, s, queries, keys)
        scores = _scores(q, k, by_distance, offsets, visible, scale * 1.4426950408889634)
        weights = tl.exp2(scores - log_sum[:, None])
        grad_weights = tl.dot(o, tl.trans(v))
        if DROPOUT:
            keep = _keep_mask(seeds, head, t, s, queries, keys, drop_threshold)
            grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        grad = weights * (grad_weights - row_delta[:, None])
        query_sum += tl.dot(grad.to(k.dtype), k)
        tl.store(grad_scores + offsets, grad.to(grad_scores.dtype.element_ty), mask=visible)
    start_query = _head(grad_query, b, grad_query_b, h, grad_query_h)
    _store(start_query, grad_query_t, t, queries, query_sum * scale, WIDTH, TILE_WIDTH)
    # Distances that no key of these queries has.
    for start in range(0, queries - 1 - tl.program_id(0) * ROWS, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        unused = (column[None, :] < (queries - 1) - t[:, None]) & (t[:, None] < queries)
        pointers = grad_scores + t[:, None] * keys + column[None, :]
        zeros = tl.zeros([ROWS, COLUMNS], grad_scores.dtype.element_ty)
        tl.store(pointers, zeros, mask=unused)
