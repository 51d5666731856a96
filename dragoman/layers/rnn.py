"""RNN, LSTM, GRU and SRU layers, bidirectional RNNs, and summaries of an encoder's states.

Whole sequences run through `torch.nn.RNN`, `torch.nn.LSTM` and `torch.nn.GRU`, single positions
through cells that compute the same from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops
from dragoman.ops.fused_rnn import (
    gru_cell,
    last_real,
    layer_weights,
    lstm_cell,
    run_rnn,
)
from dragoman.ops.masked_pooling import mean_pool
from dragoman.ops.sru import sru_scan

RNNState = dict[str, Tensor]  # hidden state, and cell of an LSTM: (B, layers, D)
LayerStates = list[tuple[Tensor, ...]]  # the same for each layer: (B, D)

# Summarizes encoder states (B, S, D) with a mask (B, S): (B, D).
MemorySummary = Callable[[Tensor, Tensor | None], Tensor]


class RNNOutput(NamedTuple):
    """Outputs and final state of an RNN."""

    output: Tensor  # (B, T, D) after `run`, (B, D) after `step`
    rnn_state: RNNState


class RNN(nn.Module):
    """A multi-layer RNN, with dropout between its layers in training."""

    state_names: ClassVar[tuple[str, ...]]  # the first is the cell's output
    # States that a decoder's initial state is projected to from a summary of the source.
    projected_states: ClassVar[tuple[str, ...]] = ("hidden",)

    def __init__(
        self,
        inputs: int,
        width: int,
        *,
        layers: int = 1,
        dropout: float = 0.0,
        weight_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        # DropConnect on U of whole sequences, Wan et al. (2013): AWD-LSTM's "weight drop".
        self.weight_dropout = weight_dropout
        self.dropout = dropout if layers > 1 else 0.0

    def zero_state(self, like: Tensor) -> RNNState:
        """Return a zero state for the batch size, device and dtype of a tensor (B, ...)."""
        return {
            name: like.new_zeros(like.size(0), self.layers, self.width) for name in self.state_names
        }

    def run(self, x: Tensor, rnn_state: RNNState) -> RNNOutput:
        """Run over all positions of (B, T, D)."""
        return self.run_to_last(x, rnn_state, None)

    def run_to_last(self, x: Tensor, rnn_state: RNNState, mask: Tensor | None) -> RNNOutput:
        """Run over (B, T, D); return the state after each row's last real position."""
        raise NotImplementedError

    def run_forward(self, x: Tensor) -> Tensor:
        """Run over (B, T, D) from the first position, from a zero state; padding comes last."""
        return self.run(x, self.zero_state(x)).output

    def run_reversed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Run over (B, T, D) from each row's last real position; outputs keep their positions."""
        return reverse_padded(self.run_forward(reverse_padded(x, mask)), mask)

    def encode(self, x: Tensor, mask: Tensor | None, *, reverse: bool) -> RNNOutput:
        """Run over (B, T, D) in either direction; return the state after the last token read."""
        ordered = reverse_padded(x, mask) if reverse else x
        output, final = self.run_to_last(ordered, self.zero_state(x), mask)
        return RNNOutput(reverse_padded(output, mask) if reverse else output, final)

    def step(self, x: Tensor, rnn_state: RNNState) -> RNNOutput:
        """Run one position (B, D)."""
        layers = self.advance(self.project(x), self.split(rnn_state))
        return RNNOutput(layers[-1][0], self.join(layers))

    def project(self, x: Tensor) -> Tensor:
        """Project the first n input features (..., n) to the first layer's gates."""
        raise NotImplementedError

    def extra_input_weight(self, width: int) -> Tensor:
        """Return the first layer's weights (m, gates * D) of input features from `width` on."""
        raise NotImplementedError

    def split(self, rnn_state: RNNState) -> LayerStates:
        """Split a state into layers, so that a loop over positions need not stack them."""
        return [
            tuple(rnn_state[name][:, layer] for name in self.state_names)
            for layer in range(self.layers)
        ]

    def join(self, layers: LayerStates) -> RNNState:
        """Reverse `split`: stack the parts."""
        return {
            name: torch.stack(states, dim=1)
            for name, states in zip(self.state_names, zip(*layers, strict=True), strict=True)
        }

    def advance(self, gates: Tensor, layers: LayerStates) -> LayerStates:
        """Return the states after one position whose projected input is `gates` (B, gates * D)."""
        raise NotImplementedError


class TorchRNN(RNN):
    """An RNN whose weights and loop over positions are those of a module of PyTorch."""

    torch_class: ClassVar[type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]]
    gates: ClassVar[int]  # matrices that PyTorch stores as one

    def __init__(
        self,
        inputs: int,
        width: int,
        *,
        layers: int = 1,
        dropout: float = 0.0,
        weight_dropout: float = 0.0,
    ) -> None:
        super().__init__(
            inputs, width, layers=layers, dropout=dropout, weight_dropout=weight_dropout
        )
        self.module = self.torch_class(
            inputs, width, num_layers=layers, dropout=self.dropout, batch_first=True
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize: Xavier for inputs, orthogonal for hidden states, zero biases.

        Bahdanau et al. (2015), appendix B.1.
        """
        for layer in range(self.layers):
            weight_ih, weight_hh, *biases = self._weights(layer)
            for gate in range(self.gates):
                rows = slice(gate * self.width, (gate + 1) * self.width)
                nn.init.xavier_uniform_(weight_ih.data[rows])
                nn.init.orthogonal_(weight_hh.data[rows])
            for bias in biases:
                nn.init.zeros_(bias)

    def run_to_last(self, x: Tensor, rnn_state: RNNState, mask: Tensor | None) -> RNNOutput:
        """Run over (B, T, D); return the state after each row's last real position."""
        states = tuple(
            rnn_state[name].transpose(0, 1).contiguous().to(x.dtype) for name in self.state_names
        )
        output, final = run_rnn(
            self.module, x, states, weight_dropout=self.weight_dropout, mask=mask
        )
        final_state = {
            name: state.transpose(0, 1) for name, state in zip(self.state_names, final, strict=True)
        }
        return RNNOutput(output, final_state)

    def project(self, x: Tensor) -> Tensor:
        """Project the first n input features (..., n) to the first layer's gates."""
        weight_ih, _, bias, _ = self._weights(0)
        return F.linear(x, weight_ih[:, : x.size(-1)], bias)

    def extra_input_weight(self, width: int) -> Tensor:
        """Return the first layer's weights (m, gates * D) of input features from `width` on."""
        return self._weights(0)[0][:, width:].t()

    def advance(self, gates: Tensor, layers: LayerStates) -> LayerStates:
        """Return the states after one position whose projected input is `gates` (B, gates * D)."""
        after: LayerStates = []
        for layer, states in enumerate(layers):
            weight_ih, weight_hh, bias_ih, bias_hh = self._weights(layer)
            if layer:
                x = ops.dropout(after[-1][0], self.dropout, training=self.training)
                gates = F.linear(x, weight_ih, bias_ih)
            states = tuple(state.to(gates.dtype) for state in states)
            after.append(self.cell(gates, F.linear(states[0], weight_hh, bias_hh), states))
        return after

    def cell(
        self, input_gates: Tensor, hidden_gates: Tensor, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the next states (B, D) from W x and U h, (B, gates * D) each."""
        raise NotImplementedError

    def _weights(self, layer: int) -> list[Tensor]:
        """Return weight_ih, weight_hh, bias_ih and bias_hh of a layer."""
        return layer_weights(self.module, layer)


class TanhRNN(TorchRNN):
    r"""Plain RNN: Elman (1990); its gradient vanishes or explodes with the distance.

    .. math:: h_t = \tanh(W x_t + U h_{t-1} + b)
    """

    torch_class = nn.RNN
    state_names = ("hidden",)
    gates = 1

    def cell(
        self, input_gates: Tensor, hidden_gates: Tensor, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the next hidden state (B, D) from W x and U h, (B, D) each."""
        return (torch.tanh(input_gates + hidden_gates),)


class LSTM(TorchRNN):
    r"""LSTM: Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000).

    .. math:: c_t = f_t \odot c_{t-1} + i_t \odot g_t, \quad h_t = o_t \odot \tanh c_t
    """

    torch_class = nn.LSTM
    state_names = ("hidden", "cell")
    gates = 4

    def reset_parameters(self) -> None:
        """Initialize as every RNN, but with forget-gate biases of 1 (Jozefowicz et al. 2015)."""
        super().reset_parameters()
        for layer in range(self.layers):
            nn.init.ones_(self._weights(layer)[2].data[self.width : 2 * self.width])

    def cell(
        self, input_gates: Tensor, hidden_gates: Tensor, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the next hidden state and cell (B, D) from W x and U h, (B, 4 D) each."""
        return lstm_cell(input_gates, hidden_gates, states[1])


class GRU(TorchRNN):
    r"""Gated recurrent unit: Cho et al. (2014), in the form of PyTorch and cuDNN.

    .. math:: h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}, \quad
        n_t = \tanh(W x_t + b + r_t \odot (U h_{t-1} + d))

    The paper applies the reset gate before the matmul, U (r ∘ h); here it is applied after it.
    """

    torch_class = nn.GRU
    state_names = ("hidden",)
    gates = 3

    def cell(
        self, input_gates: Tensor, hidden_gates: Tensor, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the next hidden state (B, D) from W x and U h, (B, 3 D) each."""
        return (gru_cell(input_gates, hidden_gates, states[0]),)


class SRU(RNN):
    r"""Simple recurrent unit: gates see the past of their own unit only; Lei et al. (2018).

    .. math:: f_t = \sigma(W_f x_t + v_f \odot c_{t-1} + b_f), \quad
        c_t = f_t \odot c_{t-1} + (1 - f_t) \odot W x_t

        r_t = \sigma(W_r x_t + v_r \odot c_{t-1} + b_r), \quad
        h_t = r_t \odot c_t + (1 - r_t) \odot \alpha x_t

    All matmuls run over the whole sequence at once; only c is computed position by position, with
    elementwise operations. Where the input has another width, a fourth matrix projects x in the
    last equation. :math:`\alpha = \sqrt{1 + 2 e^{b_r}}` of the initial bias keeps the variance
    (section 3.2).
    """

    state_names = ("hidden", "cell")
    projected_states = ("hidden", "cell")  # the recurrence reads the cell alone
    SKIP_SCALE = 3**0.5  # alpha for a bias of zero

    def __init__(
        self,
        inputs: int,
        width: int,
        *,
        layers: int = 1,
        dropout: float = 0.0,
        weight_dropout: float = 0.0,
    ) -> None:
        super().__init__(inputs, width, layers=layers, dropout=dropout)
        assert not weight_dropout, "SRU has no hidden-to-hidden matrices"
        for layer in range(layers):
            own = width if layer else inputs
            matrices = 3 if own == width else 4  # candidate, forget, reset, skip
            weight = nn.Parameter(torch.empty(matrices * width, own))
            self.register_parameter(f"weight_l{layer}", weight)
            self.register_parameter(f"recurrent_l{layer}", nn.Parameter(torch.empty(2, width)))
            self.register_parameter(f"bias_l{layer}", nn.Parameter(torch.empty(2, width)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize: matrices of variance 1 / inputs; gates first depend on the input alone."""
        for layer in range(self.layers):
            weight, recurrent, bias = self._weights(layer)
            bound = (3 / weight.size(1)) ** 0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.zeros_(recurrent)
            nn.init.zeros_(bias)

    def run_to_last(self, x: Tensor, rnn_state: RNNState, mask: Tensor | None) -> RNNOutput:
        """Run over (B, T, D); return the state after each row's last real position."""
        finals: LayerStates = []
        for layer in range(self.layers):
            x = ops.dropout(x, self.dropout, training=self.training) if layer else x
            candidate, forget, reset, skip = self._gates(x, layer).chunk(4, dim=-1)
            _, recurrent, bias = self._weights(layer)
            initial = rnn_state["cell"][:, layer]
            cell = sru_scan(candidate, forget + bias[0], recurrent[0], initial)
            before = torch.cat([initial.to(cell.dtype).unsqueeze(1), cell[:, :-1]], dim=1)
            x = self._output(reset, skip, cell, before, layer).to(x.dtype)
            finals.append((last_real(x, mask), last_real(cell, mask)))
        return RNNOutput(x, self.join(finals))

    def project(self, x: Tensor) -> Tensor:
        """Project the first n input features (..., n) to the first layer's gates."""
        return self._gates(x, 0)

    def extra_input_weight(self, width: int) -> Tensor:
        """Return the first layer's weights (m, gates * D) of input features from `width` on."""
        return self._weights(0)[0][:, width:].t()

    def advance(self, gates: Tensor, layers: LayerStates) -> LayerStates:
        """Return the states after one position whose projected input is `gates` (B, gates * D)."""
        after: LayerStates = []
        for layer, (_, before) in enumerate(layers):
            if layer:
                x = ops.dropout(after[-1][0], self.dropout, training=self.training)
                gates = self._gates(x, layer)
            candidate, forget, reset, skip = gates.chunk(4, dim=-1)
            _, recurrent, bias = self._weights(layer)
            gate = torch.sigmoid(forget + recurrent[0] * before + bias[0])
            cell = torch.lerp(candidate.to(gate.dtype), before.to(gate.dtype), gate)
            after.append((self._output(reset, skip, cell, before, layer).to(gates.dtype), cell))
        return after

    def _gates(self, x: Tensor, layer: int) -> Tensor:
        """Project (..., n) to candidate, forget gate, reset gate and skip connection (..., 4 D)."""
        weight, *_ = self._weights(layer)
        projected = F.linear(x, weight[:, : x.size(-1)])
        if weight.size(0) == 4 * self.width:
            return projected
        return torch.cat([projected, x.to(projected.dtype)], dim=-1)

    def _output(
        self, reset: Tensor, skip: Tensor, cell: Tensor, before: Tensor, layer: int
    ) -> Tensor:
        """Return h from the cell and the cell before it, (..., D) each."""
        _, recurrent, bias = self._weights(layer)
        gate = torch.sigmoid(reset + recurrent[1] * before + bias[1])
        return torch.lerp(self.SKIP_SCALE * skip.to(gate.dtype), cell.to(gate.dtype), gate)

    def _weights(self, layer: int) -> list[Tensor]:
        """Return the matrices, the recurrent vectors and the biases of a layer."""
        return [getattr(self, f"{name}_l{layer}") for name in ("weight", "recurrent", "bias")]


def reverse_padded(x: Tensor, mask: Tensor | None) -> Tensor:
    """Reverse the real positions of each row of (B, T, D) and keep its padding at the end.

    A plain RNN then runs backwards; packed sequences would synchronize with the GPU for the
    lengths.
    """
    if mask is None:
        return x.flip(1)
    positions = torch.arange(x.size(1), device=x.device)
    last = mask.sum(dim=1, keepdim=True) - 1  # (B, 1)
    order = torch.where(positions <= last, last - positions, positions)  # (B, T)
    return x.gather(1, order.unsqueeze(2).expand_as(x))


def first_state(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the state of the first position (B, D), the last of a backward RNN."""
    return values[:, 0]


def last_state(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the state of the last real position (B, D), the last of a forward RNN."""
    return last_real(values, mask)


def last_backward_state(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the last backward state (B, D / 2): the second half of the first position."""
    return values[:, 0, values.size(-1) // 2 :]


def last_bidirectional_states(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the last forward and the last backward state, concatenated (B, D)."""
    return torch.cat(
        [last_state(values, mask)[:, : values.size(-1) // 2], last_backward_state(values, mask)],
        dim=-1,
    )


class BidirectionalRNN(nn.Module):
    """A forward and a backward RNN, each half as wide: Schuster and Paliwal (1997)."""

    def __init__(self, forward_rnn: RNN, backward_rnn: RNN) -> None:
        super().__init__()
        self.forward_rnn, self.backward_rnn = forward_rnn, backward_rnn

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Run over (B, T, D) in both directions, without each row's padding."""
        return torch.cat(
            [self.forward_rnn.run_forward(x), self.backward_rnn.run_reversed(x, mask)], dim=-1
        )


class SlicedRNN(nn.Module):
    r"""Sliced RNN: slices run in parallel, their last states through the next level's RNN.

    .. math:: h^0_t = \mathrm{RNN}^0(x_t, h^0_{t-1}), \quad
        h^p_i = \mathrm{RNN}^p(h^{p-1}_{\mathrm{last}(i)}, h^p_{i-1})

    Yu and Liu (2018): every RNN starts again with each slice, but the top one, which runs over all
    that is left. The longest chain of steps is n k + T / n^k for slices of n at k levels, not T.
    The paper keeps the top level's last state. Here a position gets the sum of its own state and of
    its slices' states at the levels above, so that the last one contains it. Slices have a fixed
    length, so that padding does not move them.
    """

    def __init__(self, levels: Sequence[RNN], slice_length: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(levels)
        self.slice_length = slice_length

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Run over (B, T, D), real where `mask` (B, T) is True."""
        return self._run_level(x, mask, 0)

    def _run_level(self, x: Tensor, mask: Tensor | None, level: int) -> Tensor:
        """Return the sum of the states of a level and of those above it, (B, T, D)."""
        rnn = self.levels[level]
        assert isinstance(rnn, RNN), "levels must be RNNs"
        rows, length, width = x.shape
        if level + 1 == len(self.levels):
            return rnn.run_forward(x)
        if mask is None:
            mask = torch.ones(rows, length, dtype=torch.bool, device=x.device)
        extra = -length % self.slice_length
        slices = (length + extra) // self.slice_length
        sliced = F.pad(x, (0, 0, 0, extra)).reshape(rows * slices, self.slice_length, width)
        real = F.pad(mask, (0, extra)).reshape(rows * slices, self.slice_length)
        states = rnn.run_forward(sliced)  # padding comes last in every slice
        last = last_real(states, real).view(rows, slices, width)
        above = self._run_level(last, real[:, 0].view(rows, slices), level + 1)
        summed = states.reshape(rows, slices, -1, width) + above.unsqueeze(2)
        return summed.reshape(rows, slices * self.slice_length, width)[:, :length]


# The source of a decoder's first state, by the value of the option `initial_state`.
MEMORY_SUMMARIES: dict[str, MemorySummary] = {
    "first": first_state,
    "last": last_state,
    "mean": mean_pool,
    "last_backward": last_backward_state,
    "last_bidirectional": last_bidirectional_states,
}
