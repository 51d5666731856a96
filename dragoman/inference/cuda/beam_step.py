"""One step of a beam search's rule, from logits to new beams: by two launches where Triton's kernels run, else by `board.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman.decoding.beam_state import EXTRA_CANDIDATES, ActiveBeams, BeamState
from dragoman.inference.cuda.static_buffers import StaticBuffers
from dragoman.ops.guarded_kernel import GuardedKernel
from dragoman.ops.topk import TokenConstraints, blocked_topk, mask_forbidden_tokens, topk_log_probs
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

BEAM_STEP_KERNEL = GuardedKernel("beam search steps")
MAX_KERNEL_BEAMS = 8  # beams of a sentence: one warp holds all their candidates, and the compiler writes out a round for each


class BeamStepper:
    """Chooses what comes next for the beams in a room, and writes it there and on a board."""

    def __init__(self, buffers: StaticBuffers, device: torch.device) -> None:
        self._buffers = buffers
        self.min_length = torch.zeros(
            (), dtype=torch.long, device=device
        )  # tokens before an end is allowed
        self._verified: set[tuple[int, int]] = (
            set()
        )  # beams and n best that both ways were taken for once

    def advance(
        self, beam_state: BeamState, count: int, logits: Tensor, bias: Tensor | None
    ) -> None:
        """Take one step of the first `count` sentences by logits (N * K, V), to which a bias (V,) is still to be added."""
        constraints = TokenConstraints((PAD, BOS, UNK), EOS, beam_state.step, self.min_length)
        ranked = topk_log_probs(
            logits, min(beam_state.size, logits.size(1)), constraints, bias=bias
        )
        if ranked is None:
            logits = logits if bias is None else logits.add_(bias)
            scores = mask_forbidden_tokens(logits.log_softmax(dim=-1), constraints)
            log_probs, ids = blocked_topk(
                scores, min(beam_state.size + EXTRA_CANDIDATES, logits.size(1))
            )
        else:
            log_probs, ids = ranked
        if not self._step_fused(beam_state, count, log_probs, ids):
            self._step_reference(beam_state, count, log_probs, ids)

    def _step_reference(
        self, beam_state: BeamState, count: int, log_probs: Tensor, ids: Tensor
    ) -> None:
        """Go by the rule as it is written down."""
        beams = self._buffers.beams(count)
        new, parents = beam_state.apply_candidates(beams, log_probs, ids)
        self._buffers.reorder(count, parents)
        for place, made in zip(beams, new, strict=True):
            if place is not made:
                place.copy_(made)

    def _step_fused(
        self, beam_state: BeamState, count: int, log_probs: Tensor, ids: Tensor
    ) -> bool:
        """Go by the kernel, and say whether that could be done."""
        length_divisors = beam_state.length_divisors
        if (
            length_divisors is None
            or beam_state.size > MAX_KERNEL_BEAMS
            or not BEAM_STEP_KERNEL.can_run(log_probs)
        ):
            return False
        beams, history_bias = self._buffers.beams(count), self._buffers.flat_history_bias(count)

        def action() -> None:
            from dragoman.ops.triton import beam_step_kernel

            living = beam_step_kernel.ActiveBeamBuffers(*beams, history_bias)
            kept = beam_step_kernel.BeamStateBuffers(*_state_tensors(beam_state))
            beam_step_kernel.advance_beams(
                log_probs, ids, living, kept, length_divisors, eos=EOS, nbest=beam_state.nbest
            )
            beam_state.step.add_(1)

        variant = (beam_state.size, beam_state.nbest)
        if variant in self._verified or (
            log_probs.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            return BEAM_STEP_KERNEL.try_run(action)
        changed = (*beams, history_bias, *_state_tensors(beam_state))
        before = [each.clone() for each in changed]
        if not BEAM_STEP_KERNEL.try_run(action):
            return False
        found = [each.clone() for each in (*beams, history_bias)]
        for place, was in zip(changed, before, strict=True):
            place.copy_(was)
        self._step_reference(beam_state, count, log_probs, ids)
        if not _is_same_state(found, beams, history_bias):
            BEAM_STEP_KERNEL.disable(ArithmeticError("its result differs from the reference"))
        self._verified.add(variant)
        return True


def _state_tensors(beam_state: BeamState) -> tuple[Tensor, ...]:
    """Name what a step reads and writes of a board."""
    return (
        beam_state.step, beam_state.all_finite, beam_state.limits, beam_state.open_beams, beam_state.finished, beam_state.truncated, beam_state.truncated_at,
        beam_state.parents, beam_state.tokens, beam_state.log_probs,
    )  # fmt: skip


def _is_same_state(found: Sequence[Tensor], beams: ActiveBeams, history_bias: Tensor) -> bool:
    """Say whether what goes on is the same."""
    sentences, tokens, log_prob_sums, alive, flat_history_bias = found
    going = beams.alive.unsqueeze(1)
    return bool(
        torch.equal(sentences, beams.sentences)
        and torch.equal(alive, beams.alive)
        and torch.equal(tokens.masked_fill(~going, 0), beams.tokens.masked_fill(~going, 0))
        and torch.equal(
            log_prob_sums.masked_fill(~going, 0.0), beams.log_prob_sums.masked_fill(~going, 0.0)
        )
        and torch.equal(
            flat_history_bias.masked_fill(~going.unsqueeze(2), 0.0),
            history_bias.masked_fill(~going.unsqueeze(2), 0.0),
        )
    )
