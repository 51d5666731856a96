"""The Reformer as a block: `reformer(layers=6)` in a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.buckets import suggested
from dragoman.attention.lsh import LSHAttention
from dragoman.attention.multihead import CrossAttention, SelfAttention
from dragoman.attention.recording import is_watched
from dragoman.config import ModelConfig
from dragoman.layers.chunked import ChunkedFeedForward
from dragoman.layers.residual import PreNorm
from dragoman.layers.reversible import Change, Noted, run_plainly, run_reversibly
from dragoman.models.blocks import Block, Extended, Place
from dragoman.models.context import Context
from dragoman.models.options import ReformerOptions
from dragoman.models.state import State
from dragoman.models.transformer import TransformerLayer, shape_of_heads
from dragoman.registry import catalogue

MOST_AT_ONCE = 64  # positions by which a cache is extended: what they meet is (64, S) large


class Streams(NamedTuple):
    """The two streams: the one that the next change adds to, and the one that it reads."""

    written: Tensor  # (B, T, D)
    read: Tensor  # (B, T, D)

    def add(self, change: Tensor) -> Streams:
        """Add a change, and let the next one read what this one wrote."""
        return Streams(self.read, self.written + change)


class ReversibleLayer(TransformerLayer):
    """A Transformer's layer over two streams: each sub-layer reads one, normalised, and adds to the other."""

    compiles = False  # runs within a Reformer

    self_residual: PreNorm
    cross_residual: PreNorm
    feedforward_residual: PreNorm

    def heed(self, x: Tensor, context: Context, noted: Noted) -> Tensor:
        """Attend to one's own sequence (B, T, D)."""
        return self.self(x, mask=context.self_mask(causal=self.causal), causal=self.causal, places=context.places)

    def changes(self, context: Context) -> Iterator[Change]:
        """List what the layer adds to the streams, in turn."""

        def attend(x: Tensor, memory: Tensor | None, noted: Noted) -> Tensor:
            return self.self_residual.dropped(self.heed(self.self_residual.enter(x), context, noted))

        def read(x: Tensor, memory: Tensor | None, noted: Noted) -> Tensor:
            assert memory is not None, "a layer that attends to a memory must be given one"
            return self.cross_residual.dropped(self.cross(self.cross_residual.enter(x), memory, mask=context.memory_mask()))

        def feed(x: Tensor, memory: Tensor | None, noted: Noted) -> Tensor:
            return self.feedforward_residual.dropped(self.feedforward(self.feedforward_residual.enter(x)))

        yield Change(attend, _parameters(self.self, self.self_residual))
        if self.has_cross:
            yield Change(read, _parameters(self.cross, self.cross_residual))
        yield Change(feed, _parameters(self.feedforward, self.feedforward_residual))

    def continued(self, streams: Streams, state: State) -> tuple[Streams, State]:
        """Take T more positions of both streams (B, T, D)."""
        change, state = self._extend_self(self.self_residual.enter(streams.read), state)
        streams = streams.add(self.self_residual.dropped(change))
        if self.has_cross:
            mask = state.memory.get("mask")
            asked = self.cross_residual.enter(streams.read)
            change = self.cross.read(asked, state.memory["key_value"], mask=None if mask is None else mask.unsqueeze(1))
            streams = streams.add(self.cross_residual.dropped(change))
        change = self.feedforward(self.feedforward_residual.enter(streams.read))
        return streams.add(self.feedforward_residual.dropped(change)), state


class HashedLayer(ReversibleLayer):
    """A reversible layer whose self-attention looks into buckets."""

    self: LSHAttention  # type: ignore[assignment]  # in the place of the Transformer's

    def heed(self, x: Tensor, context: Context, noted: Noted) -> Tensor:
        """Attend to one's own sequence (B, T, D), in the buckets that are noted."""
        return self.self(x, mask=context.mask, causal=self.causal, segments=context.segments, noted=noted)

    def start(self, context: Context) -> State:
        """Prepare the memory's keys and values once; no bucket holds anything."""
        assert context.memory is not None, "a translator's decoder starts from a memory"
        values, mask = context.memory.values, context.memory.mask
        attention, rows = self.self, values.size(0)
        empty = values.new_empty(rows, attention.heads, 0, attention.rounds, dtype=torch.int32)
        key_value = values.new_empty(rows, 2, attention.heads, 0, attention.head_width)
        memory = {"key_value": self.cross.prepare(values)} if self.has_cross else {}
        if mask is not None and self.has_cross:
            memory["mask"] = mask
        return State(cache={"key_value": key_value, "buckets": empty, "ranks": empty}, memory=memory)

    def _extend_self(self, x: Tensor, state: State) -> Extended:
        """Attend from T more positions to those in their buckets, which know their ranks there."""
        found = []
        for piece in x.tensor_split(-(-x.size(1) // MOST_AT_ONCE), dim=1):
            output, state = self._extend_few(piece, state)
            found.append(output)
        return Extended(torch.cat(found, dim=1), state)

    def _extend_few(self, x: Tensor, state: State) -> Extended:
        """Do so for positions few enough to compare each with all."""
        coming = state.coming(x.size(1)).unsqueeze(-1)  # (T, 1), or (rows, T, 1)
        query, key_value, hashed = self.self.project(x)
        buckets = hashed.permute(1, 2, 3, 0).int()  # (rows, H, T, R)
        grown = {name: state.append(name, new) for name, new in (("key_value", key_value), ("buckets", buckets))}
        after = grown["key_value"]
        slots = torch.arange(after.length, device=x.device)  # a slot's number is its place
        earlier, itself = (_over_heads(found) for found in (slots < coming, slots == coming))  # (..., T, S)
        same = (buckets.unsqueeze(-2) == grown["buckets"].filled("buckets").unsqueeze(-3)) & earlier.unsqueeze(-1)  # (rows, H, T, S, R)
        ranks = same.sum(dim=-2, dtype=torch.int32)
        grown["ranks"] = state.append("ranks", ranks)
        ahead = ranks.unsqueeze(-2) - grown["ranks"].filled("ranks").unsqueeze(-3)
        met = (same & (ahead <= self.self.window)).any(dim=-1)
        visible = met | (itself & ~met.any(dim=-1, keepdim=True))
        key, value = after.filled("key_value").unbind(1)
        after = replace(after, cache={name: each.cache[name] for name, each in grown.items()})
        return Extended(self.self.look(query, key, value, visible), after)


class Reformer(Block):
    """A run of reversible layers, which keep nothing for the way back: Kitaev et al. (2020).

    Both streams start as the block's input; the output is their mean, for the norm at the stack's end. Norms stand inside, whatever
    model.residual says: a norm after the sum could not be taken off again. Attentions are recorded as encoder.0.0.self and so on.
    """

    final_norm = True
    overrides = ReformerOptions.overrides
    compiles = False  # a compiler would keep what reversible layers take care not to keep

    def __init__(self, layers: Sequence[ReversibleLayer]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        self.depth = len(layers)
        self.drops = any(getattr(module, "dropout", 0.0) for module in self.modules())

    @classmethod
    def build(
        cls,
        place: Place,
        *,
        layers: int = 1,
        attention: str = "lsh",
        rounds: int = 4,
        buckets: int = 0,
        window: int = 64,
        compiled: bool = False,
        chunks: int = 1,
    ) -> Reformer:
        """Build a run of layers; `attention=full` leaves hashing out, as the paper's translation does.

        Without a number, there are 2 * model.max_positions / window `buckets`. `chunks` are those of the feed-forward layers.
        """
        config = place.config
        norm = catalogue("norm").load(config.norm)

        def layer() -> ReversibleLayer:
            shape = shape_of_heads(config)
            cross = None
            if place.memory_width is not None:
                cross = CrossAttention(config.width, config.heads, memory_width=place.memory_width, **shape)
            activation: nn.Module = catalogue("activation").load(config.activation)()
            own = _hashed(config, rounds, buckets, window, compiled) if attention == "lsh" else _full(place)
            return (HashedLayer if attention == "lsh" else ReversibleLayer)(
                attention=own,  # type: ignore[arg-type]
                cross=cross,
                feedforward=ChunkedFeedForward(
                    config.width,
                    config.feedforward,
                    chunks=chunks,
                    activation=activation,
                    dropout=config.feedforward_dropout,
                    bias=config.feedforward_bias,
                ),
                residuals=[PreNorm(norm(config.width, config.norm_epsilon), dropout=config.dropout) for _ in range(3 if cross else 2)],
                causal=place.causal,
            )

        return cls([layer() for _ in range(layers)])

    def layers(self) -> Iterator[tuple[str, ReversibleLayer]]:
        """Go through the layers, first to last, with their names."""
        for number in range(self.depth):
            layer = getattr(self, str(number))
            yield str(number), layer

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once."""
        changes = list(chain.from_iterable(layer.changes(context) for _, layer in self.layers()))
        memory = None if context.memory is None else context.memory.values
        if is_watched(self) or not torch.is_grad_enabled():
            return run_plainly(changes, x, memory)
        return run_reversibly(changes, x, memory, random=self.training and self.drops)

    def start(self, context: Context) -> State:
        """Stand before the first position."""
        return State(parts={name: layer.start(context) for name, layer in self.layers()})

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D)."""
        streams, parts = Streams(x, x), {}
        for name, layer in self.layers():
            streams, parts[name] = layer.continued(streams, state.parts[name])
        return Extended((streams.written + streams.read) / 2, state.advance(x.size(1), parts=parts))


def _hashed(config: ModelConfig, rounds: int, buckets: int, window: int, compiled: bool) -> LSHAttention:
    """Build attention by hashing."""
    return LSHAttention(
        config.width,
        config.heads,
        head_width=config.head_width,
        rounds=rounds,
        buckets=buckets or suggested(config.max_positions, window),
        window=window,
        bias=config.attention_bias,
        compiled=compiled,
    )


def _full(place: Place) -> SelfAttention:
    """Build the Transformer's attention."""
    config = place.config
    within = (
        catalogue("positions")
        .load(config.positions)
        .within(heads=config.heads, head_width=config.head_size, causal=place.causal, max_positions=config.max_positions)
    )
    return SelfAttention(config.width, config.heads, within=within, window=config.window, **shape_of_heads(config))


def _parameters(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    """List the weights of several modules."""
    return tuple(chain.from_iterable(module.parameters() for module in modules))


def _over_heads(found: Tensor) -> Tensor:
    """Make room for heads where rows differ: (rows, T, S) becomes (rows, 1, T, S)."""
    return found.unsqueeze(1) if found.dim() == 3 else found
