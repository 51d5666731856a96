"""The Reformer's reversible layers with LSH attention as a block: `reformer(layers=6)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import has_hooks
from dragoman.attention.lsh import LSHAttention
from dragoman.attention.lsh_bucket_count import default_buckets
from dragoman.config import ModelConfig
from dragoman.layers.feed_forward import ChunkedFeedForward
from dragoman.layers.norms_and_residuals import PreNorm
from dragoman.layers.reversible import (
    ReversibleSublayer,
    SavedDecisions,
    run_sublayers,
    run_sublayers_reversible,
)
from dragoman.models.block_interface import Block, BuildContext, ExtendOutput, build_residual
from dragoman.models.block_options import ReformerOptions
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext
from dragoman.models.transformer_blocks import (
    TransformerLayer,
    build_cross_attention,
    build_self_attention,
)
from dragoman.registry import catalogue

# Most positions that LSH attention extends a cache by in one go: it compares them with all S
# cached positions, (64, S).
MAX_EXTEND_POSITIONS = 64


class ReversibleStreams(NamedTuple):
    """The two residual streams: the next sub-layer reads `read` and adds to `written`."""

    written: Tensor  # (B, T, D)
    read: Tensor  # (B, T, D)

    @property
    def mean(self) -> Tensor:
        """The mean of both streams, (B, T, D): a layer's output."""
        return (self.written + self.read) / 2

    def add(self, sublayer_output: Tensor) -> ReversibleStreams:
        """Return the streams after a sub-layer; the next one reads the stream that changed."""
        return ReversibleStreams(self.read, self.written + sublayer_output)


class ReversibleLayer(TransformerLayer):
    """Transformer layer over two residual streams: each sub-layer reads one, adds to the other."""

    supports_compile = False  # part of a Reformer

    self_residual: PreNorm
    cross_residual: PreNorm
    ffn_residual: PreNorm

    def self_attend(self, x: Tensor, context: ForwardContext, saved: SavedDecisions) -> Tensor:
        """Return the self-attention of (B, T, D)."""
        return self.self(x, mask=context.self_mask(causal=self.causal), causal=self.causal)

    def sublayers(self, context: ForwardContext) -> Iterator[ReversibleSublayer]:
        """Yield the sub-layers as functions of the stream that they read, in order."""

        def self_attention(x: Tensor, memory: Tensor | None, saved: SavedDecisions) -> Tensor:
            return self.self_residual.apply_dropout(
                self.self_attend(self.self_residual.prepare_input(x), context, saved)
            )

        def cross_attention(x: Tensor, memory: Tensor | None, saved: SavedDecisions) -> Tensor:
            assert memory is not None, "cross-attention needs the encoder's output"
            return self.cross_residual.apply_dropout(
                self.cross(self.cross_residual.prepare_input(x), memory, mask=context.memory_mask())
            )

        def feed_forward(x: Tensor, memory: Tensor | None, saved: SavedDecisions) -> Tensor:
            return self.ffn_residual.apply_dropout(self.ffn(self.ffn_residual.prepare_input(x)))

        yield ReversibleSublayer(self_attention, _list_parameters(self.self, self.self_residual))
        if self.has_cross:
            yield ReversibleSublayer(
                cross_attention, _list_parameters(self.cross, self.cross_residual)
            )
        yield ReversibleSublayer(feed_forward, _list_parameters(self.ffn, self.ffn_residual))

    def extend_streams(
        self, streams: ReversibleStreams, state: DecoderState
    ) -> tuple[ReversibleStreams, DecoderState]:
        """Return both streams (B, T, D) after T more positions, and the state after them."""
        sublayer_output, state = self._extend_self(
            self.self_residual.prepare_input(streams.read), state
        )
        streams = streams.add(self.self_residual.apply_dropout(sublayer_output))
        if self.has_cross:
            sublayer_output = self.cross.attend_prepared(
                self.cross_residual.prepare_input(streams.read),
                state.memory["key_value"],
                mask=state.memory_mask,
            )
            streams = streams.add(self.cross_residual.apply_dropout(sublayer_output))
        sublayer_output = self.ffn(self.ffn_residual.prepare_input(streams.read))
        return streams.add(self.ffn_residual.apply_dropout(sublayer_output)), state


class ReversibleLSHLayer(ReversibleLayer):
    """Reversible layer with LSH self-attention."""

    self: LSHAttention  # type: ignore[assignment]  # instead of SelfAttention

    def self_attend(self, x: Tensor, context: ForwardContext, saved: SavedDecisions) -> Tensor:
        """Return the self-attention of (B, T, D), with the buckets in `saved` if there are any."""
        return self.self(x, mask=context.mask, causal=self.causal, saved=saved)

    def start(self, context: ForwardContext) -> DecoderState:
        """Return empty caches and the projected keys and values of the source."""
        values = context.state_template()
        attention, rows = self.self, values.size(0)
        empty = values.new_empty(rows, attention.heads, 0, attention.rounds, dtype=torch.int32)
        key_value = values.new_empty(rows, 2, attention.heads, 0, attention.head_width)
        return context.initial_state(
            self._prepare_cross(values),
            cache={"key_value": key_value, "buckets": empty, "ranks": empty},
        )

    def _extend_self(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Append T positions to the caches and attend from them to their buckets, in chunks."""
        outputs = []
        for chunk in x.tensor_split(-(-x.size(1) // MAX_EXTEND_POSITIONS), dim=1):
            output, state = self._extend_chunk(chunk, state)
            outputs.append(output)
        return ExtendOutput(torch.cat(outputs, dim=1), state)

    def _extend_chunk(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Append T <= MAX_EXTEND_POSITIONS positions, comparing each with all cached ones.

        A position's rank in a bucket is the number of earlier positions in it; positions of one
        bucket attend to each other if their ranks differ by at most the window.
        """
        query_positions = torch.arange(
            state.length, state.length + x.size(1), device=x.device
        ).unsqueeze(-1)  # (T, 1)
        query, key_value, hashed = self.self.project(x)
        buckets = hashed.permute(1, 2, 3, 0).int()  # (rows, H, T, R)
        grown = {
            name: state.append(name, new)
            for name, new in (("key_value", key_value), ("buckets", buckets))
        }
        after = grown["key_value"]
        key_positions = torch.arange(after.length, device=x.device)
        earlier, itself = (
            key_positions < query_positions,
            key_positions == query_positions,
        )  # (T, S)
        same = (
            buckets.unsqueeze(-2) == grown["buckets"].filled("buckets").unsqueeze(-3)
        ) & earlier.unsqueeze(-1)  # (rows, H, T, S, R)
        ranks = same.sum(dim=-2, dtype=torch.int32)
        grown["ranks"] = state.append("ranks", ranks)
        distance = ranks.unsqueeze(-2) - grown["ranks"].filled("ranks").unsqueeze(-3)
        near = (same & (distance <= self.self.window)).any(dim=-1)
        # A position attends to itself only if it has no other position to attend to.
        visible = near | (itself & ~near.any(dim=-1, keepdim=True))
        key, value = after.filled("key_value").unbind(1)
        after = replace(after, cache={name: each.cache[name] for name, each in grown.items()})
        return ExtendOutput(self.self.attend_heads(query, key, value, visible), after)


class Reformer(Block):
    """Reversible layers, whose activations are recomputed in the backward pass.

    Kitaev et al. (2020). Both residual streams start as the block's input; the output is their
    mean. Layers are pre-norm, whatever model.residual is, because a norm after the sum cannot be
    inverted. Attentions are recorded as encoder.0.0.self and so on.
    """

    final_norm = True
    overridable = ReformerOptions.overridable
    supports_compile = False  # torch.compile would store the activations
    adds_layer_outputs = True

    def __init__(self, layers: Sequence[ReversibleLayer]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        self.depth = len(layers)
        self.has_dropout = any(getattr(module, "dropout", 0.0) for module in self.modules())

    @classmethod
    def build(
        cls,
        build_context: BuildContext,
        *,
        layers: int = 1,
        attention: str = "lsh",
        rounds: int = 4,
        buckets: int = 0,
        window: int = 64,
        torch_compile: bool = False,
        ffn_chunks: int = 1,
    ) -> Reformer:
        """Build the layers; `attention=full` replaces LSH attention, as in the paper's translation.

        `buckets=0` means 2 * model.max_positions / window buckets per round.
        """
        config = build_context.config
        pre_norm = replace(config, residual="pre_norm")

        def layer() -> ReversibleLayer:
            cross = None
            if build_context.memory_width is not None:
                cross = build_cross_attention(config, build_context.memory_width)
            activation: nn.Module = catalogue("activation").load(config.activation)()
            self_attention = (
                _build_lsh_attention(config, rounds, buckets, window, torch_compile)
                if attention == "lsh"
                else build_self_attention(config, causal=build_context.causal)
            )
            return (ReversibleLSHLayer if attention == "lsh" else ReversibleLayer)(
                attention=self_attention,  # type: ignore[arg-type]
                cross=cross,
                ffn=ChunkedFeedForward(
                    config.width,
                    config.ffn_width,
                    chunks=ffn_chunks,
                    activation=activation,
                    dropout=config.ffn_dropout,
                    bias=config.ffn_bias,
                ),
                residuals=[build_residual(pre_norm) for _ in range(3 if cross else 2)],
                causal=build_context.causal,
            )

        return cls([layer() for _ in range(layers)])

    def layers(self) -> Iterator[tuple[str, ReversibleLayer]]:
        """Yield the layers in order, with their names."""
        for number in range(self.depth):
            layer = getattr(self, str(number))
            yield str(number), layer

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        memory = None if context.memory is None else context.memory.values
        if context.layer_outputs is not None:
            return self._forward_by_layer(x, memory, context)
        sublayers = list(
            chain.from_iterable(layer.sublayers(context) for _, layer in self.layers())
        )
        if has_hooks(self) or not torch.is_grad_enabled():
            return run_sublayers(sublayers, x, memory)
        return run_sublayers_reversible(
            sublayers, x, memory, random=self.training and self.has_dropout
        )

    def _forward_by_layer(
        self, x: Tensor, memory: Tensor | None, context: ForwardContext
    ) -> Tensor:
        """Return the output for (B, T, D), adding that of every layer to the context."""
        streams = ReversibleStreams(x, x)
        for _, layer in self.layers():
            for sublayer in layer.sublayers(context):
                streams = streams.add(sublayer.apply(streams.read, memory, {}))
            context.add_layer_output(streams.mean)
        return streams.mean

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the state before the first position."""
        return DecoderState(children={name: layer.start(context) for name, layer in self.layers()})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D), and the state after them."""
        streams, children = ReversibleStreams(x, x), {}
        for name, layer in self.layers():
            streams, children[name] = layer.extend_streams(streams, state.children[name])
        return ExtendOutput(streams.mean, state.advance(x.size(1), children=children))


def _build_lsh_attention(
    config: ModelConfig, rounds: int, buckets: int, window: int, torch_compile: bool
) -> LSHAttention:
    """Build LSH self-attention."""
    return LSHAttention(
        config.width,
        config.heads,
        head_width=config.head_width,
        rounds=rounds,
        buckets=buckets or default_buckets(config.max_positions, window),
        window=window,
        bias=config.attention_bias,
        torch_compile=torch_compile,
    )


def _list_parameters(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    """Return the parameters of several modules."""
    return tuple(chain.from_iterable(module.parameters() for module in modules))
