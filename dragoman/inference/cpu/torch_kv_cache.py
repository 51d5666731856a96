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
INITIAL_SLOTS, GROWTH_SLOTS = 16, 8


@dataclass(frozen=True, slots=True)
class TorchKVCache:
    """N sentences with F beams each, before their next piece. Stepping writes into its caches, so the old one is spent."""

    kv_cache: Sequence[
        Tensor
    ]  # keys and values of each layer, with room at the end: (2, N * H, slots, Dh)
    memory: Sequence[Tensor]  # keys and values of each layer: (2, N * H, S, Dh)
    heads: int  # H
    padding_bias: (
        Tensor | None
    )  # (N * H, 1, S): minus infinity where a source is padded, else nought
    history_bias: Tensor | None = (
        None  # (N, F, slots): nought for a beam's own past, else minus infinity; None where all is
    )
    bias: Tensor | None = (
        None  # the same for the slots that are read, at least FIRST of them: broadcastable to (N * H, F, slots)
    )
    steps: int = 0
    slots: int = 0  # that are filled

    @property
    def sentences(self) -> int:
        """Count the sentences, N."""
        return self.memory[0].size(1) // self.heads

    @property
    def beams_per_sentence(self) -> int:
        """Count the beams of each sentence, F."""
        return 1 if self.history_bias is None else self.history_bias.size(1)

    @property
    def device(self) -> torch.device:
        """Say where the tensors are."""
        return self.memory[0].device

    def select(self, rows: Tensor) -> TorchKVCache:
        """Take rows (M,) in any order, any number of times: each becomes a sentence of its own."""
        beams_per_sentence = self.beams_per_sentence
        taken = self._select_sentences(
            rows if beams_per_sentence == 1 else rows // beams_per_sentence
        )
        history_bias = self.history_bias
        return replace(
            taken,
            history_bias=None
            if history_bias is None
            else history_bias.flatten(0, 1).index_select(0, rows).unsqueeze(1),
        )

    def reorder(self, rows: Tensor) -> TorchKVCache:
        """Take rows (M,) that each go on with a row of the same sentence, M / N for each sentence in turn."""
        history_bias = self.history_bias
        if history_bias is None:
            history_bias = self.memory[0].new_zeros(self.sentences, 1, self.slots)
        return replace(
            self,
            history_bias=history_bias.flatten(0, 1)
            .index_select(0, rows)
            .view(self.sentences, -1, self.slots),
        )

    def keep(self, sentences: Tensor) -> TorchKVCache:
        """Keep all beams of the sentences (M,) and drop the others."""
        history_bias = self.history_bias
        return replace(
            self._select_sentences(sentences),
            history_bias=None if history_bias is None else history_bias.index_select(0, sentences),
        )

    def advance(self) -> TorchKVCache:
        """Make room for the next step's slots and count them as filled; each beam sees its own new one."""
        beams_per_sentence, slots = self.beams_per_sentence, self.slots + self.beams_per_sentence
        kv_cache = self.kv_cache
        if slots > kv_cache[0].size(2):
            kv_cache = [
                _grow_cache(
                    each, self.slots, max(INITIAL_SLOTS, slots + GROWTH_SLOTS * beams_per_sentence)
                )
                for each in kv_cache
            ]
        history_bias = self.history_bias
        if history_bias is not None:
            new = torch.full(
                (beams_per_sentence, beams_per_sentence),
                -torch.inf,
                device=history_bias.device,
                dtype=history_bias.dtype,
            ).fill_diagonal_(0.0)
            history_bias = torch.cat(
                [
                    history_bias,
                    new.expand(history_bias.size(0), beams_per_sentence, beams_per_sentence),
                ],
                dim=2,
            )
        return replace(
            self,
            kv_cache=kv_cache,
            history_bias=history_bias,
            bias=_score_bias(history_bias, slots, self.heads, kv_cache[0]),
            steps=self.steps + 1,
            slots=slots,
        )

    def _select_sentences(self, sentences: Tensor) -> TorchKVCache:
        """Take sentences with all that belongs to them but `seen`."""
        rows = (
            sentences.unsqueeze(1) * self.heads + torch.arange(self.heads, device=sentences.device)
        ).flatten()
        return replace(
            self,
            kv_cache=[each.index_select(1, rows) for each in self.kv_cache],
            memory=[each.index_select(1, rows) for each in self.memory],
            padding_bias=None
            if self.padding_bias is None
            else self.padding_bias.index_select(0, rows),
        )


def _score_bias(
    history_bias: Tensor | None, slots: int, heads: int, cache: Tensor
) -> Tensor | None:
    """Give what is added to the scores of the slots that are read, some of which may not be filled yet."""
    if history_bias is None:
        return (
            None
            if slots >= INITIAL_SLOTS
            else cache.new_zeros(1, 1, INITIAL_SLOTS).index_fill_(
                2, torch.arange(slots, INITIAL_SLOTS), -torch.inf
            )
        )
    if slots < INITIAL_SLOTS:
        history_bias = F.pad(history_bias, (0, INITIAL_SLOTS - slots), value=-torch.inf)
    rows, beams_per_sentence, read = history_bias.shape
    return (
        history_bias.unsqueeze(1)
        .expand(rows, heads, beams_per_sentence, read)
        .reshape(-1, beams_per_sentence, read)
    )


def _grow_cache(cache: Tensor, filled: int, size: int) -> Tensor:
    """Copy what is filled into a cache with more slots."""
    grown = cache.new_zeros(*cache.shape[:2], size, cache.size(3))
    grown[:, :, :filled] = cache[:, :, :filled]
    return grown
