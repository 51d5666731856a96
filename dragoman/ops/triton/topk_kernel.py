"""Triton kernel of `topk.py`: top-k log-probabilities, with one pass over each row of logits.

A row is cut into blocks of 128 tokens. The first pass computes the log-sum-exp and the maximum of
each block; the top k are in the k blocks with the largest maxima, which are loaded again. A value
and its index are packed into one integer, value above, inverted index below, so that the maximum is
the first of equal values. The caller validates shapes and dtypes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs compute powers of two
EMPTY_KEY = tl.constexpr(-(2**63))  # below every packed key
INDEX_MASK = tl.constexpr(2**32 - 1)
TOKENS_PER_BLOCK = 128  # four for each thread of a warp
MAX_BLOCKS = 16  # seven programs run concurrently, some loading while others select


def topk_log_probs(
    logits: Tensor,
    bias: Tensor | None,
    count: int,
    forbidden: Sequence[int],
    eos: int,
    step: Tensor,
    min_length: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids (n, count) of the top tokens of logits (n, V)."""
    rows, vocab_size = logits.shape
    log_probs = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, count, dtype=torch.long, device=logits.device)
    blocks = min(MAX_BLOCKS, _next_power_of_two(-(-vocab_size // TOKENS_PER_BLOCK)))
    num_tiles = -(-vocab_size // (blocks * TOKENS_PER_BLOCK))
    with torch.cuda.device_of(logits):
        _topk_kernel[(rows,)](
            logits,
            logits if bias is None else bias,
            log_probs,
            ids,
            step,
            min_length,
            logits.stride(0),
            HAS_BIAS=bias is not None,
            FORBIDDEN_BITS=sum(1 << token_id for token_id in set(forbidden)),
            EOS_ID=eos,
            TOPK=count,
            PADDED_COUNT=_next_power_of_two(count),
            VOCAB_SIZE=vocab_size,
            BLOCKS=blocks,
            NUM_TILES=num_tiles,
            TILES_PADDED=_next_power_of_two(num_tiles),
            WIDTH=TOKENS_PER_BLOCK,
            num_warps=max(1, blocks // 4),
            num_stages=1,
        )
    return log_probs, ids


def _next_power_of_two(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


@triton.jit
def _pack_key(x: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """Pack values and indices into int64 keys: ordered by value, then by descending index."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # no negative zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (token_ids.to(tl.int64) ^ INDEX_MASK)


@triton.jit
def _key_index(key: tl.tensor) -> tl.tensor:
    """Return the index of a key."""
    return (key & INDEX_MASK) ^ INDEX_MASK


@triton.jit
def _key_value(key: tl.tensor) -> tl.tensor:
    """Return the value of a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_forbidden(
    token_ids: tl.tensor, eos_blocked: tl.tensor, FORBIDDEN_BITS: tl.constexpr, EOS_ID: tl.constexpr
) -> tl.tensor:
    """Whether tokens are forbidden: their bit is set, or they are EOS before the minimum length."""
    bit = (FORBIDDEN_BITS >> tl.minimum(token_ids, 31)) & 1
    return ((token_ids < 31) & (bit == 1)) | ((token_ids == EOS_ID) & eos_blocked)


@triton.jit
def _load_logits(
    start: tl.tensor,
    bias: tl.tensor,
    token_ids: tl.tensor,
    in_vocab: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Load logits with their bias."""
    x = tl.load(start + token_ids, mask=in_vocab, other=float("-inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + token_ids, mask=in_vocab, other=0.0)
    return x


@triton.jit
def _topk_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    log_probs: tl.tensor,
    ids: tl.tensor,
    step: tl.tensor,
    min_length: tl.tensor,
    stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    FORBIDDEN_BITS: tl.constexpr,
    EOS_ID: tl.constexpr,
    TOPK: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILES_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute one row."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    eos_blocked = tl.load(step) < tl.load(min_length)
    columns, tile_ids = tl.arange(0, WIDTH), tl.arange(0, TILES_PADDED)
    # Finite, so that an empty block does not give NaN.
    max_logits = tl.full((BLOCKS,), -1e38, tl.float32)
    norms = tl.zeros((BLOCKS, WIDTH), tl.float32)
    block_max = tl.full((BLOCKS, TILES_PADDED), float("-inf"), tl.float32)
    for tile in range(NUM_TILES):
        token_ids = (tile * BLOCKS + tl.arange(0, BLOCKS))[:, None] * WIDTH + columns[None, :]
        x = _load_logits(start, bias, token_ids, token_ids < VOCAB_SIZE, HAS_BIAS)
        tile_max = tl.max(x, 1)
        new_max = tl.maximum(max_logits, tile_max)
        norms = norms * tl.exp2((max_logits - new_max) * LOG2_E)[:, None] + tl.exp2(
            x * LOG2_E - (new_max * LOG2_E)[:, None]
        )
        max_logits = new_max
        block_max = tl.where((tile_ids == tile)[None, :], tile_max[:, None], block_max)
    row_max = tl.max(max_logits, 0)
    norm = tl.sum(tl.sum(norms, 1) * tl.exp2((max_logits - row_max) * LOG2_E), 0)
    log_sum_exp = row_max + tl.log2(norm) / LOG2_E
    blocks = tile_ids[None, :] * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    # Forbidden tokens are in the first block: they count in the sum, but not in its maximum.
    x = tl.where(
        _is_forbidden(columns, eos_blocked, FORBIDDEN_BITS, EOS_ID),
        float("-inf"),
        _load_logits(start, bias, columns, columns < VOCAB_SIZE, HAS_BIAS),
    )
    block_max = tl.where(blocks == 0, tl.max(x, 0), block_max)
    keys = _pack_key(block_max - log_sum_exp, blocks)
    ranks = tl.arange(0, PADDED_COUNT)
    chosen_blocks = tl.zeros((PADDED_COUNT,), tl.int64)
    for tile in tl.static_range(TOPK):
        best = tl.max(tl.max(keys, 1), 0)
        chosen_blocks = tl.where(ranks == tile, _key_index(best), chosen_blocks)
        keys = tl.where(keys == best, EMPTY_KEY, keys)
    token_ids = chosen_blocks[:, None] * WIDTH + columns[None, :]
    in_vocab = (ranks < TOPK)[:, None] & (token_ids < VOCAB_SIZE)
    x = _load_logits(start, bias, token_ids, in_vocab, HAS_BIAS)
    x = tl.where(
        _is_forbidden(token_ids, eos_blocked, FORBIDDEN_BITS, EOS_ID),
        float("-inf"),
        x - log_sum_exp,
    )
    candidates = tl.where(in_vocab, _pack_key(x, token_ids), EMPTY_KEY)
    chosen_keys = tl.full((PADDED_COUNT,), EMPTY_KEY, tl.int64)
    for tile in tl.static_range(TOPK):
        best = tl.max(tl.max(candidates, 1), 0)
        chosen_keys = tl.where(ranks == tile, best, chosen_keys)
        candidates = tl.where(candidates == best, EMPTY_KEY, candidates)
    at = row * TOPK + ranks
    # NaN in the sum makes all log-probabilities NaN.
    tl.store(
        log_probs + at,
        tl.where(log_sum_exp == log_sum_exp, _key_value(chosen_keys), log_sum_exp),
        mask=ranks < TOPK,
    )
    tl.store(ids + at, _key_index(chosen_keys), mask=ranks < TOPK)
