"""Beam search step on a GPU: logits to new beams by Triton kernels, or the PyTorch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman.decoding.beam_step import EXTRA_CANDIDATES, ActiveBeams, BeamState
from dragoman.inference.cuda.cuda_graph_buffers import StaticBuffers
from dragoman.ops.topk import ForbiddenTokens, blocked_topk, mask_forbidden_tokens, topk_log_probs
from dragoman.ops.verified_kernel_fallback import GuardedKernel
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

BEAM_STEP_KERNEL = GuardedKernel("beam search steps")
MAX_KERNEL_BEAMS = 8  # one warp holds all candidates of a sentence, in an unrolled loop over beams


class BeamStepper:
    """Advances the beams in the static buffers and the beam state by one step."""

    def __init__(self, buffers: StaticBuffers, device: torch.device) -> None:
        self._buffers = buffers
        # Tokens before EOS is allowed.
        self.min_length = torch.zeros((), dtype=torch.long, device=device)
        # Beam size and n-best for which the kernel was compared with the reference once.
        self._verified: set[tuple[int, int]] = set()

    def advance(
        self, beam_state: BeamState, count: int, logits: Tensor, bias: Tensor | None
    ) -> None:
        """Advance the first `count` sentences by logits (N * K, V) plus a bias (V,)."""
        forbidden = ForbiddenTokens((PAD, BOS, UNK), EOS, beam_state.step, self.min_length)
        ranked = topk_log_probs(logits, min(beam_state.size, logits.size(1)), forbidden, bias=bias)
        if ranked is None:
            logits = logits if bias is None else logits.add_(bias)
            scores = mask_forbidden_tokens(logits.log_softmax(dim=-1), forbidden)
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
        """Advance by the reference, `BeamState.advance`."""
        beams = self._buffers.beams(count)
        new, parents = beam_state.advance(beams, log_probs, ids)
        self._buffers.reorder(count, parents)
        for buffer, made in zip(beams, new, strict=True):
            if buffer is not made:
                buffer.copy_(made)

    def _step_fused(
        self, beam_state: BeamState, count: int, log_probs: Tensor, ids: Tensor
    ) -> bool:
        """Advance by the Triton kernel; return False if it cannot run."""
        length_divisors = beam_state.length_divisors
        if beam_state.size > MAX_KERNEL_BEAMS or not BEAM_STEP_KERNEL.can_run(log_probs):
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
        for buffer, was in zip(changed, before, strict=True):
            buffer.copy_(was)
        self._step_reference(beam_state, count, log_probs, ids)
        if not _is_same_state(found, beams, history_bias):
            BEAM_STEP_KERNEL.disable(ArithmeticError("its result differs from the reference"))
        self._verified.add(variant)
        return True


def _state_tensors(beam_state: BeamState) -> tuple[Tensor, ...]:
    """Return the tensors of a beam state that a step reads and writes."""
    return (
        beam_state.step,
        beam_state.all_finite,
        beam_state.limits,
        beam_state.active_beams,
        beam_state.finished,
        beam_state.truncated,
        beam_state.truncated_at,
        beam_state.parents,
        beam_state.tokens,
        beam_state.log_probs,
    )


def _is_same_state(found: Sequence[Tensor], beams: ActiveBeams, history_bias: Tensor) -> bool:
    """Whether two results agree for the sentences that are alive."""
    sentences, tokens, log_prob_sums, alive, flat_history_bias = found
    alive_rows = beams.alive.unsqueeze(1)
    return bool(
        torch.equal(sentences, beams.sentences)
        and torch.equal(alive, beams.alive)
        and torch.equal(
            tokens.masked_fill(~alive_rows, 0), beams.tokens.masked_fill(~alive_rows, 0)
        )
        and torch.equal(
            log_prob_sums.masked_fill(~alive_rows, 0.0),
            beams.log_prob_sums.masked_fill(~alive_rows, 0.0),
        )
        and torch.equal(
            flat_history_bias.masked_fill(~alive_rows.unsqueeze(2), 0.0),
            history_bias.masked_fill(~alive_rows.unsqueeze(2), 0.0),
        )
    )
