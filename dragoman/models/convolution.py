"""ConvS2S as blocks: `conv` in a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dragoman.layers.convolution import EmbeddedAttention, GatedConvolution, NormedWeight, Weight
from dragoman.layers.residual import Residual
from dragoman.models.blocks import Block, Extended, Place
from dragoman.models.context import Context
from dragoman.models.options import ConvolutionOptions
from dragoman.models.state import State
from dragoman.registry import catalogue


class ConvolutionLayer(Block):
    """A gated convolution and, in a decoder, attention to the memory: Gehring et al. (2017), figure 1.

    The attention's way around it goes inside the convolution's, so that one layer changes the stream once.
    """

    overrides = ConvolutionOptions.overrides

    def __init__(
        self, *, convolution: GatedConvolution, residual: Residual, cross: EmbeddedAttention | None, cross_residual: Residual | None
    ) -> None:
        super().__init__()
        self.convolution = convolution
        self.residual = residual
        if cross is not None and cross_residual is not None:
            self.cross = cross  # recorded as decoder.0.cross
            self.cross_residual = cross_residual
        self.has_cross = cross is not None
        self.causal = convolution.after == 0
        self.final_norm = residual.final_norm

    @classmethod
    def build(
        cls,
        place: Place,
        *,
        kernel: int = 3,
        weight_norm: bool = True,
        layers: int = 1,
        attention: str = "embedded",
        activation: str = "glu",
        damping: bool = False,
    ) -> Block:
        """Build one layer, or a run of several whose attentions share the target embeddings, as the paper's do.

        `attention=none` leaves the attention to other blocks of a decoder; `activation` may stand in the place of the gate;
        `damping` divides the gradient that goes back into the encoder's outputs by twice the attentions, as the released code does.
        """
        config = place.config
        norm, residual = catalogue("norm").load(config.norm), catalogue("residual").load(config.residual)
        weight = NormedWeight if weight_norm else Weight

        def layer() -> ConvolutionLayer:
            cross = cross_residual = None
            if place.memory_width is not None and attention != "none":
                assert place.memory_width == config.width, "a dot product needs one width on both sides"
                gradient = 1 / (2 * layers) if damping else 1.0
                cross = EmbeddedAttention(config.width, weight=weight, dropout=config.attention_dropout, gradient=gradient)
                # Nothing dropped here: the way around the whole layer does it.
                cross_residual = residual(norm(config.width, config.norm_epsilon), dropout=0.0)
            return cls(
                convolution=GatedConvolution(
                    config.width,
                    kernel,
                    weight=weight,
                    causal=place.causal,
                    dropout=config.dropout,
                    activation=None if activation == "glu" else catalogue("activation").load(activation)(),
                ),
                residual=residual(norm(config.width, config.norm_epsilon), dropout=config.dropout),
                cross=cross,
                cross_residual=cross_residual,
            )

        return layer() if layers == 1 else ConvolutionRun([layer() for _ in range(layers)])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once; alone, a layer takes its own input for the target embeddings."""
        return self.change(x, x, context)

    def change(self, x: Tensor, embedded: Tensor, context: Context) -> Tensor:
        """Change (B, T, D), knowing the target embeddings (B, T, D)."""
        inside = self.residual.enter(x)
        if context.mask is not None and not self.causal:
            # Padding must look like the zeros outside the sequence (fairseq#427). A causal layer never looks that way.
            inside = inside.masked_fill(~context.mask.unsqueeze(2), 0.0)
        change = self.convolution(inside, segments=context.segments)
        if self.has_cross:
            assert context.memory is not None, "a layer that attends to a memory must be given one"
            source = self.cross.prepare(context.memory.values, context.memory.embeddings)
            change = self._attend(change, embedded, source, context.memory_mask())
        return self.residual.leave(x, change)

    def start(self, context: Context) -> State:
        """Stand before the first position: zeros where a kernel reaches back."""
        assert self.causal, "only a decoder's layer generates"
        assert context.memory is not None, "a translator's decoder starts from a memory"
        values, mask = context.memory.values, context.memory.mask
        # Without attention nothing is read again, but rows must still know their sentence: an empty tensor for each.
        nothing = {"sentence": values.new_empty(values.size(0), 1, 0)}
        memory = self.cross.prepare(values, context.memory.embeddings) if self.has_cross else nothing
        if mask is not None and self.has_cross:
            memory["mask"] = mask
        return State(carried={"before": values.new_zeros(values.size(0), self.convolution.before, values.size(2))}, memory=memory)

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D)."""
        return self.continued(x, x, state)

    def continued(self, x: Tensor, embedded: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D), knowing the target embeddings (B, T, D) of these positions."""
        before = state.carried["before"]
        inside = torch.cat([before, self.residual.enter(x)], dim=1)
        change = self.convolution.slide(inside)
        if self.has_cross:
            mask = state.memory.get("mask")
            change = self._attend(change, embedded, state.memory, None if mask is None else mask.unsqueeze(1))
        # Counted from the front: a kernel of 1 reaches back over nothing.
        state = State({"before": inside[:, x.size(1) :]}, memory=state.memory, length=state.length, places=state.places)
        return Extended(self.residual.leave(x, change), state.advance(x.size(1)))

    def _attend(self, x: Tensor, embedded: Tensor, source: dict[str, Tensor], mask: Tensor | None) -> Tensor:
        """Add what attention finds to the convolution's output (B, T, D)."""
        return self.cross_residual.leave(x, self.cross(self.cross_residual.enter(x), embedded, source, mask=mask))


class ConvolutionRun(Block):
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

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once."""
        embedded = x
        for _, layer in self.layers():
            x = layer.change(x, embedded, context)
        return x

    def start(self, context: Context) -> State:
        """Stand before the first position."""
        return State(parts={name: layer.start(context) for name, layer in self.layers()})

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D)."""
        embedded, parts = x, {}
        for name, layer in self.layers():
            x, parts[name] = layer.continued(x, embedded, state.parts[name])
        return Extended(x, state.advance(embedded.size(1), parts=parts))
