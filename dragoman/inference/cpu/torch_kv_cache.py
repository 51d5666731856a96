"""KV cache of the PyTorch CPU decoder: beams of a sentence share a cache, separated by a mask.

Each step adds a slot for each beam, and `history_bias` masks the slots of other beams' pasts.
Reordering beams reorders the rows of that small table; copying keys and values would cost as much
as a decoding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

# Initial slots of a cache, and how many are added when it is full. Empty slots are read like filled
# ones, so caches grow often and by little. Below 16 torch's softmax is not vectorized.
INITIAL_SLOTS, GROWTH_SLOTS = 16, 8


@dataclass(frozen=True, slots=True)
class TorchKVCache:
    """Decoder state of N sentences with F beams each.

    A step writes into its tensors, so the state before a step must not be used after it.
    """

    kv_cache: Sequence[Tensor]  # self-attention, per layer: (2, N * H, slots, Dh)
    memory: Sequence[Tensor]  # cross-attention, per layer: (2, N * H, S, Dh)
    heads: int  # H
    padding_bias: Tensor | None  # (N * H, 1, S): -inf for source padding, else zero
    # (N, F, slots): zero for a beam's own past, else -inf; None if there is one beam per sentence.
    history_bias: Tensor | None = None
    # The same for the slots that are read, at least INITIAL_SLOTS: broadcasts to (N * H, F, slots).
    bias: Tensor | None = None
    steps: int = 0
    slots: int = 0  # in use

    @property
    def sentences(self) -> int:
        """The number of sentences, N."""
        return self.memory[0].size(1) // self.heads

    @property
    def beams_per_sentence(self) -> int:
        """The number of beams of each sentence, F."""
        return 1 if self.history_bias is None else self.history_bias.size(1)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.memory[0].device

    def select(self, rows: Tensor) -> TorchKVCache:
        """Select rows (M,) in any order and with repetition; each becomes a sentence of its own."""
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
        """Reorder beams: row i continues row `rows[i]` (M,) of its sentence, M / N per sentence."""
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
        """Keep all beams of sentences (M,) and drop the others."""
        history_bias = self.history_bias
        return replace(
            self._select_sentences(sentences),
            history_bias=None if history_bias is None else history_bias.index_select(0, sentences),
        )

    def advance(self) -> TorchKVCache:
        """Assign a new slot to each beam, in a larger cache if this one is full."""
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
        """Select sentences with their caches and sources, but not `history_bias`."""
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
    """Return the bias on the scores of the slots that are read; unused slots are masked."""
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
    """Copy the slots in use into a larger cache."""
    grown = cache.new_zeros(*cache.shape[:2], size, cache.size(3))
    grown[:, :, :filled] = cache[:, :, :filled]
    return grown
