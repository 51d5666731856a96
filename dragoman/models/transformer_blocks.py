"""Transformer layers as blocks: `transformer`, `cross_attention` and `ffn` in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.attention.multi_head import CrossAttention, RelativeTerms, SelfAttention
from dragoman.config import ModelConfig
from dragoman.layers.feed_forward import FeedForward
from dragoman.layers.norms_and_residuals import Residual
from dragoman.models.block_interface import (
    Block,
    BuildContext,
    ExtendOutput,
    SegmentOutput,
    build_residual,
)
from dragoman.models.block_options import (
    CrossAttentionOptions,
    FeedForwardOptions,
    TransformerOptions,
)
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext
from dragoman.registry import catalogue


class TransformerLayer(Block):
    """Self-attention, cross-attention in a decoder, feed-forward network.

    Vaswani et al. (2017), figure 1.
    """

    bf16_params_by_default = True
    has_segment_memory = True
    overridable = TransformerOptions.overridable

    def __init__(
        self,
        *,
        attention: SelfAttention,
        cross: CrossAttention | None,
        ffn: FeedForward,
        residuals: list[Residual],  # one for each of the above, in this order
        causal: bool,  # in a decoder; the mask is made in ops/attention.py
    ) -> None:
        super().__init__()
        self.causal = causal
        self.self = attention  # recorded as encoder.0.self
        self.self_residual = residuals[0]
        if cross is not None:
            self.cross = cross
            self.cross_residual = residuals[1]
        self.has_cross = cross is not None
        self.ffn = ffn
        self.ffn_residual = residuals[-1]
        self.final_norm = residuals[-1].final_norm

    @classmethod
    def build(cls, build_context: BuildContext) -> TransformerLayer:
        """Build an encoder layer, or a decoder layer with cross-attention."""
        config = build_context.config
        attention = build_self_attention(config, causal=build_context.causal)
        cross = None
        if build_context.memory_width is not None:
            cross = build_cross_attention(config, build_context.memory_width)
        return cls(
            attention=attention,
            cross=cross,
            ffn=build_feed_forward(config),
            residuals=[build_residual(config) for _ in range(3 if cross else 2)],
            causal=build_context.causal,
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        previous = context.previous
        sublayer_output = self.self(
            self.self_residual.prepare_input(x),
            mask=context.self_mask(causal=self.causal, length=x.size(1)),
            causal=self.causal and context.attention_mask is None,
            prefix=context.prefix,
            previous=None if previous is None else self.self_residual.prepare_input(previous),
        )
        x = self.self_residual.add_output(x, sublayer_output)
        if self.has_cross:
            assert context.memory is not None, "cross-attention needs the encoder's output"
            sublayer_output = self.cross(
                self.cross_residual.prepare_input(x),
                context.memory.values,
                mask=context.memory_mask(),
            )
            x = self.cross_residual.add_output(x, sublayer_output)
        sublayer_output = self.ffn(self.ffn_residual.prepare_input(x))
        return self.ffn_residual.add_output(x, sublayer_output)

    def carried_shapes(self, memory: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of Transformer-XL's memory: the layer's inputs at earlier positions."""
        return {"hidden": (memory, self.self.width)} if memory else {}

    def forward_segment(
        self, x: Tensor, context: ForwardContext, previous: Mapping[str, Tensor]
    ) -> SegmentOutput:
        r"""Return the output for a segment (B, T, D) that also attends to earlier ones.

        .. math:: \tilde h = [\mathrm{SG}(m) \circ h], \quad q = h W_q, \quad k, v = \tilde h W

        Dai et al. (2019), "Transformer-XL", segment-level recurrence: earlier hidden states are
        projected again, so the projections, but not the states, get their gradient.
        """
        if "hidden" not in previous:
            return SegmentOutput(self(x, context), {})
        memory = previous["hidden"].detach().to(x.dtype)
        filled = memory if context.filled is None else memory[:, memory.size(1) - context.filled :]
        output = self(x, replace(context, previous=filled))
        kept = max(0, memory.size(1) - x.size(1))  # of the memory; none if a segment is as long
        hidden = x.detach()[:, x.size(1) + kept - memory.size(1) :]
        if kept:
            hidden = torch.cat([memory[:, memory.size(1) - kept :], hidden], dim=1)
        return SegmentOutput(output, {"hidden": hidden})

    def start(self, context: ForwardContext) -> DecoderState:
        """Return an empty KV cache and the projected keys and values of the source."""
        assert self.causal, "only a decoder's layer generates"
        values = context.state_template()
        empty = values.new_empty(values.size(0), 2, self.self.kv_heads, 0, self.self.cache_width)
        return context.initial_state(self._prepare_cross(values), cache={"key_value": empty})

    def start_with_prefix(self, x: Tensor, context: ForwardContext) -> ExtendOutput:
        """Return the output for a prefix (B, S, D), and a KV cache of it."""
        query, key_value = self.self.project(self.self_residual.prepare_input(x))
        key, value = key_value.unbind(1)
        sublayer_output = self.self.attend_heads(
            query, key, value, mask=context.self_mask(causal=False)
        )
        x = self.self_residual.add_output(x, sublayer_output)
        sublayer_output = self.ffn(self.ffn_residual.prepare_input(x))
        return ExtendOutput(
            self.ffn_residual.add_output(x, sublayer_output),
            context.prefix_state(x, {"key_value": key_value}),
        )

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D), causal among themselves."""
        sublayer_output, state = self._extend_self(self.self_residual.prepare_input(x), state)
        x = self.self_residual.add_output(x, sublayer_output)
        if self.has_cross:
            sublayer_output = self.cross.attend_prepared(
                self.cross_residual.prepare_input(x),
                state.memory["key_value"],
                mask=state.memory_mask,
            )
            x = self.cross_residual.add_output(x, sublayer_output)
        sublayer_output = self.ffn(self.ffn_residual.prepare_input(x))
        return ExtendOutput(self.ffn_residual.add_output(x, sublayer_output), state)

    def _prepare_cross(self, memory: Tensor) -> dict[str, Tensor] | None:
        """Return the keys and values of cross-attention, or None without cross-attention."""
        return {"key_value": self.cross.prepare(memory)} if self.has_cross else None

    def _extend_self(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Append T positions to the KV cache and attend from them to it."""
        query, key_value = self.self.project(x, first=state.length)
        state = state.append("key_value", key_value)
        key, value = state.recent("key_value", x.size(1), self.self.window).unbind(1)
        terms = RelativeTerms(query, state.prefix_mask())
        if self.self.needs_distances:
            terms = self.self.causal_terms(query, terms.mask, key.size(-2))
        return ExtendOutput(self.self.attend_with_terms(terms, key, value, causal=True), state)


def build_self_attention(config: ModelConfig, *, causal: bool) -> SelfAttention:
    """Build multi-head self-attention with the relative positions that `config` names."""
    positions = catalogue("positions").load(config.positions)
    relative_position = positions.build_relative_position(
        heads=config.heads,
        head_width=config.resolved_head_width,
        causal=causal,
        max_positions=config.max_positions,
    )
    return SelfAttention(
        config.width,
        config.heads,
        relative_position=relative_position,
        window=config.window,
        **_head_arguments(config),
    )


def build_cross_attention(config: ModelConfig, memory_width: int) -> CrossAttention:
    """Build multi-head cross-attention over an encoder's output (B, S, memory_width)."""
    return CrossAttention(
        config.width, config.heads, memory_width=memory_width, **_head_arguments(config)
    )


def build_feed_forward(config: ModelConfig) -> FeedForward:
    """Build a position-wise feed-forward network."""
    activation: nn.Module = catalogue("activation").load(config.activation)()
    return FeedForward(
        config.width,
        config.ffn_width,
        activation=activation,
        dropout=config.ffn_dropout,
        bias=config.ffn_bias,
    )


def _head_arguments(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments that self-attention and cross-attention have in common."""
    norms = None
    if config.qk_norm != "none":
        norm = catalogue("norm").load(config.qk_norm)
        norms = tuple(norm(config.resolved_head_width, config.norm_epsilon) for _ in range(2))
    return {
        "head_width": config.head_width,
        "value_width": config.value_width,
        "kv_heads": config.kv_heads,
        "norms": norms,
        "talking_heads": config.talking_heads,
        "dropout": config.attention_dropout,
        "bias": config.attention_bias,
    }


class CrossAttentionLayer(Block):
    """Multi-head cross-attention alone: `cross_attention` in a configuration."""

    overridable = CrossAttentionOptions.overridable

    def __init__(self, *, cross: CrossAttention, residual: Residual) -> None:
        super().__init__()
        self.cross = cross  # recorded as decoder.0.cross
        self.residual = residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(cls, build_context: BuildContext) -> CrossAttentionLayer:
        """Build a decoder's layer."""
        config, memory_width = build_context.config, build_context.memory_width
        assert memory_width is not None, "cross_attention is a decoder's block"
        return cls(
            cross=build_cross_attention(config, memory_width), residual=build_residual(config)
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        assert context.memory is not None, "cross-attention needs the encoder's output"
        sublayer_output = self.cross(
            self.residual.prepare_input(x), context.memory.values, mask=context.memory_mask()
        )
        return self.residual.add_output(x, sublayer_output)

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the projected keys and values of the source."""
        assert context.memory is not None, "decoding needs the encoder's output"
        return context.initial_state({"key_value": self.cross.prepare(context.memory.values)})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D)."""
        sublayer_output = self.cross.attend_prepared(
            self.residual.prepare_input(x), state.memory["key_value"], mask=state.memory_mask
        )
        return ExtendOutput(self.residual.add_output(x, sublayer_output), state.advance(x.size(1)))


class FeedForwardLayer(Block):
    """A feed-forward network alone: `ffn` in a configuration."""

    overridable = FeedForwardOptions.overridable

    def __init__(self, *, ffn: FeedForward, residual: Residual) -> None:
        super().__init__()
        self.ffn = ffn
        self.residual = residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(cls, build_context: BuildContext) -> FeedForwardLayer:
        """Build an encoder's or a decoder's layer."""
        config = build_context.config
        return cls(ffn=build_feed_forward(config), residual=build_residual(config))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D), position by position."""
        return self._add_ffn(x)

    def start(self, context: ForwardContext) -> DecoderState:
        """Return an empty state: no position depends on another."""
        return context.initial_state(None)

    def start_with_prefix(self, x: Tensor, context: ForwardContext) -> ExtendOutput:
        """Return the output for a prefix (B, S, D), and an empty state."""
        return ExtendOutput(self._add_ffn(x), context.prefix_state(x, {}))

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D)."""
        return ExtendOutput(self._add_ffn(x), state.advance(x.size(1)))

    def _add_ffn(self, x: Tensor) -> Tensor:
        """Return the residual sum of (B, T, D) and its feed-forward network."""
        return self.residual.add_output(x, self.ffn(self.residual.prepare_input(x)))
