"""Recurrences: a vector that reads a sequence one position after another.

Whole sequences go through PyTorch's kernels, single positions through cells that do the same; both share one set of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.layers.residual import Residual
from dragoman.ops import dropout

RNNState = dict[str, Tensor]  # what a recurrence remembers, by name: (B, layers, D)
LayerStates = list[tuple[Tensor, ...]]  # the same, layer by layer: (B, D)

MemorySummary = Callable[
    [Tensor, Tensor | None], Tensor
]  # sums up values (B, S, D), real where a mask (B, S) is True: (B, D)


class RNNOutput(NamedTuple):
    """What a recurrence wrote, and what it remembers."""

    output: Tensor  # (B, T, D) after `run`, (B, D) after `step`
    rnn_state: RNNState


class RNN(nn.Module):
    """Layers of cells above each other, dropout between them in training."""

    kernels: ClassVar[type[nn.LSTM] | type[nn.GRU]]
    state_names: ClassVar[
        tuple[str, ...]
    ]  # what is carried from one position to the next; the first is what the cell shows
    gates: ClassVar[int]  # matrices that PyTorch stores as one

    def __init__(self, inputs: int, width: int, *, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.kernel = self.kernels(
            inputs,
            width,
            num_layers=layers,
            dropout=dropout if layers > 1 else 0.0,
            batch_first=True,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give first values: Xavier for what comes in, orthogonal for what comes back (Bahdanau et al. 2015, appendix B.1), no bias."""
        for layer in range(self.layers):
            weight_ih, back, *biases = self._weights(layer)
            for gate in range(self.gates):
                rows = slice(gate * self.width, (gate + 1) * self.width)
                nn.init.xavier_uniform_(weight_ih.data[rows])
                nn.init.orthogonal_(back.data[rows])
            for bias in biases:
                nn.init.zeros_(bias)

    def zero_state(self, like: Tensor) -> RNNState:
        """Remember nothing yet, for the rows, device and type of a tensor (B, ...)."""
        return {
            name: like.new_zeros(like.size(0), self.layers, self.width) for name in self.state_names
        }

    def run(self, x: Tensor, rnn_state: RNNState) -> RNNOutput:
        """Read all positions of (B, T, D) in one call of the kernel."""
        states = [
            rnn_state[name].transpose(0, 1).contiguous().to(x.dtype) for name in self.state_names
        ]
        if x.is_cuda and self.training and self.kernel.dropout:
            return self._run_by_layer(x, states)
        output, after = self.kernel(x, tuple(states) if len(states) > 1 else states[0])
        after = after if len(states) > 1 else (after,)
        return RNNOutput(
            output,
            {
                name: state.transpose(0, 1)
                for name, state in zip(self.state_names, after, strict=True)
            },
        )

    def _run_by_layer(self, x: Tensor, states: list[Tensor]) -> RNNOutput:
        """Call the kernel for each layer by itself: cuDNN's dropout waits for the device and cannot be replayed, ours can."""
        kernel: Any = torch.lstm if isinstance(self.kernel, nn.LSTM) else torch.gru
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.layers):
            x = dropout(x, self.kernel.dropout) if layer else x
            began = [state[layer : layer + 1] for state in states]
            x, *after = kernel(
                x,
                began if len(began) > 1 else began[0],
                self._weights(layer),
                True,
                1,
                0.0,
                True,
                False,
                True,
            )
            ends.append(tuple(after))
        return RNNOutput(
            x,
            {
                name: torch.cat(parts).transpose(0, 1)
                for name, parts in zip(self.state_names, zip(*ends, strict=True), strict=True)
            },
        )

    def run_forward(self, x: Tensor) -> Tensor:
        """Read (B, T, D) from the first position; padding stands at the end, where what is real never looks."""
        return self.run(x, self.zero_state(x)).output

    def run_reversed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Read (B, T, D) from each row's last real position; what was read at a position stands there."""
        return reverse_padded(self.run_forward(reverse_padded(x, mask)), mask)

    def step(self, x: Tensor, rnn_state: RNNState) -> RNNOutput:
        """Read one position (B, D) by cells."""
        layers = self.advance(self.project(x), self.split(rnn_state))
        return RNNOutput(layers[-1][0], self.join(layers))

    def project(self, x: Tensor) -> Tensor:
        """Do at once for all positions what the first gates need of the first n numbers of their input: (..., n)."""
        weight_ih, _, bias, _ = self._weights(0)
        return F.linear(x, weight_ih[:, : x.size(-1)], bias)

    def extra_input_weight(self, width: int) -> Tensor:
        """Give the weights (m, gates * D) of what comes in beside the first `width` numbers, to be taken out once for all positions."""
        return self._weights(0)[0][:, width:].t()

    def split(self, rnn_state: RNNState) -> LayerStates:
        """Take what is carried apart, so that a loop need not put it together at every position."""
        return [
            tuple(rnn_state[name][:, layer] for name in self.state_names)
            for layer in range(self.layers)
        ]

    def join(self, layers: LayerStates) -> RNNState:
        """Put together what `split` took apart."""
        return {
            name: torch.stack(states, dim=1)
            for name, states in zip(self.state_names, zip(*layers, strict=True), strict=True)
        }

    def advance(self, gates: Tensor, layers: LayerStates) -> LayerStates:
        """Move all layers on by one position, whose input has become `gates` (B, gates * D)."""
        after: LayerStates = []
        for layer, states in enumerate(layers):
            weight_ih, back, bias, bias_hh = self._weights(layer)
            if layer:
                x = after[-1][0]
                x = dropout(x, self.kernel.dropout) if self.training and self.kernel.dropout else x
                gates = F.linear(x, weight_ih, bias)
            hidden = F.linear(states[0].to(gates.dtype), back, bias_hh)
            after.append(self.cell(gates, hidden, tuple(state.to(gates.dtype) for state in states)))
        return after

    def cell(self, gates: Tensor, hidden: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Make new states (B, D) of what comes in and what comes back, (B, gates * D) each."""
        raise NotImplementedError

    def _weights(self, layer: int) -> list[Tensor]:
        """Find a layer's weights by PyTorch's names for them."""
        return [
            getattr(self.kernel, f"{name}_l{layer}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]


class LSTM(RNN):
    r"""Long short-term memory: Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000).

    .. math:: c_t = f_t \odot c_{t-1} + i_t \odot g_t, \quad h_t = o_t \odot \tanh c_t
    """

    kernels = nn.LSTM
    state_names = ("hidden", "cell")
    gates = 4

    def reset_parameters(self) -> None:
        """Fill as every recurrence, but begin by remembering: forget gates get a bias of 1 (Jozefowicz et al. 2015)."""
        super().reset_parameters()
        for layer in range(self.layers):
            nn.init.ones_(self._weights(layer)[2].data[self.width : 2 * self.width])

    def cell(self, gates: Tensor, hidden: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Make new states (B, D) of what comes in and what comes back, (B, 4 D) each."""
        if gates.is_cuda:  # what torch.lstm_cell calls after its products
            new_hidden, new_cell, _ = torch.ops.aten._thnn_fused_lstm_cell(gates, hidden, states[1])
            return new_hidden, new_cell
        enter, keep, new, output_gate = (gates + hidden).chunk(4, dim=-1)
        new_cell = keep.sigmoid() * states[1] + enter.sigmoid() * new.tanh()
        return output_gate.sigmoid() * new_cell.tanh(), new_cell


class GRU(RNN):
    r"""The gated recurrent unit: Cho et al. (2014), in the form of PyTorch and cuDNN.

    .. math:: h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}, \quad n_t = \tanh(W x_t + b + r_t \odot (U h_{t-1} + d))

    The paper resets before the product, U (r ∘ h); here it is after it, which kernels compute in one product.
    """

    kernels = nn.GRU
    state_names = ("hidden",)
    gates = 3

    def cell(self, gates: Tensor, hidden: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Make a new state (B, D) of what comes in and what comes back, (B, 3 D) each."""
        if gates.is_cuda:  # what torch.gru_cell calls after its products
            return (torch.ops.aten._thnn_fused_gru_cell(gates, hidden, states[0])[0],)
        reset, keep, new = gates.chunk(3, dim=-1)
        back_reset, back_keep, back = hidden.chunk(3, dim=-1)
        proposal = torch.tanh(new + (reset + back_reset).sigmoid() * back)
        return (torch.lerp(proposal, states[0], (keep + back_keep).sigmoid()),)


def reverse_padded(x: Tensor, mask: Tensor | None) -> Tensor:
    """Reverse the real positions of each row of (B, T, D) and leave its padding at the end: twice is never.

    With the padding out of the way a plain kernel reads backwards; packing would make a GPU wait for the lengths.
    """
    if mask is None:
        return x.flip(1)
    positions = torch.arange(x.size(1), device=x.device)
    last = mask.sum(dim=1, keepdim=True) - 1  # (B, 1)
    order = torch.where(positions <= last, last - positions, positions)  # (B, T)
    return x.gather(1, order.unsqueeze(2).expand_as(x))


def first_state(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum a sentence up by its first position (B, D), where a backward recurrence ends."""
    return values[:, 0]


def last_state(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum a sentence up by its last real position (B, D), where a forward recurrence ends."""
    if mask is None:
        return values[:, -1]
    position = (mask.sum(dim=1) - 1).clamp(min=0)
    return values[torch.arange(position.size(0), device=position.device), position]


def mean_state(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum a sentence up by the mean of its real positions (B, D)."""
    if mask is None:
        return values.mean(dim=1)
    real = mask.unsqueeze(2).to(values.dtype)
    return (values * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


def last_backward_state(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return a two-sided encoder's last backward state (B, D / 2): the second half of the first position."""
    return values[:, 0, values.size(-1) // 2 :]


def last_bidirectional_states(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return a two-sided encoder's last forward and last backward state, joined (B, D)."""
    return torch.cat(
        [last_state(values, mask)[:, : values.size(-1) // 2], last_backward_state(values, mask)],
        dim=-1,
    )


class BidirectionalRNN(nn.Module):
    """One recurrence from each end, half of the width each: Schuster and Paliwal (1997)."""

    def __init__(self, ahead: RNN, back: RNN) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Read (B, T, D) from both ends, each row's padding left out."""
        return torch.cat([self.ahead.run_forward(x), self.back.run_reversed(x, mask)], dim=-1)


class NoResidual(Residual):
    """No way around the layer, and no norm: stacks as they were before residual connections."""

    def __init__(self, norm: nn.Module | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(None, dropout=dropout)

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Go on with the change alone, some of it dropped in training."""
        return (
            dropout(sublayer_output, self.dropout)
            if self.training and self.dropout
            else sublayer_output
        )


MEMORY_SUMMARIES: dict[str, MemorySummary] = {
    "first": first_state,
    "last": last_state,
    "mean": mean_state,
    "last_backward": last_backward_state,
    "last_bidirectional": last_bidirectional_states,
}  # what a decoder may begin with
