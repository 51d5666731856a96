"""Language model: embeddings, one causal stack, the projection to the vocabulary.

It has the methods of an encoder-decoder without a memory: `start`, `step` and `extend` for
generation, `decode` and `project` for training, and `decode_segment` where a segment continues the
one before it (Transformer-XL, truncated back-propagation through time).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops
from dragoman.attention.relative_position_encodings import TransformerXLBias
from dragoman.config import ModelConfig
from dragoman.config.language_model import LanguageConfig
from dragoman.errors import ConfigError
from dragoman.layers.embedding_and_output_projection import Embedding, OutputProjection, StackInput
from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.block_interface import ExtendOutput
from dragoman.models.block_list_parser import parse_blocks
from dragoman.models.block_stack import Stack
from dragoman.models.block_validation import stack_problems
from dragoman.models.decoder_state import DecoderState
from dragoman.models.encoder_decoder import DecoderOutput
from dragoman.models.factory import build_stack, build_stack_input
from dragoman.models.forward_context import ForwardContext
from dragoman.models.initialization import DEPTH_SCALINGS, initialize_weights
from dragoman.models.layer_sharing import SHARED_LAYER_TYPES, share_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageDropout:
    """Dropout probabilities outside the blocks, as in AWD-LSTM (Merity et al. 2018).

    With factorized embeddings those of input and output act on the E features of the embeddings,
    as there: of the D features that are projected from them, dropout would hide little.
    """

    embedding: float = 0.0  # of a token's embedding, wherever it occurs in the batch
    input: float = 0.0  # of the stack's input
    output: float = 0.0  # of the stack's output
    locked: bool = False  # whether all positions of a row share the input's and output's mask

    @classmethod
    def of(cls, config: LanguageConfig) -> LanguageDropout:
        """Return the probabilities of a configuration."""
        return cls(
            embedding=config.embedding_dropout,
            input=config.input_dropout,
            output=config.output_dropout,
            locked=config.locked_dropout,
        )


class SegmentHidden(NamedTuple):
    """The stack's output for a segment, before and after dropout, and the carried state."""

    raw: Tensor  # (B, T, D), or (B, T, E) with factorized embeddings
    hidden: Tensor  # the same after dropout: for `project`
    carried: dict[str, Tensor]


class NeuralLanguageModel(nn.Module):
    """Predicts each token from those before it.

    A bidirectional stack (`causal=False` when it is built) serves masked language models:
    `decode` then takes the attention mask of the objective.
    """

    def __init__(
        self,
        *,
        embedding: Embedding,
        stack_input: StackInput,
        decoder: Stack,
        output: OutputProjection,
        dropout: LanguageDropout,
    ) -> None:
        super().__init__()
        self.embedding, self.stack_input = embedding, stack_input
        self.decoder, self.output = decoder, output
        self.dropout = dropout

    @property
    def output_weight(self) -> Tensor:
        """Return the output projection (V, D), or (V, E) with factorized embeddings."""
        own = self.output.matrix
        return self.embedding.matrix if own is None else own

    @property
    def output_bias(self) -> Tensor | None:
        """Return the bias (V,) of the output projection, or None."""
        return self.output.bias

    def embed(
        self, tokens: Tensor, *, first: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Return the stack's input (B, T, D) for tokens (B, T) from position `first` on."""
        is_factorized = self.embedding.up_proj is not None

        def drop(embedded: Tensor) -> Tensor:
            embedded = self._drop_tokens(embedded, tokens)
            return self._drop(embedded, self.dropout.input) if is_factorized else embedded

        x = self.embedding(tokens, drop=drop if self.training else None)
        x = self.stack_input(x, first=first, position_ids=position_ids)
        return x if is_factorized else self._drop(x, self.dropout.input)

    def _drop_tokens(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        """Return embeddings (B, T, E) of tokens (B, T) with embedding dropout.

        One draw per token type: all its occurrences are dropped together. A row's first token is
        kept. Without a memory it attends to itself alone: dropped, it would be zero in all layers
        at first, and each norm would multiply its gradient by 1 / sqrt(epsilon).
        """
        if not self.dropout.embedding:
            return embedded
        types = self.embedding.weight.new_ones(self.embedding.weight.size(0))
        kept = ops.dropout(types, self.dropout.embedding)[tokens]
        kept[:, :1] = 1.0
        return embedded * kept.unsqueeze(-1).to(embedded.dtype)

    def decode(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        losses: dict[str, Tensor] | None = None,
        layer_outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return the stack's output for tokens (B, T), real where `mask` is True, for `project`.

        `attention_mask` (B, T, T) replaces causality: True at (t, s) lets t attend to s. The output
        of every layer, (B, T, D), is appended to `layer_outputs`.
        """
        context = ForwardContext(
            mask=mask,
            attention_mask=attention_mask,
            losses={} if losses is None else losses,
            layer_outputs=layer_outputs,
        )
        hidden = self.decoder(self.embed(tokens, position_ids=position_ids), context)
        return self._drop(self.output(hidden), self.dropout.output)

    def project(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of the stack's output (..., D)."""
        return F.linear(hidden, self.output_weight, self.output_bias)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V) of the tokens that follow each of (B, T)."""
        return self.project(self.decode(tokens, mask))

    # Segments of streams, in training

    def carried_shapes(self, memory: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of a row of each tensor that a segment leaves to the next."""
        return self.decoder.carried_shapes(memory)

    def decode_segment(
        self,
        tokens: Tensor,
        previous: Mapping[str, Tensor],
        previous_mask: Tensor | None = None,
        *,
        filled: int | None = None,
    ) -> SegmentHidden:
        """Return the stack's output for a segment (B, T), given the last segment's carried state.

        `previous_mask` (B, M) is True at filled positions of the memory. If all rows have equally
        many, `filled` is that number, and no mask is needed. Positions count from 0 in each
        segment, so a memory needs relative positions.
        """
        context = ForwardContext(previous_mask=previous_mask, filled=filled)
        raw, carried = self.decoder.forward_segment(self.embed(tokens), context, previous)
        raw = self.output(raw)
        return SegmentHidden(raw, self._drop(raw, self.dropout.output), carried)

    # Generation

    def start(self, rows: int = 1, *, memory: int = 0) -> DecoderState:
        """Return the state before the first token of some rows.

        With a `memory`, each extension attends to that many earlier positions at most, whatever
        was used in training; 0 keeps all.
        """
        weight = self.embedding.weight
        template = weight.new_empty(rows, self.decoder_width)
        context = ForwardContext(template=template, cache_limit=memory)
        return DecoderState(children={"decoder": self.decoder.start(context)})

    def step(self, tokens: Tensor, state: DecoderState) -> DecoderOutput:
        """Append one token per row (B,); return the logits (B, V) of the next, and the state."""
        hidden, state = self.extend_hidden(tokens.unsqueeze(1), state)
        return DecoderOutput(self.project(hidden.squeeze(1)), state)

    def extend(self, tokens: Tensor, state: DecoderState) -> DecoderOutput:
        """Append T tokens per row (B, T); return the logits (B, T, V) after each, and the state."""
        hidden, state = self.extend_hidden(tokens, state)
        return DecoderOutput(self.project(hidden), state)

    def extend_hidden(self, tokens: Tensor, state: DecoderState) -> ExtendOutput:
        """Append T tokens per row (B, T); return the stack's output (B, T, D), and the state."""
        x = self.embed(tokens, first=state.length)
        hidden, decoder = self.decoder.extend(x, state.children["decoder"])
        return ExtendOutput(
            self._drop(self.output(hidden), self.dropout.output),
            state.advance(tokens.size(1), children={"decoder": decoder}),
        )

    @property
    def decoder_width(self) -> int:
        """Return the width D of the stack."""
        up_proj = self.embedding.up_proj
        return self.embedding.weight.size(1) if up_proj is None else up_proj.out_features

    def _drop(self, x: Tensor, p: float) -> Tensor:
        """Apply dropout to (B, T, D), in training."""
        drop = ops.locked_dropout if self.dropout.locked else ops.dropout
        return drop(x, p, training=self.training)


def build_language_model(
    config: ModelConfig,
    *,
    vocab_size: int,
    dropout: LanguageDropout | None = None,
    max_distance: int = 0,
    causal: bool = True,
) -> NeuralLanguageModel:
    """Build a language model of the blocks of `model.decoder`, initialized by torch's generator.

    Without `dropout`, the input's is model.dropout. `max_distance` clamps Transformer-XL's
    distances. `tie_embeddings` other than none ties the embedding to the output projection.
    """
    if problems := [*config.problems(), *stack_problems(config, ("decoder",))]:
        raise ConfigError(problems)
    inner, fix_norm = config.embedding_width, config.fix_norm
    model = NeuralLanguageModel(
        embedding=Embedding(
            vocab_size,
            config.width,
            scale=config.width**0.5 if config.scale_embeddings else 1.0,
            embedding_width=inner,
            fix_norm=fix_norm,
        ),
        stack_input=build_stack_input(replace(config, dropout=0.0)),
        decoder=build_stack(
            config, config.decoder, "model.decoder", causal=causal, memory_width=None
        ),
        output=OutputProjection(
            vocab_size,
            config.width,
            tied=config.tie_embeddings != "none",
            bias=config.output_bias,
            embedding_width=inner,
            fix_norm=fix_norm,
        ),
        dropout=LanguageDropout(input=config.dropout) if dropout is None else dropout,
    )
    initialize_weights(model, DEPTH_SCALINGS[config.initialization])
    kind = SHARED_LAYER_TYPES[config.share_layers]
    if kind is not None:
        share_layers(model.decoder, kind)
    for module in model.modules():
        if isinstance(module, TransformerXLBias):
            module.max_distance = max_distance
    return model


def carries_state(config: ModelConfig, memory: int) -> bool:
    """Whether segments of a stream continue each other: an RNN's state, or a memory."""
    kinds = [BLOCKS.load(spec.name) for spec in parse_blocks(config.decoder, "model.decoder")]
    return any(
        kind.has_recurrent_state or (memory > 0 and kind.has_segment_memory) for kind in kinds
    )


def memory_mask(lengths: Tensor, memory: int) -> Tensor:
    """Return which of M memory positions are filled, (B, M): the last `lengths` (B,) of them."""
    positions = torch.arange(memory, device=lengths.device)
    return positions >= memory - lengths.unsqueeze(1)
