"""Inputs of a block besides the hidden states: masks, the encoder's output, auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.models.decoder_state import DecoderState


class Memory(NamedTuple):
    """The encoder's output."""

    values: Tensor  # (B, S, D)
    mask: Tensor | None = None  # (B, S), True for real tokens; None without padding
    embeddings: Tensor | None = None  # (B, S, D) source embeddings with positions, for ConvS2S
    state: DecoderState | None = None  # of a prefix LM: the KV caches of the source
    # (B, N, layers, D) final states of an RNN encoder: hidden state, and cell of an LSTM.
    final_state: Tensor | None = None

    @property
    def rows(self) -> int:
        """Return the batch size."""
        return self.values.size(0)

    def select(self, rows: Tensor) -> Memory:
        """Return the rows (N,), in any order and with repetitions."""
        return Memory(
            self.values.index_select(0, rows),
            None if self.mask is None else self.mask.index_select(0, rows),
            None if self.embeddings is None else self.embeddings.index_select(0, rows),
            None if self.state is None else self.state.select(rows),
            None if self.final_state is None else self.final_state.index_select(0, rows),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """Inputs that the blocks of a stack share in one forward pass over (B, T, D)."""

    mask: Tensor | None = None  # (B, T), True for real tokens; None without padding
    memory: Memory | None = None  # the encoder's output; None in an encoder or a language model
    # (B, T, T) instead of the causal mask: a language model's objective; True may be attended to.
    attention_mask: Tensor | None = None
    previous: Tensor | None = None  # (B, M, D) a block's inputs in earlier segments
    previous_mask: Tensor | None = None  # (B, M), True where there was an earlier position
    filled: int | None = None  # of all rows' M earlier positions, how many there were; None for M
    # (B, ...) with the rows, device and dtype of a decoder's state; without a memory only.
    template: Tensor | None = None
    cache_limit: int = 0  # earlier positions that decoding attends to at most; 0 for all
    prefix: int = 0  # of a prefix LM: the first positions, which are visible to all
    losses: dict[str, Tensor] = field(default_factory=dict)  # auxiliary losses by name
    embedded: Tensor | None = None  # (B, T, D), the stack's input, where a block reads it
    # Of an encoder's last RNN, for Memory.final_state; at most one, the last that was appended.
    final_states: list[Tensor] = field(default_factory=list)
    # (B, T, D) outputs of the layers of a stack, in order, if they are collected.
    layer_outputs: list[Tensor] | None = None

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add an auxiliary loss, summed over the batch, such as the coverage loss."""
        self.losses[name] = self.losses[name] + value if name in self.losses else value

    def add_layer_output(self, output: Tensor) -> None:
        """Append a layer's output (B, T, D), if outputs are collected."""
        if self.layer_outputs is not None:
            self.layer_outputs.append(output)

    def self_mask(self, *, causal: bool, length: int = 0) -> Tensor | None:
        """Return the mask of self-attention, broadcastable to (B, T, T) for a `length` of T.

        It is the attention mask if there is one, else it hides padding; with earlier segments it
        is (B, 1, M + T). The causal mask is not in it: `ops/attention.py` adds it.
        """
        if self.attention_mask is not None:
            return self.attention_mask
        if self.previous is not None:
            if self.previous_mask is None:
                return None
            here = self.previous_mask.new_ones(self.previous_mask.size(0), length)
            return torch.cat([self.previous_mask, here], dim=1).unsqueeze(1)
        # Padding comes last, so a causal mask already hides it from every real position.
        hides_padding = causal and not self.prefix
        return None if hides_padding or self.mask is None else self.mask.unsqueeze(1)

    def memory_mask(self) -> Tensor | None:
        """Return the padding mask of cross-attention, broadcastable to (B, T, S)."""
        if self.memory is None or self.memory.mask is None:
            return None
        return self.memory.mask.unsqueeze(1)

    def state_template(self) -> Tensor:
        """Return a tensor (B, ...) with the rows, device and dtype of a decoder's state."""
        template = self.template if self.memory is None else self.memory.values
        assert template is not None, "decoding needs the encoder's output, or a template"
        return template

    def prefix_state(self, x: Tensor, cache: dict[str, Tensor]) -> DecoderState:
        """Return a block's state after a prefix (B, S, D) whose padding mask is `mask`."""
        empty = x.new_empty(x.size(0), 1, 0)
        memory = {"sentence": empty} if self.mask is None else {"prefix_mask": self.mask}
        recurrent = {} if cache else {"row": empty}
        return DecoderState(recurrent=recurrent, cache=cache, memory=memory, length=x.size(1))

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
        values, mask = self.state_template(), None if self.memory is None else self.memory.mask
        rows = values.size(0)
        # Empty tensors where a block stores nothing: a state must know its rows and sentences.
        if source is None:
            source = {"sentence": values.new_empty(rows, 1, 0)}
        elif mask is not None:
            source = {**source, "mask": mask}
        if not recurrent and not cache:
            recurrent = {"row": values.new_empty(rows, 0)}
        return DecoderState(
            recurrent=recurrent or {},
            cache=cache or {},
            memory=source,
            limit=self.cache_limit,
        )
