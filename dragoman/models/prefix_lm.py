"""Prefix language model: one stack that translates under a prefix mask (UniLM)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.layers.embedding import Embedding, OutputProjection, SegmentInput
from dragoman.models.context import ForwardContext, Memory
from dragoman.models.decoder_state import DecoderState
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.stack import Stack


class PrefixLM(EncoderDecoder):
    """One stack over source and target, whose attention mask makes it a translator.

                      source   target
        source      [  all   |  none  ]
        target      [  all   | causal ]

    Dong et al. (2019), "UniLM", the sequence-to-sequence objective. Source states do not depend on
    the target, so `encode` computes the keys and values of the source once and `decode` continues
    from them; `hidden` computes both at once. `decoder` is the stack, and `encoder` has no blocks.

    Each side counts its positions from zero, and its segment embedding tells it from the other:
    a target token's input then depends neither on the source's length nor on padding.
    """

    def __init__(
        self,
        *,
        embeddings: dict[str, Embedding],
        src_entrance: SegmentInput,
        tgt_entrance: SegmentInput,
        stack: Stack,
        output: OutputProjection,
    ) -> None:
        super().__init__(
            embeddings=embeddings,
            src_entrance=src_entrance,
            tgt_entrance=tgt_entrance,
            encoder=Stack([]),
            decoder=stack,
            output=output,
        )

    def encode(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Memory:
        """Run the stack on sources (B, S); the memory carries their keys and values."""
        context = ForwardContext(mask=mask, losses={} if losses is None else losses)
        embedded = self.src_entrance(self._embedding("src")(src))
        values, state = self.decoder.start_with_prefix(embedded, context)
        return Memory(values, mask, state=state)

    def decode(
        self,
        tgt_in: Tensor,
        memory: Memory,
        mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Run the stack on targets (B, T) after a source under teacher forcing."""
        # Padding comes last, so the causal mask already hides it from every real position.
        embedded = self.tgt_entrance(self._embedding("tgt")(tgt_in))
        return self.output(self.decoder.extend(embedded, _source_state(memory)).output)

    def hidden(
        self,
        src: Tensor,
        tgt_in: Tensor,
        src_mask: Tensor | None = None,
        tgt_mask: Tensor | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Run the stack once on source and target, (B, S + T); return the target's part."""
        sources, targets = src.size(1), tgt_in.size(1)
        embedded = torch.cat(
            [
                self.src_entrance(self._embedding("src")(src)),
                self.tgt_entrance(self._embedding("tgt")(tgt_in)),
            ],
            dim=1,
        )
        context = ForwardContext(
            mask=None if src_mask is None else F.pad(src_mask, (0, targets), value=True),
            prefix=sources,
            losses={} if losses is None else losses,
        )
        return self.output(self.decoder(embedded, context)[:, sources:])

    def start(self, memory: Memory) -> DecoderState:
        """Return the state before the first target position: the KV caches of the source."""
        return DecoderState(children={"decoder": _source_state(memory)})


def _source_state(memory: Memory) -> DecoderState:
    """Return the stack's state after the source."""
    assert memory.state is not None, "the memory must be this model's"
    return memory.state
