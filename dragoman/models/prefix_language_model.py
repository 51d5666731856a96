"""Prefix language model: one stack that translates under a prefix mask (UniLM)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.layers.embedding_and_output_projection import (
    Embedding,
    OutputProjection,
    SegmentInput,
)
from dragoman.models.block_stack import Stack
from dragoman.models.decoder_state import DecoderState
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.forward_context import ForwardContext, Memory


class PrefixLM(EncoderDecoder):
    """One stack over source and target, whose attention mask makes it a translator.

                      source   target
        source      [  all   |  none  ]
        target      [  all   | causal ]

    Dong et al. (2019), "UniLM", the sequence-to-sequence objective. Source states do not depend on
    the target, so `encode` computes the keys and values of the source once and `decode` continues
    from them; `hidden` computes both at once. `decoder` is the stack, and `encoder` has no blocks.

    Each side counts its positions from zero, and has its own segment embedding:
    a target token's input then depends neither on the source's length nor on padding.
    """

    def __init__(
        self,
        *,
        embeddings: dict[str, Embedding],
        src_input: SegmentInput,
        tgt_input: SegmentInput,
        stack: Stack,
        output: OutputProjection,
    ) -> None:
        super().__init__(
            embeddings=embeddings,
            src_input=src_input,
            tgt_input=tgt_input,
            encoder=Stack([]),
            decoder=stack,
            output=output,
        )

    def encode_embedded(
        self,
        embedded: Tensor,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Memory:
        """Run the stack on source embeddings (B, S, D); the memory carries keys and values."""
        context = ForwardContext(mask=mask, losses={} if losses is None else losses)
        values, state = self.decoder.start_with_prefix(self.src_input(embedded), context)
        return Memory(values, mask, state=state)

    def decode_embedded(
        self,
        embedded: Tensor,
        memory: Memory,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
        layer_outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the stack on target embeddings (B, T, D) after a source under teacher forcing."""
        assert layer_outputs is None, "a prefix LM's layers are read by hidden_embedded"
        # Padding comes last, so the causal mask already hides it from every real position.
        embedded = self.tgt_input(embedded)
        return self.output(self.decoder.extend(embedded, _source_state(memory)).output)

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
        """Run the stack once on source and target, (B, S + T); return the target's part."""
        sources, targets = src_embedded.size(1), tgt_embedded.size(1)
        embedded = torch.cat([self.src_input(src_embedded), self.tgt_input(tgt_embedded)], dim=1)
        outputs: list[Tensor] | None = None if layer_outputs is None else []
        context = ForwardContext(
            mask=None if src_mask is None else F.pad(src_mask, (0, targets), value=True),
            prefix=sources,
            losses={} if losses is None else losses,
            layer_outputs=outputs,
        )
        hidden = self.decoder(embedded, context)
        if layer_outputs is not None:
            layer_outputs.extend(output[:, sources:] for output in outputs or ())
        return self.output(hidden[:, sources:])

    def start(self, memory: Memory) -> DecoderState:
        """Return the state before the first target position: the KV caches of the source."""
        return DecoderState(children={"decoder": _source_state(memory)})


def _source_state(memory: Memory) -> DecoderState:
    """Return the stack's state after the source."""
    assert memory.state is not None, "the memory must be this model's"
    return memory.state
