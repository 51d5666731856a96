"""The translator's model: an encoder reads the source, a decoder writes the target."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.reinforce import ReinforceAlignment
from dragoman.layers.embedding import Embedding, OutputProjection, StackInput
from dragoman.models.context import ForwardContext, Memory
from dragoman.models.decoder_state import DecoderState
from dragoman.models.stack import Stack


class DecoderOutput(NamedTuple):
    """What may come next, and the state that says so."""

    logits: Tensor  # (B, V) after `step`, (B, T, V) after `extend`
    state: DecoderState


class EncoderDecoder(nn.Module):
    """Two stacks with embeddings before them and a projection to the vocabulary behind.

    `embeddings` has one table, "shared", or two, "src" and "tgt": what is shared is one module, so a weight has one name.
    """

    def __init__(
        self,
        *,
        embeddings: dict[str, Embedding],
        src_entrance: StackInput,
        tgt_entrance: StackInput,
        encoder: Stack,
        decoder: Stack,
        output: OutputProjection,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(embeddings)
        self.src_entrance, self.tgt_entrance = src_entrance, tgt_entrance
        self.encoder, self.decoder = encoder, decoder
        self.output = output

    @property
    def output_weight(self) -> Tensor:
        """Give the matrix (V, D) that scores the pieces, wherever it lives; (V, E) where embeddings have a width of their own."""
        own = self.output.matrix
        return self._embedding("tgt").matrix if own is None else own

    @property
    def output_bias(self) -> Tensor | None:
        """Give the bias (V,) of the scores, if there is one."""
        return self.output.bias

    def encode(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        *,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        losses: dict[str, Tensor] | None = None,
    ) -> Memory:
        """Read sources (B, S), real where `mask` (B, S) is True; `losses` collects what members add to the loss."""
        embedded = self._embedding("src")(src)
        context = ForwardContext(
            mask=mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            embeddings=embedded,
            losses={} if losses is None else losses,
        )
        placed = self.src_entrance(embedded, position_ids=position_ids)
        return Memory(self.encoder(placed, context), mask, placed, segment_ids)

    def decode(
        self,
        tgt_in: Tensor,
        memory: Memory,
        mask: Tensor | None = None,
        *,
        segment_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        losses: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Read targets (B, T) that are given: (B, T, D), or (B, T, E), to be projected where there is something to predict."""
        embedded = self._embedding("tgt")(tgt_in)
        context = ForwardContext(
            mask=mask,
            segment_ids=segment_ids,
            position_ids=position_ids,
            memory=memory,
            embeddings=embedded,
            losses={} if losses is None else losses,
        )
        return self.output(
            self.decoder(self.tgt_entrance(embedded, position_ids=position_ids), context)
        )

    def reinforce_alignments(self) -> list[ReinforceAlignment]:
        """Find the parts that learn from each row's log-likelihood, to be told of it after a pass in training."""
        return [
            module for module in self.decoder.modules() if isinstance(module, ReinforceAlignment)
        ]

    def project(self, hidden: Tensor) -> Tensor:
        """Score every piece of the vocabulary: what `decode` gave, (..., D), gives logits (..., V)."""
        return F.linear(hidden, self.output_weight, self.output_bias)

    def forward(
        self,
        src: Tensor,
        tgt_in: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """Score every next piece of targets (B, T) that are given: logits (B, T, V)."""
        return self.project(self.decode(tgt_in, self.encode(src, src_mask), tgt_mask))

    def start(self, memory: Memory) -> DecoderState:
        """Stand before the first target position of every row of the memory."""
        return DecoderState(children={"decoder": self.decoder.start(ForwardContext(memory=memory))})

    def step(self, tokens: Tensor, state: DecoderState) -> DecoderOutput:
        """Take one more token a row, (B,), and score what comes next."""
        logits, state = self.extend(tokens.unsqueeze(1), state)
        return DecoderOutput(logits.squeeze(1), state)

    def extend(self, tokens: Tensor, state: DecoderState) -> DecoderOutput:
        """Take T more tokens a row, (B, T), and score what comes after each."""
        position_ids = state.position_ids
        if position_ids is not None:
            position_ids = position_ids.unsqueeze(1) + torch.arange(
                tokens.size(1), device=position_ids.device
            )
        placed = self.tgt_entrance(
            self._embedding("tgt")(tokens), first=state.length, position_ids=position_ids
        )
        hidden, decoder = self.decoder.extend(placed, state.children["decoder"])
        return DecoderOutput(
            self.project(self.output(hidden)),
            state.advance(tokens.size(1), children={"decoder": decoder}),
        )

    def _embedding(self, side: str) -> Embedding:
        """Find the table of a side."""
        table = self.embeddings[side if side in self.embeddings else "shared"]
        assert isinstance(table, Embedding), "embeddings must be of our kind"
        return table
