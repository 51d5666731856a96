"""The state of a frozen decoder: keys and values that are written once and never moved while beams change places.

A sentence's beams share one cache. Each step adds a slot for each beam, and `seen` says which slots are a beam's own past: to
reorder beams is to reorder the rows of that small table, where copying what they remember would cost as much as the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

# Slots that a cache has at first, and how many more when they are full. Gaps between sentences cost as much reading as slots that
# are filled, so room is made often and little at a time; and below 16 torch's softmax goes number by number.
FIRST, MORE = 16, 8


@dataclass(frozen=True, slots=True)
class Unfolding:
    """N sentences with F beams each, before their next piece. Stepping writes into its caches, so the old one is spent."""

    own: Sequence[Tensor]  # keys and values of each layer, with room at the end: (2, N * H, slots, Dh)
    memory: Sequence[Tensor]  # keys and values of each layer: (2, N * H, S, Dh)
    heads: int  # H
    hidden: Tensor | None  # (N * H, 1, S): minus infinity where a source is padded, else nought
    seen: Tensor | None = None  # (N, F, slots): nought for a beam's own past, else minus infinity; None where all is
    bias: Tensor | None = None  # the same for the slots that are read, at least FIRST of them: broadcastable to (N * H, F, slots)
    steps: int = 0
    slots: int = 0  # that are filled

    @property
    def sentences(self) -> int:
        """Count the sentences, N."""
        return self.memory[0].size(1) // self.heads

    @property
    def fan(self) -> int:
        """Count the beams of each sentence, F."""
        return 1 if self.seen is None else self.seen.size(1)

    @property
    def device(self) -> torch.device:
        """Say where the tensors are."""
        return self.memory[0].device

    def select(self, rows: Tensor) -> Unfolding:
        """Take rows (M,) in any order, any number of times: each becomes a sentence of its own."""
        fan = self.fan
        taken = self._take(rows if fan == 1 else rows // fan)
        seen = self.seen
        return replace(taken, seen=None if seen is None else seen.flatten(0, 1).index_select(0, rows).unsqueeze(1))

    def reorder(self, rows: Tensor) -> Unfolding:
        """Take rows (M,) that each go on with a row of the same sentence, M / N for each sentence in turn."""
        seen = self.seen
        if seen is None:
            seen = self.memory[0].new_zeros(self.sentences, 1, self.slots)
        return replace(self, seen=seen.flatten(0, 1).index_select(0, rows).view(self.sentences, -1, self.slots))

    def keep(self, sentences: Tensor) -> Unfolding:
        """Keep all beams of the sentences (M,) and drop the others."""
        seen = self.seen
        return replace(self._take(sentences), seen=None if seen is None else seen.index_select(0, sentences))

    def advance(self) -> Unfolding:
        """Make room for the next step's slots and count them as filled; each beam sees its own new one."""
        fan, slots = self.fan, self.slots + self.fan
        own = self.own
        if slots > own[0].size(2):
            own = [_larger(each, self.slots, max(FIRST, slots + MORE * fan)) for each in own]
        seen = self.seen
        if seen is not None:
            new = torch.full((fan, fan), -torch.inf, device=seen.device, dtype=seen.dtype).fill_diagonal_(0.0)
            seen = torch.cat([seen, new.expand(seen.size(0), fan, fan)], dim=2)
        return replace(self, own=own, seen=seen, bias=_bias(seen, slots, self.heads, own[0]), steps=self.steps + 1, slots=slots)

    def _take(self, sentences: Tensor) -> Unfolding:
        """Take sentences with all that belongs to them but `seen`."""
        rows = (sentences.unsqueeze(1) * self.heads + torch.arange(self.heads, device=sentences.device)).flatten()
        return replace(
            self,
            own=[each.index_select(1, rows) for each in self.own],
            memory=[each.index_select(1, rows) for each in self.memory],
            hidden=None if self.hidden is None else self.hidden.index_select(0, rows),
        )


def _bias(seen: Tensor | None, slots: int, heads: int, cache: Tensor) -> Tensor | None:
    """Give what is added to the scores of the slots that are read, some of which may not be filled yet."""
    if seen is None:
        return None if slots >= FIRST else cache.new_zeros(1, 1, FIRST).index_fill_(2, torch.arange(slots, FIRST), -torch.inf)
    if slots < FIRST:
        seen = F.pad(seen, (0, FIRST - slots), value=-torch.inf)
    rows, fan, read = seen.shape
    return seen.unsqueeze(1).expand(rows, heads, fan, read).reshape(-1, fan, read)


def _larger(cache: Tensor, filled: int, size: int) -> Tensor:
    """Copy what is filled into a cache with more slots."""
    grown = cache.new_zeros(*cache.shape[:2], size, cache.size(3))
    grown[:, :, :filled] = cache[:, :, :filled]
    return grown
