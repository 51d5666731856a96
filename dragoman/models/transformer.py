"""The Transformer's layer as a block: `self` in a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dragoman.attention.multi_head import CrossAttention, SelfAttention
from dragoman.config import ModelConfig
from dragoman.layers.feed_forward import FeedForward
from dragoman.layers.residual import Residual
from dragoman.models.block import Block, BuildContext, ExtendOutput
from dragoman.models.block_options import (
    CrossAttentionOptions,
    FeedForwardOptions,
    TransformerOptions,
)
from dragoman.models.context import ForwardContext, Memory
from dragoman.models.decoder_state import DecoderState
from dragoman.registry import catalogue


class TransformerLayer(Block):
    """Self-attention, in a decoder attention to the memory, feed-forward: Vaswani et al. (2017), figure 1."""

    bf16_params_by_default = True
    overridable = TransformerOptions.overridable

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
    def build(cls, build_context: BuildContext) -> TransformerLayer:
        """Build a layer of an encoder, or of a decoder where there is a memory."""
        config = build_context.config
        norm = catalogue("norm").load(config.norm)
        residual = catalogue("residual").load(config.residual)
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
        cross = None
        if build_context.memory_width is not None:
            cross = CrossAttention(
                config.width,
                config.heads,
                memory_width=build_context.memory_width,
                **head_arguments(config),
            )
        return cls(
            attention=SelfAttention(
                config.width,
                config.heads,
                within=within,
                window=config.window,
                **head_arguments(config),
            ),
            cross=cross,
            feedforward=build_feed_forward(config),
            residuals=[
                residual(norm(config.width, config.norm_epsilon), dropout=config.dropout)
                for _ in range(3 if cross else 2)
            ],
            causal=build_context.causal,
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once."""
        mask = context.self_mask(causal=self.causal)
        sublayer_output = self.self(
            self.self_residual.prepare_input(x),
            mask=mask,
            causal=self.causal,
            position_ids=context.position_ids,
        )
        x = self.self_residual.add_output(x, sublayer_output)
        if self.has_cross:
            assert context.memory is not None, "a layer that attends to a memory must be given one"
            sublayer_output = self.cross(
                self.cross_residual.prepare_input(x),
                context.memory.values,
                mask=context.memory_mask(),
            )
            x = self.cross_residual.add_output(x, sublayer_output)
        return self.feedforward_residual.add_output(
            x, self.feedforward(self.feedforward_residual.prepare_input(x))
        )

    def start(self, context: ForwardContext) -> DecoderState:
        """Prepare the memory's keys and values once; the layer's own are empty."""
        assert self.causal, "only a decoder's layer generates"
        assert context.memory is not None, "a translator's decoder starts from a memory"
        values, mask = context.memory.values, context.memory.mask
        empty = values.new_empty(values.size(0), 2, self.self.kv_heads, 0, self.self.head_width)
        memory = {"key_value": self.cross.prepare(values)} if self.has_cross else {}
        if mask is not None and self.has_cross:
            memory["mask"] = mask
        return DecoderState(cache={"key_value": empty}, memory=memory)

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D), which see all before them and of each other what came before."""
        sublayer_output, state = self._extend_self(self.self_residual.prepare_input(x), state)
        x = self.self_residual.add_output(x, sublayer_output)
        if self.has_cross:
            mask = state.memory.get("mask")
            prepared = state.memory["key_value"]
            sublayer_output = self.cross.read(
                self.cross_residual.prepare_input(x),
                prepared,
                mask=None if mask is None else mask.unsqueeze(1),
            )
            x = self.cross_residual.add_output(x, sublayer_output)
        return ExtendOutput(
            self.feedforward_residual.add_output(
                x, self.feedforward(self.feedforward_residual.prepare_input(x))
            ),
            state,
        )

    def _extend_self(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Attend from T more positions to all that the cache holds with them."""
        next_positions = (
            state.next_positions(x.size(1))
            if self.self.needs_distances or state.position_ids is not None
            else None
        )
        query, key_value = self.self.project(
            x,
            first=state.length,
            position_ids=None if state.position_ids is None else next_positions,
        )
        state = state.append("key_value", key_value)
        visible, bias = state.visible(x.size(1)), None
        causal = visible is None
        # Where all rows stand at one place, slots before the window need not be read; the others' masks are as wide as the cache.
        first = (
            max(0, state.length - x.size(1) - self.self.window)
            if self.self.window and causal
            else 0
        )
        key, value = state.filled("key_value")[..., first:, :].unbind(1)
        if self.self.needs_distances and next_positions is not None:
            slots = torch.arange(
                first, state.length, device=x.device
            )  # a slot's number is its place
            query, visible, bias = self.self.relative_terms(query, visible, next_positions, slots)
        return ExtendOutput(
            self.self.attend_heads(query, key, value, mask=visible, causal=causal, bias=bias), state
        )


def build_feed_forward(config: ModelConfig) -> FeedForward:
    """Build a layer's feed-forward part."""
    activation: nn.Module = catalogue("activation").load(config.activation)()
    dropout, bias = config.ffn_dropout, config.ffn_bias
    return FeedForward(
        config.width, config.ffn_width, activation=activation, dropout=dropout, bias=bias
    )


def head_arguments(config: ModelConfig) -> dict[str, Any]:
    """Read what both attentions of a layer have in common; each has norms of its own."""
    norms = None
    if config.qk_norm != "none":
        norm = catalogue("norm").load(config.qk_norm)
        norms = tuple(norm(config.resolved_head_width, config.norm_epsilon) for _ in range(2))
    return {
        "head_width": config.head_width,
        "kv_heads": config.kv_heads,
        "norms": norms,
        "talking_heads": config.talking_heads,
        "dropout": config.attention_dropout,
        "bias": config.attention_bias,
    }


class CrossAttentionLayer(Block):
    """Multi-head attention to the memory and nothing else: `attend` in a configuration."""

    overridable = CrossAttentionOptions.overridable

    def __init__(self, *, cross: CrossAttention, residual: Residual) -> None:
        super().__init__()
        self.cross = cross  # recorded as decoder.0.cross
        self.residual = residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(cls, build_context: BuildContext) -> CrossAttentionLayer:
        """Build a decoder's layer."""
        config = build_context.config
        assert build_context.memory_width is not None, (
            "attend stands in decoders only: its options say so"
        )
        cross = CrossAttention(
            config.width,
            config.heads,
            memory_width=build_context.memory_width,
            **head_arguments(config),
        )
        return cls(cross=cross, residual=_build_residual(build_context))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once."""
        assert context.memory is not None, "a layer that attends to a memory must be given one"
        sublayer_output = self.cross(
            self.residual.prepare_input(x), context.memory.values, mask=context.memory_mask()
        )
        return self.residual.add_output(x, sublayer_output)

    def start(self, context: ForwardContext) -> DecoderState:
        """Prepare the memory's keys and values once."""
        assert context.memory is not None, "a translator's decoder starts from a memory"
        memory = {"key_value": self.cross.prepare(context.memory.values)}
        if context.memory.mask is not None:
            memory["mask"] = context.memory.mask
        return DecoderState(recurrent=_empty_row_state(context.memory), memory=memory)

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D), each of which asks for itself."""
        mask = state.memory.get("mask")
        sublayer_output = self.cross.read(
            self.residual.prepare_input(x),
            state.memory["key_value"],
            mask=None if mask is None else mask.unsqueeze(1),
        )
        return ExtendOutput(self.residual.add_output(x, sublayer_output), state.advance(x.size(1)))


class FeedForwardLayer(Block):
    """The feed-forward layer and nothing else: `feedforward` in a configuration."""

    overridable = FeedForwardOptions.overridable

    def __init__(self, *, feedforward: FeedForward, residual: Residual) -> None:
        super().__init__()
        self.feedforward = feedforward
        self.residual = residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(cls, build_context: BuildContext) -> FeedForwardLayer:
        """Build a layer of either side."""
        config = build_context.config
        return cls(feedforward=build_feed_forward(config), residual=_build_residual(build_context))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) by itself."""
        return self._add_ffn(x)

    def start(self, context: ForwardContext) -> DecoderState:
        """Stand before the first position; nothing will be remembered."""
        assert context.memory is not None, "a translator's decoder starts from a memory"
        return DecoderState(
            recurrent=_empty_row_state(context.memory),
            memory={"sentence": context.memory.values.new_empty(context.memory.rows, 1, 0)},
        )

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D)."""
        return ExtendOutput(self._add_ffn(x), state.advance(x.size(1)))

    def _add_ffn(self, x: Tensor) -> Tensor:
        return self.residual.add_output(x, self.feedforward(self.residual.prepare_input(x)))


def _empty_row_state(memory: Memory) -> dict[str, Tensor]:
    """Give a layer that remembers nothing an empty tensor for each row, so that rows can still be counted."""
    return {"row": memory.values.new_empty(memory.rows, 0)}


def _build_residual(build_context: BuildContext) -> Residual:
    """Build the way around a layer."""
    config = build_context.config
    norm = catalogue("norm").load(config.norm)(config.width, config.norm_epsilon)
    found = catalogue("residual").load(config.residual)(norm, dropout=config.dropout)
    assert isinstance(found, Residual), "a residual wiring must be a Residual"
    return found
