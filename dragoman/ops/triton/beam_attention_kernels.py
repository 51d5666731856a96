"""Triton kernels of `beam_search_step_attention.py`: a program per sentence and head, one tile.

The caller validates shapes and dtypes. Tiles of queries have at least 16 rows, as tensor cores
require. Matmuls accumulate in float32. The step is read on the device, so that CUDA graphs can
replay the launches.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # GPUs compute powers of two
KEYS_PER_BLOCK = 32  # with one warp a dozen programs run concurrently, which hides memory latency


def attend_kv_cache(
    query: Tensor, key_value: Tensor, kv_cache: Tensor, history_bias: Tensor, step: Tensor
) -> Tensor:
    """Append (N, 2, H, K, Dh) to the KV cache; return the context (N, K, H * Dh)."""
    count, heads, beams_per_sentence, width = query.shape
    query, key_value = _row_contiguous(query), _row_contiguous(key_value)
    context = query.new_empty(count, beams_per_sentence, heads * width)
    with torch.cuda.device_of(query):
        _self_attention_kernel[(count, heads)](
            query,
            key_value,
            kv_cache,
            history_bias,
            step,
            context,
            *query.stride()[:3],
            *key_value.stride()[:4],
            *kv_cache.stride()[:4],
            history_bias.stride(0),
            history_bias.stride(2),
            width**-0.5 * LOG2_E,
            BEAMS=beams_per_sentence,
            ROWS=_tile_rows(beams_per_sentence),
            WIDTH=width,
            HEADS=heads,
            BLOCK=KEYS_PER_BLOCK,
            num_warps=1,
            num_stages=1,
        )
    return context


def attend_memory(query: Tensor, memory: Tensor, padding_bias: Tensor) -> Tensor:
    """Return the context (N, K, H * Dh) of queries (N, H, K, Dh) and memory (N, 2, H, S, Dh)."""
    count, heads, beams_per_sentence, width = query.shape
    query, block = _row_contiguous(query), 16 if memory.size(3) <= 16 else KEYS_PER_BLOCK
    context = query.new_empty(count, beams_per_sentence, heads * width)
    with torch.cuda.device_of(query):
        _cross_attention_kernel[(count, heads)](
            query,
            memory,
            padding_bias,
            context,
            *query.stride()[:3],
            *memory.stride()[:4],
            padding_bias.stride(0),
            memory.size(3),
            width**-0.5 * LOG2_E,
            BEAMS=beams_per_sentence,
            ROWS=_tile_rows(beams_per_sentence),
            WIDTH=width,
            HEADS=heads,
            BLOCK=block,
            num_warps=1,
            num_stages=1,
        )
    return context


def _tile_rows(beams_per_sentence: int) -> int:
    """Return the next power of two that tensor cores support."""
    return max(16, 1 << (beams_per_sentence - 1).bit_length())


def _row_contiguous(x: Tensor) -> Tensor:
    """Return a tensor whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _accumulate_attention(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    visible: tl.tensor,
    max_score: tl.tensor,
    weight_sum: tl.tensor,
    value_sum: tl.tensor,
    scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Update the online softmax with a block of keys: maximum score, sums of weights and values."""
    scores = tl.where(visible, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    rescale = tl.exp2(max_score - new_max)
    value_sum = value_sum * rescale[:, None] + tl.dot(weights.to(value.dtype), value)
    return new_max, weight_sum * rescale + tl.sum(weights, 1), value_sum


@triton.jit(do_not_specialize=["scale"])
def _self_attention_kernel(
    query: tl.tensor,
    new: tl.tensor,
    kv_cache: tl.tensor,
    history_bias: tl.tensor,
    step: tl.tensor,
    context: tl.tensor,
    query_n: tl.tensor,
    query_h: tl.tensor,
    query_k: tl.tensor,
    new_n: tl.tensor,
    new_2: tl.tensor,
    new_h: tl.tensor,
    new_k: tl.tensor,
    cache_n: tl.tensor,
    cache_2: tl.tensor,
    cache_h: tl.tensor,
    cache_s: tl.tensor,
    bias_n: tl.tensor,
    bias_k: tl.tensor,
    scale: tl.tensor,
    BEAMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Attend in one head of one sentence, starting with each beam's newest key."""
    sentence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    beams, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_beam = (beams < BEAMS)[:, None]
    query_tile = tl.load(
        query + sentence * query_n + head * query_h + beams[:, None] * query_k + dims[None, :],
        mask=in_beam,
        other=0.0,
    )
    new_pointers = new + sentence * new_n + head * new_h + beams[:, None] * new_k + dims[None, :]
    new_key = tl.load(new_pointers, mask=in_beam, other=0.0)
    new_value = tl.load(new_pointers + new_2, mask=in_beam, other=0.0)
    filled = tl.load(step).to(tl.int32) * BEAMS
    base = kv_cache + sentence * cache_n + head * cache_h
    slot_pointers = base + (filled + beams)[:, None] * cache_s + dims[None, :]
    tl.store(slot_pointers, new_key, mask=in_beam)
    tl.store(slot_pointers + cache_2, new_value, mask=in_beam)
    max_score = tl.sum(query_tile.to(tl.float32) * new_key.to(tl.float32), 1) * scale
    # NaN if the only score of a first position is not finite.
    weight_sum = 1.0 + (max_score - max_score)
    value_sum = new_value.to(tl.float32)
    first = 0
    while first < filled:
        slots = first + tl.arange(0, BLOCK)
        shown = tl.load(
            history_bias + sentence * bias_n + beams[:, None] * bias_k + slots[None, :],
            mask=in_beam & (slots < filled)[None, :],
            other=float("-inf"),
        )
        visible = shown.to(tl.float32) > -1.0
        used = tl.max(visible.to(tl.int32), 0) > 0  # keys that no beam uses are not loaded
        cache_pointers = base + slots[:, None] * cache_s + dims[None, :]
        key = tl.load(cache_pointers, mask=used[:, None], other=0.0)
        value = tl.load(cache_pointers + cache_2, mask=used[:, None], other=0.0)
        max_score, weight_sum, value_sum = _accumulate_attention(
            query_tile, key, value, visible, max_score, weight_sum, value_sum, scale
        )
        first += BLOCK
    output = value_sum / weight_sum[:, None]
    at = context + ((sentence * BEAMS + beams[:, None]) * HEADS + head) * WIDTH + dims[None, :]
    tl.store(at, output.to(context.dtype.element_ty), mask=in_beam)


@triton.jit(do_not_specialize=["scale", "length"])
def _cross_attention_kernel(
    query: tl.tensor,
    memory: tl.tensor,
    padding_bias: tl.tensor,
    context: tl.tensor,
    query_n: tl.tensor,
    query_h: tl.tensor,
    query_k: tl.tensor,
    memory_n: tl.tensor,
    memory_2: tl.tensor,
    memory_h: tl.tensor,
    memory_s: tl.tensor,
    padding_n: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    BEAMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Attend in one head of one sentence, whose first position is never padding."""
    sentence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    beams, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    in_beam = (beams < BEAMS)[:, None]
    query_tile = tl.load(
        query + sentence * query_n + head * query_h + beams[:, None] * query_k + dims[None, :],
        mask=in_beam,
        other=0.0,
    )
    base = memory + sentence * memory_n + head * memory_h
    max_score = tl.full((ROWS,), float("-inf"), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    value_sum = tl.zeros((ROWS, WIDTH), tl.float32)
    first = 0
    while first < length:
        positions = first + tl.arange(0, BLOCK)
        shown = (
            tl.load(
                padding_bias + sentence * padding_n + positions,
                mask=positions < length,
                other=float("-inf"),
            ).to(tl.float32)
            > -1.0
        )
        memory_pointers = base + positions[:, None] * memory_s + dims[None, :]
        key = tl.load(memory_pointers, mask=shown[:, None], other=0.0)
        value = tl.load(memory_pointers + memory_2, mask=shown[:, None], other=0.0)
        max_score, weight_sum, value_sum = _accumulate_attention(
            query_tile, key, value, shown[None, :], max_score, weight_sum, value_sum, scale
        )
        first += BLOCK
    output = value_sum / weight_sum[:, None]
    at = context + ((sentence * BEAMS + beams[:, None]) * HEADS + head) * WIDTH + dims[None, :]
    tl.store(at, output.to(context.dtype.element_ty), mask=in_beam)
