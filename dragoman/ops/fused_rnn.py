"""LSTM, GRU and plain RNN: sequences by cuDNN or PyTorch, single steps by fused cells on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dragoman.ops.dropout import dropout

TorchRNN = nn.LSTM | nn.GRU | nn.RNN

# Added to an LSTM's gates at padding, where sigmoids must be exactly 0 and 1.
_HOLD = 1e4
_HOLD_COLUMNS = 8  # of which one is used: matrices keep an aligned width


def run_rnn(
    module: TorchRNN,
    x: Tensor,
    states: tuple[Tensor, ...],
    *,
    weight_dropout: float = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run an RNN over (B, T, D); return its outputs (B, T, D) and final states (layers, B, D).

    In training, `weight_dropout` zeroes hidden-to-hidden weights, the same at all positions. With a
    `mask` (B, T), the final states are those after each row's last real position; padding comes
    last. Packed sequences would need the lengths on the host.
    """
    by_layer = module.training and (weight_dropout or (x.is_cuda and module.dropout))
    if by_layer or mask is not None:
        return _run_by_layer(module, x, states, weight_dropout, mask)
    has_cell = len(states) > 1
    output, final = module(x, states if has_cell else states[0])
    return output, final if has_cell else (final,)


def _run_by_layer(
    module: TorchRNN,
    x: Tensor,
    states: tuple[Tensor, ...],
    weight_dropout: float = 0.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run one layer after another, with our dropout in between.

    cuDNN's dropout synchronizes with the device and cannot be captured in a CUDA graph. With a
    mask, the final states are those of each row's last real position.
    """
    run: Any = {nn.LSTM: torch.lstm, nn.GRU: torch.gru, nn.RNN: torch.rnn_tanh}[type(module)]
    rate = module.dropout if module.training else 0.0
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        x = dropout(x, rate) if layer and rate else x
        initial = [state[layer : layer + 1] for state in states]
        weights = layer_weights(module, layer)
        if weight_dropout and module.training:
            weights[1] = dropout(weights[1], weight_dropout)
        if mask is not None and len(states) > 1:
            x, weights = _freeze_cell_at_padding(x, weights, mask)
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        options = (True, 1, 0.0, module.training, False, True)
        x, *final = run(x, initial if len(initial) > 1 else initial[0], weights, *options)
        if mask is not None:
            final[0] = last_real(x, mask).unsqueeze(0)
        finals.append(tuple(final))
    return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def last_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the last real position (B, D) of (B, T, D)."""
    if mask is None:
        return x[:, -1]
    position = (mask.sum(dim=1) - 1).clamp(min=0)
    return x[torch.arange(position.size(0), device=position.device), position]


def _freeze_cell_at_padding(
    x: Tensor, weights: list[Tensor], mask: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the input and weights of an LSTM layer whose cell does not change at padding.

    Another input feature, 1 at padding, closes the input gate and opens the forget gate.
    """
    weight_ih, *others = weights
    width = weight_ih.size(0) // 4
    columns = weight_ih.new_zeros(4 * width, _HOLD_COLUMNS)
    columns[:width, 0] = -_HOLD
    columns[width : 2 * width, 0] = _HOLD
    held = torch.cat([weight_ih, columns], dim=1)
    # One memory for all of them, as cuDNN wants.
    sizes = [each.numel() for each in (held, *others)]
    parts = torch.split(torch.cat([each.flatten() for each in (held, *others)]), sizes)
    shaped = [part.view_as(each) for part, each in zip(parts, (held, *others), strict=True)]
    padding = x.new_zeros(*x.shape[:2], _HOLD_COLUMNS)
    padding[:, :, 0] = (~mask).to(x.dtype)
    return torch.cat([x, padding], dim=2), shaped


def layer_weights(module: TorchRNN, layer: int) -> list[Tensor]:
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
