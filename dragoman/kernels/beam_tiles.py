"""The Triton kernels behind `beam_attention.py`: one program for each sentence and head, the queries of its beams in one tile.

Nothing here is checked: the caller sees to shapes and types. Tiles of queries have 16 rows, as tensor cores want them, of which a
beam fills some. Products are summed in float32. How many steps there were is read on the device, so that launches can be recorded.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # a GPU has powers of two
BLOCK = 32  # keys at a time: with one warp a dozen programs are at work side by side, which hides how long memory takes


def attend_past(query: Tensor, key_value: Tensor, own: Tensor, seen: Tensor, step: Tensor) -> Tensor:
    """Keep (N, 2, H, K, Dh) in (N, 2, H, slots, Dh), and give the context (N, K, H * Dh) of queries (N, H, K, Dh)."""
    count, heads, fan, width = query.shape
    query, key_value = _rows(query), _rows(key_value)
    context = query.new_empty(count, fan, heads * width)
    with torch.cuda.device_of(query):
        _past[(count, heads)](
            query, key_value, own, seen, step, context,
            *query.stride()[:3], *key_value.stride()[:4], *own.stride()[:4], seen.stride(0), seen.stride(2),
            width**-0.5 * LOG2_E, FAN=fan, ROWS=_tile(fan), WIDTH=width, HEADS=heads, BLOCK=BLOCK, num_warps=1, num_stages=1,
        )  # fmt: skip
    return context


def attend_sentence(query: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
    """Give the context (N, K, H * Dh) of queries (N, H, K, Dh) that look at the keys and values (N, 2, H, S, Dh) of their sentence."""
    count, heads, fan, width = query.shape
    query, block = _rows(query), 16 if memory.size(3) <= 16 else BLOCK
    context = query.new_empty(count, fan, heads * width)
    with torch.cuda.device_of(query):
        _sentence[(count, heads)](
            query, memory, hidden, context, *query.stride()[:3], *memory.stride()[:4], hidden.stride(0), memory.size(3),
            width**-0.5 * LOG2_E, FAN=fan, ROWS=_tile(fan), WIDTH=width, HEADS=heads, BLOCK=block, num_warps=1, num_stages=1,
        )  # fmt: skip
    return context


def _tile(fan: int) -> int:
    """Round a number of beams up to a power of two that tensor cores take."""
    return max(16, 1 << (fan - 1).bit_length())


def _rows(x: Tensor) -> Tensor:
    """Copy only what does not have the numbers of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _look(
    query: tl.tensor, key: tl.tensor, value: tl.tensor, visible: tl.tensor, highest: tl.tensor, norm: tl.tensor, total: tl.tensor,
    scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add what queries see of some keys to what they saw before: their highest score, the sum of weights and that of values."""
    scores = tl.where(visible, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    before = tl.exp2(highest - higher)
    total = total * before[:, None] + tl.dot(weights.to(value.dtype), value)
    return higher, norm * before + tl.sum(weights, 1), total


@triton.jit(do_not_specialize=["scale"])
def _past(
    query: tl.tensor, new: tl.tensor, own: tl.tensor, seen: tl.tensor, step: tl.tensor, context: tl.tensor,
    query_n: tl.tensor, query_h: tl.tensor, query_k: tl.tensor,
    new_n: tl.tensor, new_2: tl.tensor, new_h: tl.tensor, new_k: tl.tensor,
    own_n: tl.tensor, own_2: tl.tensor, own_h: tl.tensor, own_s: tl.tensor,
    seen_n: tl.tensor, seen_k: tl.tensor, scale: tl.tensor,
    FAN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Do one head of one sentence; a beam begins with its newest key, which it always sees, so that no score is the first."""
    sentence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    beams, across = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = (beams < FAN)[:, None]
    asked = tl.load(query + sentence * query_n + head * query_h + beams[:, None] * query_k + across[None, :], mask=there, other=0.0)
    fresh = new + sentence * new_n + head * new_h + beams[:, None] * new_k + across[None, :]
    newest = tl.load(fresh, mask=there, other=0.0)
    said = tl.load(fresh + new_2, mask=there, other=0.0)
    filled = tl.load(step).to(tl.int32) * FAN
    base = own + sentence * own_n + head * own_h
    place = base + (filled + beams)[:, None] * own_s + across[None, :]
    tl.store(place, newest, mask=there)
    tl.store(place + own_2, said, mask=there)
    highest = tl.sum(asked.to(tl.float32) * newest.to(tl.float32), 1) * scale
    norm = 1.0 + (highest - highest)  # NaN where the only score of a first position is not finite
    total = said.to(tl.float32)
    first = 0
    while first < filled:
        slots = first + tl.arange(0, BLOCK)
        shown = tl.load(
            seen + sentence * seen_n + beams[:, None] * seen_k + slots[None, :],
            mask=there & (slots < filled)[None, :], other=float("-inf"),
        )  # fmt: skip
        visible = shown.to(tl.float32) > -1.0
        used = tl.max(visible.to(tl.int32), 0) > 0  # what no beam came from is not read
        past = base + slots[:, None] * own_s + across[None, :]
        key = tl.load(past, mask=used[:, None], other=0.0)
        value = tl.load(past + own_2, mask=used[:, None], other=0.0)
        highest, norm, total = _look(asked, key, value, visible, highest, norm, total, scale)
        first += BLOCK
    found = total / norm[:, None]
    at = context + ((sentence * FAN + beams[:, None]) * HEADS + head) * WIDTH + across[None, :]
    tl.store(at, found.to(context.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["scale", "length"])
def _sentence(
    query: tl.tensor, memory: tl.tensor, hidden: tl.tensor, context: tl.tensor,
    query_n: tl.tensor, query_h: tl.tensor, query_k: tl.tensor,
    memory_n: tl.tensor, memory_2: tl.tensor, memory_h: tl.tensor, memory_s: tl.tensor,
    hidden_n: tl.tensor, length: tl.tensor, scale: tl.tensor,
    FAN: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Do one head of one sentence, which has one position at least that is not hidden: the first."""
    sentence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    beams, across = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    there = (beams < FAN)[:, None]
    asked = tl.load(query + sentence * query_n + head * query_h + beams[:, None] * query_k + across[None, :], mask=there, other=0.0)
    base = memory + sentence * memory_n + head * memory_h
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    norm = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    first = 0
    while first < length:
        places = first + tl.arange(0, BLOCK)
        shown = tl.load(hidden + sentence * hidden_n + places, mask=places < length, other=float("-inf")).to(tl.float32) > -1.0
        words = base + places[:, None] * memory_s + across[None, :]
        key = tl.load(words, mask=shown[:, None], other=0.0)
        value = tl.load(words + memory_2, mask=shown[:, None], other=0.0)
        highest, norm, total = _look(asked, key, value, shown[None, :], highest, norm, total, scale)
        first += BLOCK
    found = total / norm[:, None]
    at = context + ((sentence * FAN + beams[:, None]) * HEADS + head) * WIDTH + across[None, :]
    tl.store(at, found.to(context.dtype.element_ty), mask=there)
