"""The Reformer as a block: `reformer(layers=6)` in a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.lsh import LSHAttention
from dragoman.attention.lsh_buckets import default_buckets
from dragoman.attention.multi_head import CrossAttention, SelfAttention
from dragoman.attention.recorder import has_hooks
from dragoman.config import ModelConfig
from dragoman.layers.feed_forward import ChunkedFeedForward
from dragoman.layers.residual import PreNorm
from dragoman.layers.reversible import (
    ReversibleSublayer,
    SavedDecisions,
    run_sublayers,
    run_sublayers_reversible,
)
from dragoman.models.block import Block, BuildContext, ExtendOutput
from dragoman.models.block_options import ReformerOptions
from dragoman.models.context import ForwardContext
from dragoman.models.decoder_state import DecoderState
from dragoman.models.transformer import TransformerLayer, head_arguments
from dragoman.registry import catalogue

MAX_EXTEND_POSITIONS = 64  # positions by which a cache is extended: what they meet is (64, S) large


class ReversibleStreams(NamedTuple):
    """The two streams: the one that the next change adds to, and the one that it reads."""

    written: Tensor  # (B, T, D)
    read: Tensor  # (B, T, D)

    def add(self, sublayer_output: Tensor) -> ReversibleStreams:
        """Add a change, and let the next one read what this one wrote."""
        return ReversibleStreams(self.read, self.written + sublayer_output)


class ReversibleLayer(TransformerLayer):
    """A Transformer's layer over two streams: each sub-layer reads one, normalised, and adds to the other."""

    supports_compile = False  # runs within a Reformer

    self_residual: PreNorm
    cross_residual: PreNorm
    feedforward_residual: PreNorm

    def self_attend(self, x: Tensor, context: ForwardContext, noted: SavedDecisions) -> Tensor:
        """Attend to one's own sequence (B, T, D)."""
        return self.self(
            x,
            mask=context.self_mask(causal=self.causal),
            causal=self.causal,
            position_ids=context.position_ids,
        )

    def sublayers(self, context: ForwardContext) -> Iterator[ReversibleSublayer]:
        """List what the layer adds to the streams, in turn."""

        def attend(x: Tensor, memory: Tensor | None, noted: SavedDecisions) -> Tensor:
            return self.self_residual.apply_dropout(
                self.self_attend(self.self_residual.prepare_input(x), context, noted)
            )

        def read(x: Tensor, memory: Tensor | None, noted: SavedDecisions) -> Tensor:
            assert memory is not None, "a layer that attends to a memory must be given one"
            return self.cross_residual.apply_dropout(
                self.cross(self.cross_residual.prepare_input(x), memory, mask=context.memory_mask())
            )

        def feed(x: Tensor, memory: Tensor | None, noted: SavedDecisions) -> Tensor:
            return self.feedforward_residual.apply_dropout(
                self.feedforward(self.feedforward_residual.prepare_input(x))
            )

        yield ReversibleSublayer(attend, _collect_parameters(self.self, self.self_residual))
        if self.has_cross:
            yield ReversibleSublayer(read, _collect_parameters(self.cross, self.cross_residual))
        yield ReversibleSublayer(
            feed, _collect_parameters(self.feedforward, self.feedforward_residual)
        )

    def extend_streams(
        self, streams: ReversibleStreams, state: DecoderState
    ) -> tuple[ReversibleStreams, DecoderState]:
        """Take T more positions of both streams (B, T, D)."""
        sublayer_output, state = self._extend_self(
            self.self_residual.prepare_input(streams.read), state
        )
        streams = streams.add(self.self_residual.apply_dropout(sublayer_output))
        if self.has_cross:
            mask = state.memory.get("mask")
            asked = self.cross_residual.prepare_input(streams.read)
            sublayer_output = self.cross.read(
                asked, state.memory["key_value"], mask=None if mask is None else mask.unsqueeze(1)
            )
            streams = streams.add(self.cross_residual.apply_dropout(sublayer_output))
        sublayer_output = self.feedforward(self.feedforward_residual.prepare_input(streams.read))
        return streams.add(self.feedforward_residual.apply_dropout(sublayer_output)), state


class ReversibleLSHLayer(ReversibleLayer):
    """A reversible layer whose self-attention looks into buckets."""

    self: LSHAttention  # type: ignore[assignment]  # in the place of the Transformer's

    def self_attend(self, x: Tensor, context: ForwardContext, noted: SavedDecisions) -> Tensor:
        """Attend to one's own sequence (B, T, D), in the buckets that are noted."""
        return self.self(
            x, mask=context.mask, causal=self.causal, segment_ids=context.segment_ids, noted=noted
        )

    def start(self, context: ForwardContext) -> DecoderState:
        """Prepare the memory's keys and values once; no bucket holds anything."""
        assert context.memory is not None, "a translator's decoder starts from a memory"
        values, mask = context.memory.values, context.memory.mask
        attention, rows = self.self, values.size(0)
        empty = values.new_empty(rows, attention.heads, 0, attention.rounds, dtype=torch.int32)
        key_value = values.new_empty(rows, 2, attention.heads, 0, attention.head_width)
        memory = {"key_value": self.cross.prepare(values)} if self.has_cross else {}
        if mask is not None and self.has_cross:
            memory["mask"] = mask
        return DecoderState(
            cache={"key_value": key_value, "buckets": empty, "ranks": empty}, memory=memory
        )

    def _extend_self(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Attend from T more positions to those in their buckets, which know their ranks there."""
        found = []
        for piece in x.tensor_split(-(-x.size(1) // MAX_EXTEND_POSITIONS), dim=1):
            output, state = self._extend_chunk(piece, state)
            found.append(output)
        return ExtendOutput(torch.cat(found, dim=1), state)

    def _extend_chunk(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Do so for positions few enough to compare each with all."""
        next_positions = state.next_positions(x.size(1)).unsqueeze(-1)  # (T, 1), or (rows, T, 1)
        query, key_value, hashed = self.self.project(x)
        buckets = hashed.permute(1, 2, 3, 0).int()  # (rows, H, T, R)
        grown = {
            name: state.append(name, new)
            for name, new in (("key_value", key_value), ("buckets", buckets))
        }
        after = grown["key_value"]
        slots = torch.arange(after.length, device=x.device)  # a slot's number is its place
        earlier, itself = (
            _add_head_axis(found) for found in (slots < next_positions, slots == next_positions)
        )  # (..., T, S)
        same = (
            buckets.unsqueeze(-2) == grown["buckets"].filled("buckets").unsqueeze(-3)
        ) & earlier.unsqueeze(-1)  # (rows, H, T, S, R)
        ranks = same.sum(dim=-2, dtype=torch.int32)
        grown["ranks"] = state.append("ranks", ranks)
        ahead = ranks.unsqueeze(-2) - grown["ranks"].filled("ranks").unsqueeze(-3)
        met = (same & (ahead <= self.self.window)).any(dim=-1)
        visible = met | (itself & ~met.any(dim=-1, keepdim=True))
        key, value = after.filled("key_value").unbind(1)
        after = replace(after, cache={name: each.cache[name] for name, each in grown.items()})
        return ExtendOutput(self.self.attend_heads(query, key, value, visible), after)


class Reformer(Block):
    """A run of reversible layers, which keep nothing for the way back: Kitaev et al. (2020).

    Both streams start as the block's input; the output is their mean, for the norm at the stack's end. Norms stand inside, whatever
    model.residual says: a norm after the sum could not be taken off again. Attentions are recorded as encoder.0.0.self and so on.
    """

    final_norm = True
    overridable = ReformerOptions.overridable
    supports_compile = False  # a compiler would keep what reversible layers take care not to keep

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
        """Build a run of layers; `attention=full` leaves hashing out, as the paper's translation does.

        Without a number, there are 2 * model.max_positions / window `buckets`. `ffn_chunks` are those of the feed-forward layers.
        """
        config = build_context.config
        norm = catalogue("norm").load(config.norm)

        def layer() -> ReversibleLayer:
            shape = head_arguments(config)
            cross = None
            if build_context.memory_width is not None:
                cross = CrossAttention(
                    config.width, config.heads, memory_width=build_context.memory_width, **shape
                )
            activation: nn.Module = catalogue("activation").load(config.activation)()
            own = (
                _build_lsh_attention(config, rounds, buckets, window, torch_compile)
                if attention == "lsh"
                else _build_full_attention(build_context)
            )
            return (ReversibleLSHLayer if attention == "lsh" else ReversibleLayer)(
                attention=own,  # type: ignore[arg-type]
                cross=cross,
                feedforward=ChunkedFeedForward(
                    config.width,
                    config.ffn_width,
                    chunks=ffn_chunks,
                    activation=activation,
                    dropout=config.ffn_dropout,
                    bias=config.ffn_bias,
                ),
                residuals=[
                    PreNorm(norm(config.width, config.norm_epsilon), dropout=config.dropout)
                    for _ in range(3 if cross else 2)
                ],
                causal=build_context.causal,
            )

        return cls([layer() for _ in range(layers)])

    def layers(self) -> Iterator[tuple[str, ReversibleLayer]]:
        """Go through the layers, first to last, with their names."""
        for number in range(self.depth):
            layer = getattr(self, str(number))
            yield str(number), layer

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once."""
        sublayers = list(
            chain.from_iterable(layer.sublayers(context) for _, layer in self.layers())
        )
        memory = None if context.memory is None else context.memory.values
        if has_hooks(self) or not torch.is_grad_enabled():
            return run_sublayers(sublayers, x, memory)
        return run_sublayers_reversible(
            sublayers, x, memory, random=self.training and self.has_dropout
        )

    def start(self, context: ForwardContext) -> DecoderState:
        """Stand before the first position."""
        return DecoderState(children={name: layer.start(context) for name, layer in self.layers()})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D)."""
        streams, children = ReversibleStreams(x, x), {}
        for name, layer in self.layers():
            streams, children[name] = layer.extend_streams(streams, state.children[name])
        return ExtendOutput(
            (streams.written + streams.read) / 2, state.advance(x.size(1), children=children)
        )


def _build_lsh_attention(
    config: ModelConfig, rounds: int, buckets: int, window: int, torch_compile: bool
) -> LSHAttention:
    """Build attention by hashing."""
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


def _build_full_attention(build_context: BuildContext) -> SelfAttention:
    """Build the Transformer's attention."""
    config = build_context.config
    within = (
        catalogue("positions")
        .load(config.positions)
        .within(
            heads=config.heads,
            head_width=config.resolved_head_width,
            causal=build_context.causal,
            max_positions=config.max_positions,
        )
    )
    return SelfAttention(
        config.width, config.heads, within=within, window=config.window, **head_arguments(config)
    )


def _collect_parameters(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    """List the weights of several modules."""
    return tuple(chain.from_iterable(module.parameters() for module in modules))


def _add_head_axis(found: Tensor) -> Tensor:
    """Make room for heads where rows differ: (rows, T, S) becomes (rows, 1, T, S)."""
    return found.unsqueeze(1) if found.dim() == 3 else found
