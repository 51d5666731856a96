"""ConvS2S as blocks: `conv` in a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dragoman.layers.convolution import (
    ConvS2SAttention,
    GatedConvolution,
    PlainWeight,
    WeightNormWeight,
)
from dragoman.layers.residual import Residual
from dragoman.models.block import Block, BuildContext, ExtendOutput
from dragoman.models.block_options import ConvolutionOptions
from dragoman.models.context import ForwardContext
from dragoman.models.decoder_state import DecoderState
from dragoman.registry import catalogue


class ConvolutionLayer(Block):
    """A gated convolution and, in a decoder, attention to the memory: Gehring et al. (2017), figure 1.

    The attention's way around it goes inside the convolution's, so that one layer changes the stream once.
    """

    overridable = ConvolutionOptions.overridable

    def __init__(
        self,
        *,
        convolution: GatedConvolution,
        residual: Residual,
        cross: ConvS2SAttention | None,
        cross_residual: Residual | None,
    ) -> None:
        super().__init__()
        self.convolution = convolution
        self.residual = residual
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
        weight_norm: bool = True,
        layers: int = 1,
        attention: str = "convs2s",
        activation: str = "glu",
        scale_encoder_grad: bool = False,
    ) -> Block:
        """Build one layer, or a run of several whose attentions share the target embeddings, as the paper's do.

        `attention=none` leaves the attention to other blocks of a decoder; `activation` may stand in the place of the gate;
        `damping` divides the gradient that goes back into the encoder's outputs by twice the attentions, as the released code does.
        """
        config = build_context.config
        norm, residual = (
            catalogue("norm").load(config.norm),
            catalogue("residual").load(config.residual),
        )
        weight = WeightNormWeight if weight_norm else PlainWeight

        def layer() -> ConvolutionLayer:
            cross = cross_residual = None
            if build_context.memory_width is not None and attention != "none":
                assert build_context.memory_width == config.width, (
                    "a dot product needs one width on both sides"
                )
                grad_scale = 1 / (2 * layers) if scale_encoder_grad else 1.0
                cross = ConvS2SAttention(
                    config.width,
                    weight=weight,
                    dropout=config.attention_dropout,
                    grad_scale=grad_scale,
                )
                # Nothing dropped here: the way around the whole layer does it.
                cross_residual = residual(norm(config.width, config.norm_epsilon), dropout=0.0)
            return cls(
                convolution=GatedConvolution(
                    config.width,
                    kernel_size,
                    weight=weight,
                    causal=build_context.causal,
                    dropout=config.dropout,
                    activation=None
                    if activation == "glu"
                    else catalogue("activation").load(activation)(),
                ),
                residual=residual(norm(config.width, config.norm_epsilon), dropout=config.dropout),
                cross=cross,
                cross_residual=cross_residual,
            )

        return layer() if layers == 1 else ConvolutionStack([layer() for _ in range(layers)])

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once; alone, a layer takes its own input for the target embeddings."""
        return self.change(x, x, context)

    def change(self, x: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """Change (B, T, D), knowing the target embeddings (B, T, D)."""
        inside = self.residual.prepare_input(x)
        if context.mask is not None and not self.causal:
            # Padding must look like the zeros outside the sequence (fairseq#427). A causal layer never looks that way.
            inside = inside.masked_fill(~context.mask.unsqueeze(2), 0.0)
        change = self.convolution(inside, segment_ids=context.segment_ids)
        if self.has_cross:
            assert context.memory is not None, "a layer that attends to a memory must be given one"
            source = self.cross.prepare(context.memory.values, context.memory.embeddings)
            change = self._attend(change, embedded, source, context.memory_mask())
        return self.residual.add_output(x, change)

    def start(self, context: ForwardContext) -> DecoderState:
        """Stand before the first position: zeros where a kernel reaches back."""
        assert self.causal, "only a decoder's layer generates"
        assert context.memory is not None, "a translator's decoder starts from a memory"
        values, mask = context.memory.values, context.memory.mask
        # Without attention nothing is read again, but rows must still know their sentence: an empty tensor for each.
        nothing = {"sentence": values.new_empty(values.size(0), 1, 0)}
        memory = (
            self.cross.prepare(values, context.memory.embeddings) if self.has_cross else nothing
        )
        if mask is not None and self.has_cross:
            memory["mask"] = mask
        return DecoderState(
            recurrent={
                "before": values.new_zeros(
                    values.size(0), self.convolution.left_padding, values.size(2)
                )
            },
            memory=memory,
        )

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D)."""
        return self.extend_with_embeddings(x, x, state)

    def extend_with_embeddings(
        self, x: Tensor, embedded: Tensor, state: DecoderState
    ) -> ExtendOutput:
        """Take T more positions (B, T, D), knowing the target embeddings (B, T, D) of these positions."""
        left_padding = state.recurrent["before"]
        inside = torch.cat([left_padding, self.residual.prepare_input(x)], dim=1)
        change = self.convolution.convolve(inside)
        if self.has_cross:
            mask = state.memory.get("mask")
            change = self._attend(
                change, embedded, state.memory, None if mask is None else mask.unsqueeze(1)
            )
        # Counted from the front: a kernel of 1 reaches back over nothing.
        state = DecoderState(
            {"before": inside[:, x.size(1) :]},
            memory=state.memory,
            length=state.length,
            position_ids=state.position_ids,
        )
        return ExtendOutput(self.residual.add_output(x, change), state.advance(x.size(1)))

    def _attend(
        self, x: Tensor, embedded: Tensor, source: dict[str, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Add what attention finds to the convolution's output (B, T, D)."""
        return self.cross_residual.add_output(
            x, self.cross(self.cross_residual.prepare_input(x), embedded, source, mask=mask)
        )


class ConvolutionStack(Block):
    """Layers whose attentions all see what went into the first: in a decoder that begins here, the target embeddings.

    This is the paper's decoder (section 3.3). Its attentions are recorded as decoder.0.0.cross, decoder.0.1.cross and so on.
    """

    def __init__(self, layers: Sequence[ConvolutionLayer]) -> None:
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)
        self.depth = len(layers)
        self.final_norm = layers[-1].final_norm

    def layers(self) -> Iterator[tuple[str, ConvolutionLayer]]:
        """Go through the layers, first to last, with their names."""
        for number in range(self.depth):
            layer = getattr(self, str(number))
            yield str(number), layer

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once."""
        embedded = x
        for _, layer in self.layers():
            x = layer.change(x, embedded, context)
        return x

    def start(self, context: ForwardContext) -> DecoderState:
        """Stand before the first position."""
        return DecoderState(children={name: layer.start(context) for name, layer in self.layers()})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D)."""
        embedded, children = x, {}
        for name, layer in self.layers():
            x, children[name] = layer.extend_with_embeddings(x, embedded, state.children[name])
        return ExtendOutput(x, state.advance(embedded.size(1), children=children))
