"""Encoder-decoder model: `encode`, `decode` with teacher forcing, `start` and `step`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.policy_gradient_alignment import ReinforceAlignment
from dragoman.layers.embedding_and_output_projection import Embedding, OutputProjection, StackInput
from dragoman.models.block_stack import Stack
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext, Memory


class DecoderOutput(NamedTuple):
    """Logits of the next tokens, and the decoder state."""

    logits: Tensor  # (B, V) after `step`, (B, T, V) after `extend`
    state: DecoderState


class EncoderDecoder(nn.Module):
    """Embeddings, an encoder stack, a decoder stack and the projection to the vocabulary.

    `embeddings` has one table, "shared", or two, "src" and "tgt".
    """

    def __init__(
        self,
        *,
        embeddings: dict[str, Embedding],
        src_input: StackInput,
        tgt_input: StackInput,
        encoder: Stack,
        decoder: Stack,
        output: OutputProjection,
    ) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(embeddings)
        self.src_input, self.tgt_input = src_input, tgt_input
        self.encoder, self.decoder = encoder, decoder
        self.output = output

    @property
    def output_weight(self) -> Tensor:
        """Return the output projection (V, D), or (V, E) with factorized embeddings."""
        own = self.output.matrix
        return self._embedding("tgt").matrix if own is None else own

    @property
    def output_bias(self) -> Tensor | None:
        """Return the bias (V,) of the output projection, or None."""
        return self.output.bias

    def encode(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Memory:
        """Encode sources (B, S), real where `mask` is True; add auxiliary losses to `losses`."""
        return self.encode_embedded(self._embedding("src")(src), mask, losses=losses)

    def encode_embedded(
        self,
        embedded: Tensor,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Memory:
        """Encode sources, given their token embeddings (B, S, D) without positions."""
        context = ForwardContext(mask=mask, losses={} if losses is None else losses)
        embedded = self.src_input(embedded)
        values = self.encoder(embedded, context)
        final_state = context.final_states[-1] if context.final_states else None
        return Memory(values, mask, embedded, final_state=final_state)

    def decode(
        self,
        tgt_in: Tensor,
        memory: Memory,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Run the decoder on targets (B, T) under teacher forcing; return its output for `project`.

        The output is (B, T, D), or (B, T, E) with factorized embeddings.
        """
        return self.decode_embedded(self._embedding("tgt")(tgt_in), memory, mask, losses=losses)

    def decode_embedded(
        self,
        embedded: Tensor,
        memory: Memory,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
        layer_outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return what `decode` does, given token embeddings (B, T, D) without positions.

        The output of every decoder layer, (B, T, D), is appended to `layer_outputs`.
        """
        context = ForwardContext(
            mask=mask,
            memory=memory,
            losses={} if losses is None else losses,
            layer_outputs=layer_outputs,
        )
        return self.output(self.decoder(self.tgt_input(embedded), context))

    def embed_source(self, src: Tensor) -> Tensor:
        """Return the token embeddings (B, S, D) of sources, without positions."""
        return self._embedding("src")(src)

    def embed_target(self, tgt_in: Tensor) -> Tensor:
        """Return the token embeddings (B, T, D) of decoder inputs, without positions."""
        return self._embedding("tgt")(tgt_in)

    def hidden(
        self,
        src: Tensor,
        tgt_in: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Encode and decode under teacher forcing; return what `decode` does."""
        return self.hidden_embedded(
            self.embed_source(src),
            self.embed_target(tgt_in),
            src_mask,
            tgt_mask,
            losses=losses,
        )

    def hidden_embedded(
        self,
        src_embedded: Tensor,
        tgt_embedded: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
        layer_outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return what `hidden` does, given token embeddings (B, S, D) and (B, T, D).

        The output of every decoder layer, (B, T, D), is appended to `layer_outputs`.
        """
        memory = self.encode_embedded(src_embedded, src_mask, losses=losses)
        return self.decode_embedded(
            tgt_embedded, memory, tgt_mask, losses=losses, layer_outputs=layer_outputs
        )

    def reinforce_alignments(self) -> list[ReinforceAlignment]:
        """Return the alignments trained with REINFORCE, which need a reward for each row."""
        return [
            module for module in self.decoder.modules() if isinstance(module, ReinforceAlignment)
        ]

    def project(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of the decoder's output (..., D)."""
        return F.linear(hidden, self.output_weight, self.output_bias)

    def forward(
        self,
        src: Tensor,
        tgt_in: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V) of targets (B, T) under teacher forcing."""
        return self.project(self.hidden(src, tgt_in, src_mask, tgt_mask))

    def start(self, memory: Memory) -> DecoderState:
        """Return the decoder state before the first target position."""
        return DecoderState(children={"decoder": self.decoder.start(ForwardContext(memory=memory))})

    def step(self, tokens: Tensor, state: DecoderState) -> DecoderOutput:
        """Decode one position: tokens (B,) in, logits (B, V) of the next tokens out."""
        logits, state = self.extend(tokens.unsqueeze(1), state)
        return DecoderOutput(logits.squeeze(1), state)

    def extend(self, tokens: Tensor, state: DecoderState) -> DecoderOutput:
        """Decode T positions: tokens (B, T) in, logits (B, T, V) of the next tokens out."""
        embedded = self.tgt_input(self._embedding("tgt")(tokens), first=state.length)
        hidden, decoder = self.decoder.extend(embedded, state.children["decoder"])
        return DecoderOutput(
            self.project(self.output(hidden)),
            state.advance(tokens.size(1), children={"decoder": decoder}),
        )

    def _embedding(self, side: str) -> Embedding:
        """Return the embedding table of "src" or "tgt"."""
        table = self.embeddings[side if side in self.embeddings else "shared"]
        assert isinstance(table, Embedding), "an embedding table must be an Embedding"
        return table
