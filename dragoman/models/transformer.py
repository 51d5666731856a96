"""The Transformer's layer as a block: `self` in a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dragoman.attention.multihead import CrossAttention, SelfAttention
from dragoman.config import ModelConfig
from dragoman.layers.feedforward import FeedForward
from dragoman.layers.residual import Residual
from dragoman.models.blocks import Block, Extended, Place
from dragoman.models.context import Context
from dragoman.models.options import TransformerOptions
from dragoman.models.state import State
from dragoman.registry import catalogue


class TransformerLayer(Block):
    """Self-attention, in a decoder attention to the memory, feed-forward: Vaswani et al. (2017), figure 1."""

    halves = True
    overrides = TransformerOptions.overrides

    def __init__(
        self,
        *,
        attention: SelfAttention,
        cross: CrossAttention | None,
        feedforward: FeedForward,
        residuals: list[Residual],  # around each of the above, in this order
        causal: bool,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.self = attention  # recorded as encoder.0.self
        self.self_residual = residuals[0]
        if cross is not None:
            self.cross = cross
            self.cross_residual = residuals[1]
        self.has_cross = cross is not None
        self.feedforward = feedforward
        self.feedforward_residual = residuals[-1]
        self.final_norm = residuals[-1].final_norm

    @classmethod
    def build(cls, place: Place) -> TransformerLayer:
        """Build a layer of an encoder, or of a decoder where there is a memory."""
        config = place.config
        norm = catalogue("norm").load(config.norm)
        residual = catalogue("residual").load(config.residual)
        within = (
            catalogue("positions")
            .load(config.positions)
            .within(heads=config.heads, head_width=config.head_size, causal=place.causal, max_positions=config.max_positions)
        )
        cross = None
        if place.memory_width is not None:
            cross = CrossAttention(config.width, config.heads, memory_width=place.memory_width, **shape_of_heads(config))
        return cls(
            attention=SelfAttention(config.width, config.heads, within=within, window=config.window, **shape_of_heads(config)),
            cross=cross,
            feedforward=feedforward_of(config),
            residuals=[residual(norm(config.width, config.norm_epsilon), dropout=config.dropout) for _ in range(3 if cross else 2)],
            causal=place.causal,
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once."""
        mask = context.self_mask(causal=self.causal)
        change = self.self(self.self_residual.enter(x), mask=mask, causal=self.causal, places=context.places)
        x = self.self_residual.leave(x, change)
        if self.has_cross:
            assert context.memory is not None, "a layer that attends to a memory must be given one"
            change = self.cross(self.cross_residual.enter(x), context.memory.values, mask=context.memory_mask())
            x = self.cross_residual.leave(x, change)
        return self.feedforward_residual.leave(x, self.feedforward(self.feedforward_residual.enter(x)))

    def start(self, context: Context) -> State:
        """Prepare the memory's keys and values once; the layer's own are empty."""
        assert self.causal, "only a decoder's layer generates"
        assert context.memory is not None, "a translator's decoder starts from a memory"
        values, mask = context.memory.values, context.memory.mask
        empty = values.new_empty(values.size(0), 2, self.self.kv_heads, 0, self.self.head_width)
        memory = {"key_value": self.cross.prepare(values)} if self.has_cross else {}
        if mask is not None and self.has_cross:
            memory["mask"] = mask
        return State(cache={"key_value": empty}, memory=memory)

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D), which see all before them and of each other what came before."""
        change, state = self._extend_self(self.self_residual.enter(x), state)
        x = self.self_residual.leave(x, change)
        if self.has_cross:
            mask = state.memory.get("mask")
            prepared = state.memory["key_value"]
            change = self.cross.read(self.cross_residual.enter(x), prepared, mask=None if mask is None else mask.unsqueeze(1))
            x = self.cross_residual.leave(x, change)
        return Extended(self.feedforward_residual.leave(x, self.feedforward(self.feedforward_residual.enter(x))), state)

    def _extend_self(self, x: Tensor, state: State) -> Extended:
        """Attend from T more positions to all that the cache holds with them."""
        coming = state.coming(x.size(1)) if self.self.measures or state.places is not None else None
        query, key_value = self.self.project(x, first=state.length, places=None if state.places is None else coming)
        state = state.append("key_value", key_value)
        visible, bias = state.visible(x.size(1)), None
        causal = visible is None
        # Where all rows stand at one place, slots before the window need not be read; the others' masks are as wide as the cache.
        first = max(0, state.length - x.size(1) - self.self.window) if self.self.window and causal else 0
        key, value = state.filled("key_value")[..., first:, :].unbind(1)
        if self.self.measures and coming is not None:
            slots = torch.arange(first, state.length, device=x.device)  # a slot's number is its place
            query, visible, bias = self.self.reach(query, visible, coming, slots)
        return Extended(self.self.look(query, key, value, mask=visible, causal=causal, bias=bias), state)


def feedforward_of(config: ModelConfig) -> FeedForward:
    """Build a layer's feed-forward part."""
    activation: nn.Module = catalogue("activation").load(config.activation)()
    dropout, bias = config.feedforward_dropout, config.feedforward_bias
    return FeedForward(config.width, config.feedforward, activation=activation, dropout=dropout, bias=bias)


def shape_of_heads(config: ModelConfig) -> dict[str, Any]:
    """Read what both attentions of a layer have in common; each has norms of its own."""
    norms = None
    if config.qk_norm != "none":
        norm = catalogue("norm").load(config.qk_norm)
        norms = tuple(norm(config.head_size, config.norm_epsilon) for _ in range(2))
    return {
        "head_width": config.head_width,
        "kv_heads": config.kv_heads,
        "norms": norms,
        "talking": config.talking_heads,
        "dropout": config.attention_dropout,
        "bias": config.attention_bias,
    }
