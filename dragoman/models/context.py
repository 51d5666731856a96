"""Inputs of a block besides the hidden states: masks, the encoder's output, auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from dragoman.models.decoder_state import DecoderState


class Memory(NamedTuple):
    """The encoder's output."""

    values: Tensor  # (B, S, D)
    mask: Tensor | None = None  # (B, S), True for real tokens; None without padding
    embeddings: Tensor | None = None  # (B, S, D) source embeddings with positions, for ConvS2S

    @property
    def rows(self) -> int:
        """Return the batch size."""
        return self.values.size(0)

    def select(self, rows: Tensor) -> Memory:
        """Return the rows (N,), in any order and with repetitions."""
        others = (None if part is None else part.index_select(0, rows) for part in self[1:])
        return Memory(self.values.index_select(0, rows), *others)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """What the blocks of a stack share in one forward pass over (B, T, D)."""

    mask: Tensor | None = None  # (B, T), True for real tokens; None without padding
    memory: Memory | None = None  # the encoder's output; None in an encoder
    losses: dict[str, Tensor] = field(default_factory=dict)  # auxiliary losses by name

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add an auxiliary loss, summed over the batch, such as the coverage loss."""
        self.losses[name] = self.losses[name] + value if name in self.losses else value

    def self_mask(self, *, causal: bool) -> Tensor | None:
        """Return the padding mask of self-attention, broadcastable to (B, T, T)."""
        # Padding comes last, so a causal mask already hides it from every real position.
        return None if causal or self.mask is None else self.mask.unsqueeze(1)

    def memory_mask(self) -> Tensor | None:
        """Return the padding mask of cross-attention, broadcastable to (B, T, S)."""
        if self.memory is None or self.memory.mask is None:
            return None
        return self.memory.mask.unsqueeze(1)

    def initial_state(
        self,
        source: dict[str, Tensor] | None,
        *,
        recurrent: dict[str, Tensor] | None = None,
        cache: dict[str, Tensor] | None = None,
    ) -> DecoderState:
        """Return a decoder block's state before the first position.

        `source` holds what cross-attention reads at every step, such as projected keys and values;
        the source mask is added to it. None means that the block has no cross-attention.
        """
        assert self.memory is not None, "decoding needs the encoder's output"
        values, mask = self.memory.values, self.memory.mask
        # Empty tensors where a block stores nothing: a state must know its rows and sentences.
        if source is None:
            source = {"sentence": values.new_empty(self.memory.rows, 1, 0)}
        elif mask is not None:
            source = {**source, "mask": mask}
        if not recurrent and not cache:
            recurrent = {"row": values.new_empty(self.memory.rows, 0)}
        return DecoderState(recurrent=recurrent or {}, cache=cache or {}, memory=source)
