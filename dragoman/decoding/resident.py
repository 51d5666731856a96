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

from dragoman.decoding.board import Beams, Board
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty
from dragoman.decoding.stepping import Rows, Stepper, normaliser, not_finite, restrict

ASKED_EVERY = 4  # steps
FULL_ENOUGH = 0.8  # of the sentences that go on: above that, dropping the others costs more than it saves


class ResidentBeam:
    """One search."""

    def __init__(self, rows: Rows, *, size: int, nbest: int, penalty: Penalty, device: torch.device) -> None:
        self.rows, self.longest = rows, int(rows.limits.max())
        self.board = Board(sentences=len(rows.limits), steps=self.longest + 1, size=size, nbest=nbest, penalty=penalty, device=device)
        self.taken = 0

    def run(self, model: Stepper, state: Any) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's hypotheses, best first."""
        count = len(self.rows.limits)
        beams = self.board.begin(self.rows.limits, fan=1)
        while beams.sentences.numel():
            logits, state = model.step(beams.tokens.flatten(), state)
            beams, rows = self._advance(beams, logits.float())
            state = state.reorder(rows)
            if self.taken % ASKED_EVERY == 0 or self.taken > self.longest:
                beams, state = self._drop_done(beams, state)
        return self.board.results(count, self.taken)

    def _advance(self, beams: Beams, logits: Tensor) -> tuple[Beams, Tensor]:
        """Take one step; give the rows of the state that live on."""
        count, fan = beams.tokens.shape
        less = normaliser(logits)
        forced = np.full(count * fan, -1, dtype=np.int64)
        if any(self.rows.prefixes):
            forced = np.repeat(self.rows.forced(beams.sentences.cpu().numpy(), self.taken), fan)
        logits = restrict(logits, forced=forced, step=self.taken, at_least=self.rows.at_least)
        beams, parents = self.board.advance(beams, logits, less)
        self.taken += 1
        return beams, (torch.arange(count, device=parents.device).unsqueeze(1) * fan + parents).flatten()

    def _drop_done(self, beams: Beams, state: Any) -> tuple[Beams, Any]:
        """Ask which sentences go on, and drop the others where that pays; all of them once none goes on."""
        alive = beams.alive.nonzero().flatten()  # waits for the device
        if not self.board.sound:
            raise not_finite(self.taken - 1)
        if len(alive) < FULL_ENOUGH * len(beams.sentences):
            beams = beams.take(alive)
            state = state.keep(alive) if len(alive) else state
        return beams, state
