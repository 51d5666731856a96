"""Temporal convolutional network (TCN): causal dilated convolutions as a block, `tcn`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dragoman import ops
from dragoman.layers.convs2s import GatedConvolution, WeightNormWeight
from dragoman.models.block_interface import Block, BuildContext, ExtendOutput
from dragoman.models.block_options import TCNOptions
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext


class TCNLayer(Block):
    r"""Residual block of two causal dilated convolutions, each with ReLU and dropout.

    .. math:: o = \mathrm{ReLU}(x + F(x))

    Bai, Kolter and Koltun (2018), figure 1(b); weights are normalized. It is causal in encoders
    too: the last position has read the whole sequence, if the dilations reach that far. Dropout
    drops single features, where the paper drops channels.
    """

    overridable = TCNOptions.overridable

    def __init__(
        self, first: GatedConvolution, second: GatedConvolution, *, dropout: float
    ) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.dropout = dropout

    @classmethod
    def build(
        cls, build_context: BuildContext, *, kernel_size: int = 3, dilation: int = 1
    ) -> TCNLayer:
        """Build an encoder's or a decoder's block."""
        config = build_context.config
        first, second = (
            GatedConvolution(
                config.width,
                kernel_size,
                weight=WeightNormWeight,
                causal=True,
                dilation=dilation,
                dropout=config.dropout,
                activation=nn.ReLU(),
            )
            for _ in range(2)
        )
        return cls(first, second, dropout=config.dropout)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D); padding comes last and is not read."""
        return torch.relu(x + self._drop(self.second(self._drop(self.first(x)))))

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the state before the first position: zeros to the left of both kernels."""
        assert context.memory is not None, "decoding needs the encoder's output"
        rows, _, width = context.memory.values.shape
        before = context.memory.values.new_zeros(rows, self.first.left_padding, width)
        return context.initial_state(None, recurrent={"first": before, "second": before})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D), and the state after them."""
        count = x.size(1)
        first_input = torch.cat([state.recurrent["first"], x], dim=1)
        hidden = self._drop(self.first.convolve(first_input))
        second_input = torch.cat([state.recurrent["second"], hidden], dim=1)
        output = torch.relu(x + self._drop(self.second.convolve(second_input)))
        recurrent = {"first": first_input[:, count:], "second": second_input[:, count:]}
        return ExtendOutput(output, replace(state.advance(count), recurrent=recurrent))

    def _drop(self, x: Tensor) -> Tensor:
        """Apply dropout to (B, T, D), in training."""
        return ops.dropout(x, self.dropout, training=self.training)
