"""LSTM and GRU: whole sequences by cuDNN or PyTorch, single steps by fused cells on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dragoman.ops.dropout import dropout


def run_rnn(
    module: nn.LSTM | nn.GRU,
    x: Tensor,
    states: tuple[Tensor, ...],
    *,
    weight_dropout: float = 0.0,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run an RNN over (B, T, D); return its outputs (B, T, D) and final states (layers, B, D).

    In training, `weight_dropout` zeroes hidden-to-hidden weights, the same at all positions.
    """
    if module.training and (weight_dropout or (x.is_cuda and module.dropout)):
        return _run_by_layer(module, x, states, weight_dropout)
    has_cell = len(states) > 1
    output, final = module(x, states if has_cell else states[0])
    return output, final if has_cell else (final,)


def _run_by_layer(
    module: nn.LSTM | nn.GRU, x: Tensor, states: tuple[Tensor, ...], weight_dropout: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer after another, with our dropout in between.

    cuDNN's dropout synchronizes with the device and cannot be captured in a CUDA graph.
    """
    run: Any = torch.lstm if isinstance(module, nn.LSTM) else torch.gru
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        x = dropout(x, module.dropout) if layer else x
        initial = [state[layer : layer + 1] for state in states]
        weights = layer_weights(module, layer)
        weights[1] = dropout(weights[1], weight_dropout)
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        options = (True, 1, 0.0, True, False, True)
        x, *final = run(x, initial if len(initial) > 1 else initial[0], weights, *options)
        finals.append(tuple(final))
    return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def layer_weights(module: nn.LSTM | nn.GRU, layer: int) -> list[Tensor]:
    """Return weight_ih, weight_hh, bias_ih and bias_hh of a layer."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [getattr(module, f"{name}_l{layer}") for name in names]


def lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the next hidden state and cell (B, D) from W x and U h, (B, 4 D) each.

    .. math:: c_t = f_t \odot c_{t-1} + i_t \odot g_t, \quad h_t = o_t \odot \tanh c_t
    """
    if input_gates.is_cuda:  # what torch.lstm_cell calls after its matmuls
        hidden, new_cell, _ = torch.ops.aten._thnn_fused_lstm_cell(input_gates, hidden_gates, cell)
        return hidden, new_cell
    input_gate, forget_gate, candidate, output_gate = (input_gates + hidden_gates).chunk(4, dim=-1)
    new_cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
    return output_gate.sigmoid() * new_cell.tanh(), new_cell


def gru_cell(input_gates: Tensor, hidden_gates: Tensor, hidden: Tensor) -> Tensor:
    r"""Return the next hidden state (B, D) from W x and U h, (B, 3 D) each.

    .. math:: h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}
    """
    if input_gates.is_cuda:  # what torch.gru_cell calls after its matmuls
        new_hidden: Tensor = torch.ops.aten._thnn_fused_gru_cell(input_gates, hidden_gates, hidden)[
            0
        ]
        return new_hidden
    reset, update, candidate = input_gates.chunk(3, dim=-1)
    hidden_reset, hidden_update, hidden_candidate = hidden_gates.chunk(3, dim=-1)
    new = torch.tanh(candidate + (reset + hidden_reset).sigmoid() * hidden_candidate)
    return torch.lerp(new, hidden, (update + hidden_update).sigmoid())
