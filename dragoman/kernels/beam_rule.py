"""The Triton kernel for one step of a beam search's rule: one program does a sentence, from its candidates to its new beams.

Written with PyTorch's operations (`decoding/board.py`) the rule is a hundred launches on numbers that fit into a few registers. Nothing
here is checked: the caller sees to shapes and types. Log-probabilities are summed in float64, as there, and every choice is the same.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NOBODY = tl.constexpr(2**62)  # after every candidate
SLOTS = 128  # of the table of what is seen, at a time


class Living(NamedTuple):
    """What a step changes of N sentences with K beams each."""

    sentences: Tensor  # (N,) stay
    tokens: Tensor  # (N, K)
    totals: Tensor  # (N, K)
    alive: Tensor  # (N,)
    seen: Tensor  # (N, K, slots): rows lie in one piece


class Kept(NamedTuple):
    """What a step reads and writes of all sentences, as `Board` has it."""

    step: Tensor
    sound: Tensor
    limits: Tensor
    places: Tensor
    finished: Tensor
    cut: Tensor
    cut_after: Tensor
    parents: Tensor
    tokens: Tensor
    log_probs: Tensor


def advance(log_probs: Tensor, ids: Tensor, living: Living, kept: Kept, divisors: Tensor, *, end: int, nbest: int) -> None:
    """Take a step by candidates (N * K, C), the best of each beam in falling order; the number of the step stays as it is.

    What a total is divided by to rank it stands in `divisors`, by length.
    """
    count, size = living.tokens.shape
    candidates = ids.size(1)
    with torch.cuda.device_of(log_probs):
        _advance[(count,)](
            log_probs, ids, *living[:3], living.alive.view(torch.uint8), living.seen,
            kept.step, kept.sound.view(torch.uint8), *kept[2:], divisors, kept.limits.numel(), living.seen.stride(0), living.seen.stride(1),
            END=end, SIZE=size, TILE=_power(size), CANDIDATES=candidates, WIDE=_power(candidates), NBEST=nbest, SLOTS=SLOTS, num_warps=1,
        )  # fmt: skip


def _power(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()


@triton.jit(do_not_specialize=["rows"])
def _advance(
    log_probs: tl.tensor, ids: tl.tensor, sentences: tl.tensor, tokens: tl.tensor, totals: tl.tensor, alive: tl.tensor, seen: tl.tensor,
    step: tl.tensor, sound: tl.tensor, limits: tl.tensor, places: tl.tensor, finished: tl.tensor, cut: tl.tensor, cut_after: tl.tensor,
    past_parents: tl.tensor, past_tokens: tl.tensor, past_log_probs: tl.tensor, divisors: tl.tensor,
    rows: tl.tensor, seen_n: tl.tensor, seen_k: tl.tensor,
    END: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
    NBEST: tl.constexpr, SLOTS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Do one sentence; one that is done chooses too, and leaves nothing of it on the board."""
    row = tl.program_id(0).to(tl.int64)
    sentence, now, going = tl.load(sentences + row), tl.load(step), tl.load(alive + row) != 0
    beams = tl.arange(0, TILE)
    among = beams < SIZE
    before = tl.load(totals + row * SIZE + beams, mask=among, other=float("-inf"))
    parents, words, sums, shares = _best(log_probs, ids, sound, row, before, going, SIZE, TILE, CANDIDATES, WIDE)
    free, limit = tl.load(places + sentence), tl.load(limits + sentence)
    valid = among & (beams < free) & (sums > float("-inf")) & (sums < float("inf"))
    ended = valid & (words == END)
    lives = valid & (words != END) & (limit > now)
    any_lives = tl.max(lives.to(tl.int32), 0) > 0
    # Those that reached their end.
    done = ended & going
    slots = tl.cumsum(done.to(tl.int64), 0) + (SIZE - 1 - free)
    scores = sums / tl.load(divisors + now + 1)
    had = tl.load(finished + (sentence * 2 * SIZE + beams) * 4, mask=among, other=float("-inf"))
    end = finished + (sentence * 2 * SIZE + slots) * 4
    tl.store(end, scores, mask=done)
    tl.store(end + 1, tl.zeros((TILE,), tl.float64) + now.to(tl.float64), mask=done)
    tl.store(end + 2, parents.to(tl.float64), mask=done)
    tl.store(end + 3, shares, mask=done)
    tl.store(places + sentence, free - tl.sum(done.to(tl.int64), 0), mask=going)
    # Those that can go no further.
    stuck = going & (any_lives == 0)
    gone = tl.max((ended[None, :] & (parents[None, :] == beams[:, None])).to(tl.int32), 1) > 0
    there = among & (before > float("-inf")) & (before < float("inf")) & (gone == 0) & stuck
    tl.store(cut + sentence * SIZE + beams, before / tl.load(divisors + now), mask=there)
    tl.store(cut_after + sentence, now, mask=stuck)
    # Whether the n best are settled.
    new = tl.max(tl.where(done[None, :] & (slots[None, :] == beams[:, None]), scores[None, :], float("-inf")), 1)
    ranked = tl.maximum(had, new)
    to_beat = tl.max(ranked, 0)
    for _ in tl.static_range(NBEST - 1):
        first = tl.min(tl.where(ranked == to_beat, beams, TILE), 0)
        ranked = tl.where(beams == first, float("-inf"), ranked)
        to_beat = tl.max(ranked, 0)
    living = tl.where(lives, sums, float("-inf"))
    decided = tl.max(living, 0) / tl.load(divisors + limit + 1) <= to_beat
    tl.store(alive + row, (going & any_lives & (decided == 0)).to(tl.uint8))
    tl.store(tokens + row * SIZE + beams, words, mask=among)
    tl.store(totals + row * SIZE + beams, living, mask=among)
    at = (now * rows + sentence) * SIZE + beams
    tl.store(past_parents + at, parents, mask=among & going)
    tl.store(past_tokens + at, words, mask=among & going)
    tl.store(past_log_probs + at, shares, mask=among & going)
    # Each beam goes on with the past of its parent.
    base = seen + row * seen_n + tl.arange(0, SLOTS)[None, :]
    filled = (now + 1) * SIZE
    begin = 0
    while begin < filled:
        inside = among[:, None] & (begin + tl.arange(0, SLOTS) < filled)[None, :]
        past = tl.load(base + begin + parents[:, None] * seen_k, mask=inside, other=0.0)
        tl.debug_barrier()  # all have read before one writes
        tl.store(base + begin + beams[:, None] * seen_k, past, mask=inside)
        begin += SLOTS


@triton.jit
def _best(
    log_probs: tl.tensor, ids: tl.tensor, sound: tl.tensor, row: tl.tensor, before: tl.tensor, going: tl.tensor,
    SIZE: tl.constexpr, TILE: tl.constexpr, CANDIDATES: tl.constexpr, WIDE: tl.constexpr,  # noqa: N803
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Choose as many candidates as a beam holds, of equal ones the lower token, then the better parent: parents, tokens, totals, shares."""
    beams, ranks = tl.arange(0, TILE), tl.arange(0, WIDE)
    left = (beams < SIZE)[:, None] & (ranks < CANDIDATES)[None, :]
    at = (row * SIZE + beams)[:, None] * CANDIDATES + ranks[None, :]
    shares = tl.load(log_probs + at, mask=left, other=float("-inf"))
    unsound = tl.max(tl.max((shares != shares).to(tl.int32), 1), 0) > 0
    tl.store(sound, (unsound == 0).to(tl.uint8), mask=unsound & going)
    order = tl.load(ids + at, mask=left, other=0) * SIZE + beams[:, None]  # no two alike
    shares = shares.to(tl.float64)
    sums = before[:, None] + shares
    parents, words = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    chosen_sums = tl.full((TILE,), float("-inf"), tl.float64)
    chosen_shares = tl.zeros((TILE,), tl.float64)
    for turn in tl.static_range(SIZE):
        best = tl.max(tl.max(tl.where(left, sums, float("-inf")), 1), 0)
        first = tl.min(tl.min(tl.where(left & (sums == best), order, NOBODY), 1), 0)
        hit = left & (order == first)
        first = tl.where(first == NOBODY, 0, first)  # where sums are no numbers: a token all the same
        here = beams == turn
        parents = tl.where(here, first % SIZE, parents)
        words = tl.where(here, first // SIZE, words)
        chosen_sums = tl.where(here, best, chosen_sums)
        chosen_shares = tl.where(here, tl.sum(tl.sum(tl.where(hit, shares, 0.0), 1), 0), chosen_shares)
        left = left & (hit == 0)
    return parents, words, chosen_sums, chosen_shares
