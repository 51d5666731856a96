"""The Triton kernel behind `ranking.py`: one program reads a row of logits once, and what may be among its best a second time.

A row is cut into blocks of 128 pieces. The first pass sums and keeps the largest of each block; the best pieces are in as many blocks,
those with the best largest. A number and its place make one whole number, the number above and the place, turned round, below: the
greatest of those is the first of equal ones. Nothing here is checked: the caller sees to shapes and types.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)  # a GPU has powers of two
NOTHING = tl.constexpr(-(2**63))  # below every number with its place
PLACES = tl.constexpr(2**32 - 1)
PIECES_A_BLOCK = 128  # four for each thread of a warp
MOST_BLOCKS = 16  # at a time: seven programs fit beside each other, and some read while others choose


def rank(
    logits: Tensor, bias: Tensor | None, count: int, never: Sequence[int], end: int, step: Tensor, at_least: Tensor
) -> tuple[Tensor, Tensor]:
    """Give log-probabilities and ids (n, count) of the best pieces of logits (n, V); an `end` only once `at_least` steps were taken."""
    rows, pieces = logits.shape
    log_probs = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, count, dtype=torch.long, device=logits.device)
    blocks = min(MOST_BLOCKS, _power(-(-pieces // PIECES_A_BLOCK)))
    turns = -(-pieces // (blocks * PIECES_A_BLOCK))
    with torch.cuda.device_of(logits):
        _rank[(rows,)](
            logits, logits if bias is None else bias, log_probs, ids, step, at_least, logits.stride(0),
            BIASED=bias is not None, NEVER=sum(1 << piece for piece in set(never)), END=end, COUNT=count, WIDE=_power(count),
            PIECES=pieces, BLOCKS=blocks, TURNS=turns, ROUNDS=_power(turns), WIDTH=PIECES_A_BLOCK,
            num_warps=max(1, blocks // 4), num_stages=1,
        )  # fmt: skip
    return log_probs, ids


def _power(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()


@triton.jit
def _placed(x: tl.tensor, places: tl.tensor) -> tl.tensor:
    """Make whole numbers (int64) that are ordered as numbers are, and where those are equal as their places, backwards."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # a nought has no sign
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (PLACES - places.to(tl.int64))


@triton.jit
def _place(key: tl.tensor) -> tl.tensor:
    """Read the place."""
    return PLACES - (key & PLACES)


@triton.jit
def _number(key: tl.tensor) -> tl.tensor:
    """Read the number."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _forbidden(places: tl.tensor, held: tl.tensor, NEVER: tl.constexpr, END: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Say which pieces may not come: those whose bit is set, and the end while it is held back."""
    bit = (NEVER >> tl.minimum(places, 31)) & 1
    return ((places < 31) & (bit == 1)) | ((places == END) & held)


@triton.jit
def _scores(
    start: tl.tensor, bias: tl.tensor, places: tl.tensor, there: tl.tensor, BIASED: tl.constexpr,  # noqa: N803
) -> tl.tensor:  # fmt: skip
    """Read logits with their bias."""
    x = tl.load(start + places, mask=there, other=float("-inf")).to(tl.float32)
    if BIASED:
        x += tl.load(bias + places, mask=there, other=0.0)
    return x


@triton.jit
def _rank(
    logits: tl.tensor, bias: tl.tensor, log_probs: tl.tensor, ids: tl.tensor, step: tl.tensor, at_least: tl.tensor, stride: tl.tensor,
    BIASED: tl.constexpr, NEVER: tl.constexpr, END: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
    PIECES: tl.constexpr, BLOCKS: tl.constexpr, TURNS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Do one row."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    held = tl.load(step) < tl.load(at_least)
    within, rounds = tl.arange(0, WIDTH), tl.arange(0, ROUNDS)
    highest = tl.full((BLOCKS,), -1e38, tl.float32)  # not infinite: what is not there must not make it no number
    norms = tl.zeros((BLOCKS, WIDTH), tl.float32)
    tops = tl.full((BLOCKS, ROUNDS), float("-inf"), tl.float32)
    for turn in range(TURNS):
        places = (turn * BLOCKS + tl.arange(0, BLOCKS))[:, None] * WIDTH + within[None, :]
        x = _scores(start, bias, places, places < PIECES, BIASED)
        top = tl.max(x, 1)
        higher = tl.maximum(highest, top)
        norms = norms * tl.exp2((highest - higher) * LOG2_E)[:, None] + tl.exp2(x * LOG2_E - (higher * LOG2_E)[:, None])
        highest = higher
        tops = tl.where((rounds == turn)[None, :], top[:, None], tops)
    most = tl.max(highest, 0)
    norm = tl.sum(tl.sum(norms, 1) * tl.exp2((highest - most) * LOG2_E), 0)
    level = most + tl.log2(norm) / LOG2_E
    blocks = rounds[None, :] * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    # What is forbidden stands in the first block: it counts in the sum, and is not among the largest.
    x = tl.where(_forbidden(within, held, NEVER, END), float("-inf"), _scores(start, bias, within, within < PIECES, BIASED))
    tops = tl.where(blocks == 0, tl.max(x, 0), tops)
    keys = _placed(tops - level, blocks)
    wide = tl.arange(0, WIDE)
    chosen = tl.zeros((WIDE,), tl.int64)
    for turn in tl.static_range(COUNT):
        best = tl.max(tl.max(keys, 1), 0)
        chosen = tl.where(wide == turn, _place(best), chosen)
        keys = tl.where(keys == best, NOTHING, keys)
    places = chosen[:, None] * WIDTH + within[None, :]
    there = (wide < COUNT)[:, None] & (places < PIECES)
    x = _scores(start, bias, places, there, BIASED)
    x = tl.where(_forbidden(places, held, NEVER, END), float("-inf"), x - level)
    pieces = tl.where(there, _placed(x, places), NOTHING)
    found = tl.full((WIDE,), NOTHING, tl.int64)
    for turn in tl.static_range(COUNT):
        best = tl.max(tl.max(pieces, 1), 0)
        found = tl.where(wide == turn, best, found)
        pieces = tl.where(pieces == best, NOTHING, pieces)
    at = row * COUNT + wide
    # What is no number makes the sum none, and with it all.
    tl.store(log_probs + at, tl.where(level == level, _number(found), level), mask=wide < COUNT)
    tl.store(ids + at, _place(found), mask=wide < COUNT)
