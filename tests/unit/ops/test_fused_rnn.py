"""RNN operations: layer by layer equals the whole stack; cells equal PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dragoman.ops import fused_rnn
from dragoman.ops.fused_rnn import gru_cell, layer_weights, lstm_cell, run_rnn


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layer_by_layer_equals_the_whole_stack(kind: type[nn.LSTM] | type[nn.GRU]) -> None:
    torch.manual_seed(3)
    module = kind(6, 8, num_layers=3, batch_first=True, dropout=0.5).eval()
    x = torch.randn(2, 5, 6)
    states = tuple(torch.randn(3, 2, 8) for _ in range(2 if kind is nn.LSTM else 1))
    expected, expected_states = run_rnn(module, x, states)
    module.dropout = 0.0
    found, found_states = fused_rnn._run_by_layer(module, x, states)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_states, expected_states)


def test_cells_equal_pytorch() -> None:
    torch.manual_seed(0)
    x, hidden, cell = torch.randn(3, 6), torch.randn(3, 8), torch.randn(3, 8)
    for module in (nn.LSTM(6, 8), nn.GRU(6, 8)):
        weight_ih, weight_hh, bias_ih, bias_hh = weights = layer_weights(module, 0)
        gates = (
            nn.functional.linear(x, weight_ih, bias_ih),
            nn.functional.linear(hidden, weight_hh, bias_hh),
        )
        if isinstance(module, nn.LSTM):
            expected = torch.lstm_cell(x, (hidden, cell), *weights)
            torch.testing.assert_close(lstm_cell(*gates, cell), tuple(expected))
        else:
            torch.testing.assert_close(
                gru_cell(*gates, hidden), torch.gru_cell(x, hidden, *weights)
            )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@torch.no_grad()
def test_with_a_mask_dropout_acts_between_layers_in_training_only(
    kind: type[nn.LSTM] | type[nn.GRU],
) -> None:
    """With a probability of 1 the second layer reads zeros."""
    torch.manual_seed(3)
    module = kind(6, 8, num_layers=2, batch_first=True, dropout=1.0)
    x, mask = torch.randn(2, 5, 6), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    states = tuple(torch.zeros(2, 2, 8) for _ in range(2 if kind is nn.LSTM else 1))
    top, other_top = (run_rnn(module, each, states, mask=mask)[0] for each in (x, -x))
    assert torch.equal(top[mask], other_top[mask])
    module.eval()
    found = run_rnn(module, x, states, weight_dropout=0.5, mask=mask)[0]
    torch.testing.assert_close(found[mask], run_rnn(module, x, states)[0][mask])
