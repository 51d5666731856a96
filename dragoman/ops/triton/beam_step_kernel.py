"""Triton kernel of a beam search step: one program per sentence, from candidates to new beams.

With PyTorch's operations (`decoding/beam_step.py`) a step is a hundred launches on data that fits
into a few registers. The caller validates shapes and dtypes. Log-probabilities are summed in
float64, as there, and every choice is the same.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_CANDIDATE = tl.constexpr(2**62)  # sorts after every candidate
SLOTS_PER_BLOCK = 128  # of the history bias


class ActiveBeamBuffers(NamedTuple):
    """The outputs of a step for N active sentences with K beams each."""

    sentences: Tensor  # (N,), not changed
    tokens: Tensor  # (N, K)
    log_prob_sums: Tensor  # (N, K)
    alive: Tensor  # (N,)
    history_bias: Tensor  # (N, K, slots), contiguous rows


class BeamStateBuffers(NamedTuple):
    """The tensors of `BeamState` that a step reads and writes, for all sentences."""

    step: Tensor
    all_finite: Tensor
    limits: Tensor
    active_beams: Tensor
    finished: Tensor
    truncated: Tensor
    truncated_at: Tensor
    parents: Tensor
    tokens: Tensor
    log_probs: Tensor


def advance_beams(
    log_probs: Tensor,
    ids: Tensor,
    active: ActiveBeamBuffers,
    state: BeamStateBuffers,
    length_divisors: Tensor,
    *,
    eos: int,
    nbest: int,
) -> None:
    """Advance the beams with candidates (N * K, C), the best of each beam in descending order.

    `length_divisors` are those of the length penalty, by length. The step counter is not changed.
    """
    count, size = active.tokens.shape
    candidates = ids.size(1)
    with torch.cuda.device_of(log_probs):
        _beam_step_kernel[(count,)](
            log_probs,
            ids,
            *active[:3],
            active.alive.view(torch.uint8),
            active.history_bias,
            state.step,
            state.all_finite.view(torch.uint8),
            *state[2:],
            length_divisors,
            state.limits.numel(),
            active.history_bias.stride(0),
            active.history_bias.stride(1),
            EOS_ID=eos,
            BEAM_SIZE=size,
            TILE=_next_power_of_two(size),
            CANDIDATES=candidates,
            CANDIDATES_TILE=_next_power_of_two(candidates),
            NBEST=nbest,
            SLOTS=SLOTS_PER_BLOCK,
            num_warps=1,
        )


def _next_power_of_two(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


@triton.jit(do_not_specialize=["rows"])
def _beam_step_kernel(
    log_probs: tl.tensor,
    ids: tl.tensor,
    sentences: tl.tensor,
    tokens: tl.tensor,
    log_prob_sums: tl.tensor,
    alive: tl.tensor,
    history_bias: tl.tensor,
    step: tl.tensor,
    all_finite: tl.tensor,
    limits: tl.tensor,
    active_beams: tl.tensor,
    finished: tl.tensor,
    truncated: tl.tensor,
    truncated_at: tl.tensor,
    past_parents: tl.tensor,
    past_tokens: tl.tensor,
    past_log_probs: tl.tensor,
    length_divisors: tl.tensor,
    rows: tl.tensor,
    bias_n: tl.tensor,
    bias_k: tl.tensor,
    EOS_ID: tl.constexpr,
    BEAM_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CANDIDATES_TILE: tl.constexpr,
    NBEST: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Advance one sentence; a finished one chooses too, but changes no state."""
    row = tl.program_id(0).to(tl.int64)
    sentence, step_index, is_active = (
        tl.load(sentences + row),
        tl.load(step),
        tl.load(alive + row) != 0,
    )
    beams = tl.arange(0, TILE)
    in_beam = beams < BEAM_SIZE
    previous_sums = tl.load(
        log_prob_sums + row * BEAM_SIZE + beams, mask=in_beam, other=float("-inf")
    )
    parents, chosen_tokens, candidate_sums, token_log_probs = _select_candidates(
        log_probs,
        ids,
        all_finite,
        row,
        previous_sums,
        is_active,
        BEAM_SIZE,
        TILE,
        CANDIDATES,
        CANDIDATES_TILE,
    )
    num_open, limit = tl.load(active_beams + sentence), tl.load(limits + sentence)
    valid = (
        in_beam
        & (beams < num_open)
        & (candidate_sums > float("-inf"))
        & (candidate_sums < float("inf"))
    )
    ended = valid & (chosen_tokens == EOS_ID)
    survives = valid & (chosen_tokens != EOS_ID) & (limit > step_index)
    any_survives = tl.max(survives.to(tl.int32), 0) > 0
    # Hypotheses that end with EOS.
    done = ended & is_active
    slots = tl.cumsum(done.to(tl.int64), 0) + (BEAM_SIZE - 1 - num_open)
    scores = candidate_sums / tl.load(length_divisors + step_index + 1)
    finished_scores = tl.load(
        finished + (sentence * 2 * BEAM_SIZE + beams) * 4, mask=in_beam, other=float("-inf")
    )
    entry = finished + (sentence * 2 * BEAM_SIZE + slots) * 4
    tl.store(entry, scores, mask=done)
    tl.store(entry + 1, tl.zeros((TILE,), tl.float64) + step_index.to(tl.float64), mask=done)
    tl.store(entry + 2, parents.to(tl.float64), mask=done)
    tl.store(entry + 3, token_log_probs, mask=done)
    tl.store(active_beams + sentence, num_open - tl.sum(done.to(tl.int64), 0), mask=is_active)
    # Hypotheses at the length limit.
    is_stuck = is_active & (any_survives == 0)
    has_ended = tl.max((ended[None, :] & (parents[None, :] == beams[:, None])).to(tl.int32), 1) > 0
    is_unfinished = (
        in_beam
        & (previous_sums > float("-inf"))
        & (previous_sums < float("inf"))
        & (has_ended == 0)
        & is_stuck
    )
    tl.store(
        truncated + sentence * BEAM_SIZE + beams,
        previous_sums / tl.load(length_divisors + step_index),
        mask=is_unfinished,
    )
    tl.store(truncated_at + sentence, step_index, mask=is_stuck)
    # Whether the n-best list is final.
    new = tl.max(
        tl.where(
            done[None, :] & (slots[None, :] == beams[:, None]), scores[None, :], float("-inf")
        ),
        1,
    )
    ranked = tl.maximum(finished_scores, new)
    to_beat = tl.max(ranked, 0)
    for _ in tl.static_range(NBEST - 1):
        first = tl.min(tl.where(ranked == to_beat, beams, TILE), 0)
        ranked = tl.where(beams == first, float("-inf"), ranked)
        to_beat = tl.max(ranked, 0)
    active = tl.where(survives, candidate_sums, float("-inf"))
    decided = tl.max(active, 0) / tl.load(length_divisors + limit + 1) <= to_beat
    tl.store(alive + row, (is_active & any_survives & (decided == 0)).to(tl.uint8))
    tl.store(tokens + row * BEAM_SIZE + beams, chosen_tokens, mask=in_beam)
    tl.store(log_prob_sums + row * BEAM_SIZE + beams, active, mask=in_beam)
    at = (step_index * rows + sentence) * BEAM_SIZE + beams
    tl.store(past_parents + at, parents, mask=in_beam & is_active)
    tl.store(past_tokens + at, chosen_tokens, mask=in_beam & is_active)
    tl.store(past_log_probs + at, token_log_probs, mask=in_beam & is_active)
    # Each beam takes over the history of its parent.
    base = history_bias + row * bias_n + tl.arange(0, SLOTS)[None, :]
    filled = (step_index + 1) * BEAM_SIZE
    begin = 0
    while begin < filled:
        inside = in_beam[:, None] & (begin + tl.arange(0, SLOTS) < filled)[None, :]
        past = tl.load(base + begin + parents[:, None] * bias_k, mask=inside, other=0.0)
        tl.debug_barrier()  # all reads before any write
        tl.store(base + begin + beams[:, None] * bias_k, past, mask=inside)
        begin += SLOTS


@triton.jit
def _select_candidates(
    log_probs: tl.tensor,
    ids: tl.tensor,
    all_finite: tl.tensor,
    row: tl.tensor,
    previous_sums: tl.tensor,
    is_active: tl.tensor,
    BEAM_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CANDIDATES_TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Choose the best candidates; ties go to the lower token, then to the better parent."""
    beams, ranks = tl.arange(0, TILE), tl.arange(0, CANDIDATES_TILE)
    remaining = (beams < BEAM_SIZE)[:, None] & (ranks < CANDIDATES)[None, :]
    at = (row * BEAM_SIZE + beams)[:, None] * CANDIDATES + ranks[None, :]
    token_log_probs = tl.load(log_probs + at, mask=remaining, other=float("-inf"))
    has_nan = tl.max(tl.max((token_log_probs != token_log_probs).to(tl.int32), 1), 0) > 0
    tl.store(all_finite, (has_nan == 0).to(tl.uint8), mask=has_nan & is_active)
    order = tl.load(ids + at, mask=remaining, other=0) * BEAM_SIZE + beams[:, None]  # unique
    token_log_probs = token_log_probs.to(tl.float64)
    candidate_sums = previous_sums[:, None] + token_log_probs
    parents, chosen_tokens = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
    best_sums = tl.full((TILE,), float("-inf"), tl.float64)
    best_log_probs = tl.zeros((TILE,), tl.float64)
    for rank in tl.static_range(BEAM_SIZE):
        best = tl.max(tl.max(tl.where(remaining, candidate_sums, float("-inf")), 1), 0)
        first = tl.min(
            tl.min(tl.where(remaining & (candidate_sums == best), order, NO_CANDIDATE), 1), 0
        )
        hit = remaining & (order == first)
        first = tl.where(first == NO_CANDIDATE, 0, first)  # a valid token even if sums are NaN
        here = beams == rank
        parents = tl.where(here, first % BEAM_SIZE, parents)
        chosen_tokens = tl.where(here, first // BEAM_SIZE, chosen_tokens)
        best_sums = tl.where(here, best, best_sums)
        best_log_probs = tl.where(
            here, tl.sum(tl.sum(tl.where(hit, token_log_probs, 0.0), 1), 0), best_log_probs
        )
        remaining = remaining & (hit == 0)
    return parents, chosen_tokens, best_sums, best_log_probs
