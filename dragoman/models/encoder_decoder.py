"""The translator's model: an encoder reads the source, a decoder writes the target."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.reinforced import Reinforced
from dragoman.layers.embedding import Embedding, Entrance, Output
from dragoman.models.context import Context, Memory
from dragoman.models.stack import Stack
from dragoman.models.state import State


class Step(NamedTuple):
    """What may come next, and the state that says so."""

    logits: Tensor  # (B, V) after `step`, (B, T, V) after `extend`
    state: State


class EncoderDecoder(nn.Module):
    """Two stacks with embeddings before them and a projection to the vocabulary behind.

    `embeddings` has one table, "shared", or two, "src" and "tgt": what is shared is one module, so a weight has one name.
    """

    def __init__(
        self,
        *,
        embeddings: dict[str, Embedding],
        src_entrance: Entrance,
        tgt_entrance: Entrance,
        encoder: Stack,
        decoder: Stack,
        output: Output,
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
        segments: Tensor | None = None,
        places: Tensor | None = None,
        losses: dict[str, Tensor] | None = None,
    ) -> Memory:
        """Read sources (B, S), real where `mask` (B, S) is True; `losses` collects what members add to the loss."""
        embedded = self._embedding("src")(src)
        context = Context(mask=mask, segments=segments, places=places, embeddings=embedded, losses={} if losses is None else losses)
        placed = self.src_entrance(embedded, places=places)
        return Memory(self.encoder(placed, context), mask, placed, segments)

    def decode(
        self,
        tgt_in: Tensor,
        memory: Memory,
        mask: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        places: Tensor | None = None,
        losses: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Read targets (B, T) that are given: (B, T, D), or (B, T, E), to be projected where there is something to predict."""
        embedded = self._embedding("tgt")(tgt_in)
        context = Context(
            mask=mask,
            segments=segments,
            places=places,
            memory=memory,
            embeddings=embedded,
            losses={} if losses is None else losses,
        )
        return self.output(self.decoder(self.tgt_entrance(embedded, places=places), context))

    def rewarded(self) -> list[Reinforced]:
        """Find the parts that learn from each row's log-likelihood, to be told of it after a pass in training."""
        return [module for module in self.decoder.modules() if isinstance(module, Reinforced)]

    def project(self, hidden: Tensor) -> Tensor:
        """Score every piece of the vocabulary: what `decode` gave, (..., D), gives logits (..., V)."""
        return F.linear(hidden, self.output_weight, self.output_bias)

    def forward(self, src: Tensor, tgt_in: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None) -> Tensor:
        """Score every next piece of targets (B, T) that are given: logits (B, T, V)."""
        return self.project(self.decode(tgt_in, self.encode(src, src_mask), tgt_mask))

    def start(self, memory: Memory) -> State:
        """Stand before the first target position of every row of the memory."""
        return State(parts={"decoder": self.decoder.start(Context(memory=memory))})

    def step(self, tokens: Tensor, state: State) -> Step:
        """Take one more token a row, (B,), and score what comes next."""
        logits, state = self.extend(tokens.unsqueeze(1), state)
        return Step(logits.squeeze(1), state)

    def extend(self, tokens: Tensor, state: State) -> Step:
        """Take T more tokens a row, (B, T), and score what comes after each."""
        places = state.places
        if places is not None:
            places = places.unsqueeze(1) + torch.arange(tokens.size(1), device=places.device)
        placed = self.tgt_entrance(self._embedding("tgt")(tokens), first=state.length, places=places)
        hidden, decoder = self.decoder.extend(placed, state.parts["decoder"])
        return Step(self.project(self.output(hidden)), state.advance(tokens.size(1), parts={"decoder": decoder}))

    def _embedding(self, side: str) -> Embedding:
        """Find the table of a side."""
        table = self.embeddings[side if side in self.embeddings else "shared"]
        assert isinstance(table, Embedding), "embeddings must be of our kind"
        return table
