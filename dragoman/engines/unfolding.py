"""The state of a frozen decoder: keys and values that are written once and never moved while beams change places.

A sentence's beams share one cache. Each step adds a slot for each beam, and `seen` says which slots are a beam's own past: to
reorder beams is to reorder the rows of that small table, where copying what they remember would cost as much as the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

ROOM = 16  # slots for each beam at first; then half as many again as are there


class KeyValue(NamedTuple):
    """Keys and values of one attention."""

    key: Tensor  # (N, H, slots, Dh)
    value: Tensor  # (N, H, slots, Dh)

    def map(self, change: Callable[[Tensor], Tensor]) -> KeyValue:
        """Change both."""
        return KeyValue(change(self.key), change(self.value))


@dataclass(frozen=True, slots=True)
class Unfolding:
    """N sentences with F beams each, before their next piece. Stepping writes into its caches, so the old one is spent."""

    own: Sequence[KeyValue]  # of each layer, with room at the end
    memory: Sequence[KeyValue]  # of each layer
    hidden: Tensor | None  # (N, 1, 1, S): minus infinity where a source is padded, else nought
    seen: Tensor | None = None  # (N, F, slots): nought for a beam's own past, else minus infinity; None with one beam
    steps: int = 0
    slots: int = 0  # that are filled

    @property
    def sentences(self) -> int:
        """Count the sentences, N."""
        return self.memory[0].key.size(0)

    @property
    def fan(self) -> int:
        """Count the beams of each sentence, F."""
        return 1 if self.seen is None else self.seen.size(1)

    @property
    def device(self) -> torch.device:
        """Say where the tensors are."""
        return self.memory[0].key.device

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
            seen = self.memory[0].key.new_zeros(self.sentences, 1, self.slots)
        return replace(self, seen=seen.flatten(0, 1).index_select(0, rows).view(self.sentences, -1, self.slots))

    def keep(self, sentences: Tensor) -> Unfolding:
        """Keep all beams of the sentences (M,) and drop the others."""
        seen = self.seen
        return replace(self._take(sentences), seen=None if seen is None else seen.index_select(0, sentences))

    def advance(self) -> Unfolding:
        """Make room for the next step's slots and count them as filled; each beam sees its own new one."""
        fan, slots = self.fan, self.slots + self.fan
        own = self.own
        if slots > own[0].key.size(2):
            size = max(slots + slots // 2, ROOM * fan)
            own = [each.map(lambda cache: _larger(cache, self.slots, size)) for each in own]
        seen = self.seen
        if seen is not None:
            new = torch.full((fan, fan), -torch.inf, device=seen.device, dtype=seen.dtype).fill_diagonal_(0.0)
            seen = torch.cat([seen, new.expand(seen.size(0), fan, fan)], dim=2)
        return replace(self, own=own, seen=seen, steps=self.steps + 1, slots=slots)

    def _take(self, sentences: Tensor) -> Unfolding:
        """Take sentences with all that belongs to them but `seen`."""
        filled = self.slots

        def read(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, sentences)

        def with_room(cache: Tensor) -> Tensor:
            taken = cache.new_empty(sentences.size(0), *cache.shape[1:])
            torch.index_select(cache[:, :, :filled], 0, sentences, out=taken[:, :, :filled])
            return taken

        return replace(
            self,
            own=[each.map(with_room) for each in self.own],
            memory=[each.map(read) for each in self.memory],
            hidden=None if self.hidden is None else read(self.hidden),
        )


def _larger(cache: Tensor, filled: int, size: int) -> Tensor:
    """Copy what is filled into a cache with more slots."""
    grown = cache.new_empty(*cache.shape[:2], size, cache.size(3))
    grown[:, :, :filled] = cache[:, :, :filled]
    return grown
