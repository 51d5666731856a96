"""Beam search that stays on the device, for any model.

A GPU that has to wait for the host after every step does nothing for most of the time. Here the host only launches; it asks
how many sentences are left every few steps, drops those that are done, and reads all paths at the end. Rows of sentences that
are done in between are computed for nothing, which costs less than asking.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.beam_state import ActiveBeams, BeamState
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.decoding.search import (
    IncrementalDecoder,
    SearchConstraints,
    apply_constraints,
    log_sum_exp,
    non_finite_error,
)

SYNC_EVERY_STEPS = 4  # steps
COMPACT_BELOW = (
    0.8  # of the sentences that go on: above that, dropping the others costs more than it saves
)


class DeviceBeamSearch:
    """One search."""

    def __init__(
        self,
        rows: SearchConstraints,
        *,
        size: int,
        nbest: int,
        penalty: LengthPenalty,
        device: torch.device,
    ) -> None:
        self.rows, self.longest = rows, int(rows.limits.max())
        self.beam_state = BeamState(
            sentences=len(rows.limits),
            steps=self.longest + 1,
            size=size,
            nbest=nbest,
            penalty=penalty,
            device=device,
        )
        self.num_steps = 0

    def run(self, model: IncrementalDecoder, state: Any) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's hypotheses, best first."""
        count = len(self.rows.limits)
        beams = self.beam_state.reset(self.rows.limits, beams_per_sentence=1)
        while beams.sentences.numel():
            logits, state = model.step(beams.tokens.flatten(), state)
            beams, rows = self._advance(beams, logits.float())
            state = state.reorder(rows)
            if self.num_steps % SYNC_EVERY_STEPS == 0 or self.num_steps > self.longest:
                beams, state = self._compact(beams, state)
        return self.beam_state.results(count, self.num_steps)

    def _advance(self, beams: ActiveBeams, logits: Tensor) -> tuple[ActiveBeams, Tensor]:
        """Take one step; give the rows of the state that live on."""
        count, beams_per_sentence = beams.tokens.shape
        log_normalizer = log_sum_exp(logits)
        forced = np.full(count * beams_per_sentence, -1, dtype=np.int64)
        if any(self.rows.prefixes):
            forced = np.repeat(
                self.rows.forced(beams.sentences.cpu().numpy(), self.num_steps), beams_per_sentence
            )
        logits = apply_constraints(
            logits, forced=forced, step=self.num_steps, min_length=self.rows.min_length
        )
        beams, parents = self.beam_state.advance(beams, logits, log_normalizer)
        self.num_steps += 1
        return beams, (
            torch.arange(count, device=parents.device).unsqueeze(1) * beams_per_sentence + parents
        ).flatten()

    def _compact(self, beams: ActiveBeams, state: Any) -> tuple[ActiveBeams, Any]:
        """Ask which sentences go on, and drop the others where that pays; all of them once none goes on."""
        alive = beams.alive.nonzero().flatten()  # waits for the device
        if not self.beam_state.all_finite:
            raise non_finite_error(self.num_steps - 1)
        if len(alive) < COMPACT_BELOW * len(beams.sentences):
            beams = beams.take(alive)
            state = state.keep(alive) if len(alive) else state
        return beams, state
