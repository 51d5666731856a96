"""Convolutional layers of ConvS2S as blocks: `conv` in a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dragoman.config import ModelConfig
from dragoman.layers.convs2s import (
    ConvS2SAttention,
    ConvS2SLinear,
    GatedConvolution,
    PlainWeight,
    WeightNormWeight,
)
from dragoman.layers.norms_and_residuals import Residual
from dragoman.models.block_interface import Block, BuildContext, ExtendOutput, build_residual
from dragoman.models.block_list_parser import parse_blocks
from dragoman.models.block_options import ConvolutionOptions
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext
from dragoman.registry import catalogue


class ConvolutionLayer(Block):
    """Gated convolution and, in a decoder, cross-attention: Gehring et al. (2017), figure 1.

    The residual connection of the attention is inside that of the whole layer. Between different
    widths it has a linear projection, `shortcut`.
    """

    overridable = ConvolutionOptions.overridable

    def __init__(
        self,
        *,
        convolution: GatedConvolution,
        residual: Residual,
        cross: ConvS2SAttention | None,
        cross_residual: Residual | None,
        shortcut: ConvS2SLinear | None = None,
        reads_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.convolution = convolution
        self.residual = residual
        if shortcut is not None:
            self.shortcut = shortcut
        self.has_shortcut = shortcut is not None
        self.reads_embeddings = reads_embeddings and cross is not None
        if cross is not None and cross_residual is not None:
            self.cross = cross  # recorded as decoder.0.cross
            self.cross_residual = cross_residual
        self.has_cross = cross is not None
        self.causal = convolution.right_padding == 0
        self.final_norm = residual.final_norm

    @classmethod
    def build(
        cls,
        build_context: BuildContext,
        *,
        kernel_size: int = 3,
        dilation: int = 1,
        width: int = 0,
        weight_norm: bool = True,
        layers: int = 1,
        attention: str = "convs2s",
        activation: str = "glu",
        scale_encoder_grad: bool = False,
    ) -> Block:
        """Build one layer, or several whose attentions share the target embeddings.

        With `scale_encoder_grad` the gradient of the encoder's output is divided by twice the
        number of attentions, as in fairseq.
        """
        config = build_context.config
        weight = WeightNormWeight if weight_norm else PlainWeight
        output_width = width or config.width
        normalizes_input = catalogue("residual").load(config.residual).final_norm  # pre-norm

        def layer(input_width: int) -> ConvolutionLayer:
            cross = cross_residual = None
            if build_context.memory_width is not None and attention != "none":
                assert build_context.memory_width == config.width, "dot products need one width"
                grad_scale = 1 / (2 * attentions) if scale_encoder_grad else 1.0
                cross = ConvS2SAttention(
                    config.width,
                    weight=weight,
                    state_width=output_width,
                    dropout=config.attention_dropout,
                    grad_scale=grad_scale,
                )
                # The layer's own residual connection applies the dropout.
                cross_residual = build_residual(config, dropout=0.0, width=output_width)
            shortcut = None
            if input_width != output_width:
                shortcut = ConvS2SLinear(input_width, output_width, weight=weight)
            return cls(
                convolution=GatedConvolution(
                    input_width,
                    kernel_size,
                    weight=weight,
                    output_width=output_width,
                    causal=build_context.causal,
                    dilation=dilation,
                    dropout=config.dropout,
                    activation=None
                    if activation == "glu"
                    else catalogue("activation").load(activation)(),
                ),
                residual=build_residual(
                    config, width=input_width if normalizes_input else output_width
                ),
                cross=cross,
                cross_residual=cross_residual,
                shortcut=shortcut,
                reads_embeddings=width > 0,
            )

        attentions = max(layers, _count_attentions(config))
        first = layer(build_context.input_width or config.width)
        if layers == 1:
            return first
        return ConvolutionStack([first, *(layer(output_width) for _ in range(layers - 1))])

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for (B, T, D).

        Target embeddings are the layer's input, or the decoder's if it has a width of its own.
        """
        embedded = x if context.embedded is None or not self.reads_embeddings else context.embedded
        return self.forward_with_embeddings(x, embedded, context)

    def forward_with_embeddings(
        self, x: Tensor, embedded: Tensor, context: ForwardContext
    ) -> Tensor:
        """Return the output for (B, T, D), given the target embeddings (B, T, D)."""
        sublayer_input = self.residual.prepare_input(x)
        if context.mask is not None and not self.causal:
            # Padding must equal the zeros outside the sequence (fairseq#427); a causal layer never
            # sees it.
            sublayer_input = sublayer_input.masked_fill(~context.mask.unsqueeze(2), 0.0)
        sublayer_output = self.convolution(sublayer_input)
        if self.has_cross:
            assert context.memory is not None, "cross-attention needs the encoder's output"
            source = self.cross.prepare(context.memory.values, context.memory.embeddings)
            sublayer_output = self._attend(sublayer_output, embedded, source, context.memory_mask())
        return self._add(x, sublayer_output)

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the state before the first position: zeros as left context of the kernel."""
        assert self.causal, "only a decoder's layer generates"
        values, source = context.state_template(), None
        if self.has_cross:
            assert context.memory is not None, "cross-attention needs the encoder's output"
            source = self.cross.prepare(values, context.memory.embeddings)
        shape = (values.size(0), self.convolution.left_padding, self.convolution.input_width)
        return context.initial_state(source, recurrent={"before": values.new_zeros(shape)})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D), and the state after them."""
        return self._extend(x, x, state)

    def extend_with_embeddings(
        self, x: Tensor, embedded: Tensor, state: DecoderState
    ) -> ExtendOutput:
        """Return what `extend` does, given the stack's input at the new positions (B, T, D)."""
        return self._extend(x, embedded, state)

    def _extend(self, x: Tensor, embedded: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions, given their target embeddings (B, T, D)."""
        left_context = state.recurrent["before"]
        sublayer_input = torch.cat([left_context, self.residual.prepare_input(x)], dim=1)
        sublayer_output = self.convolution.convolve(sublayer_input)
        if self.has_cross:
            sublayer_output = self._attend(
                sublayer_output, embedded, state.memory, state.memory_mask
            )
        # Sliced from the front, because a kernel of 1 has no left context.
        recurrent = {"before": sublayer_input[:, x.size(1) :]}
        return ExtendOutput(
            self._add(x, sublayer_output),
            replace(state.advance(x.size(1)), recurrent=recurrent),
        )

    def _add(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Return the residual sum, of an input that is projected where the widths differ."""
        return self.residual.add_output(
            self.shortcut(x) if self.has_shortcut else x, sublayer_output
        )

    def _attend(
        self, x: Tensor, embedded: Tensor, source: dict[str, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Return the residual sum of the convolution's output (B, T, D) and its attention."""
        return self.cross_residual.add_output(
            x, self.cross(self.cross_residual.prepare_input(x), embedded, source, mask=mask)
        )


class ConvolutionStack(Block):
    """Convolutional layers whose attentions all get the input of the first as target embeddings.

    The decoder of Gehring et al. (2017), section 3.3. Its attentions are recorded as
    decoder.0.0.cross, decoder.0.1.cross and so on.
    """

    adds_layer_outputs = True

    def __init__(self, layers: Sequence[ConvolutionLayer]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        self.depth = len(layers)
        self.final_norm = layers[-1].final_norm
        self.reads_embeddings = layers[0].reads_embeddings

    def layers(self) -> Iterator[tuple[str, ConvolutionLayer]]:
        """Yield the layers in order, with their names."""
        for number in range(self.depth):
            layer = getattr(self, str(number))
            yield str(number), layer

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        embedded = x if context.embedded is None or not self.reads_embeddings else context.embedded
        for _, layer in self.layers():
            x = layer.forward_with_embeddings(x, embedded, context)
            context.add_layer_output(x)
        return x

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the state before the first position."""
        return DecoderState(children={name: layer.start(context) for name, layer in self.layers()})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D), and the state after them."""
        return self._extend(x, x, state)

    def extend_with_embeddings(
        self, x: Tensor, embedded: Tensor, state: DecoderState
    ) -> ExtendOutput:
        """Return what `extend` does, given the stack's input at the new positions (B, T, D)."""
        return self._extend(x, embedded, state)

    def _extend(self, x: Tensor, embedded: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions, given their target embeddings (B, T, D)."""
        children = {}
        for name, layer in self.layers():
            x, children[name] = layer._extend(x, embedded, state.children[name])
        return ExtendOutput(x, state.advance(embedded.size(1), children=children))


def _count_attentions(config: ModelConfig) -> int:
    """Return the number of attentions in the conv blocks of a decoder."""
    return sum(
        int(spec.options.get("layers", 1))
        for spec in (parse_blocks(config.decoder, "model.decoder") if config.decoder else ())
        if spec.name == "conv" and spec.options.get("attention") != "none"
    )
