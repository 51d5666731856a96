"""RNN layers: torch's cells, both directions, final states and initialization."""

from __future__ import annotations

import pytest
import torch
from kernel_kit import needs_gpu
from recurrent_kit import MASK, D, build_context, copy_weights
from torch import Tensor, nn

from dragoman.layers.rnn import (
    GRU,
    LSTM,
    RNN,
    BidirectionalRNN,
    first_state,
    last_state,
    reverse_padded,
)
from dragoman.models.forward_context import ForwardContext
from dragoman.models.rnn_blocks import LSTMLayer
from dragoman.ops.masked_pooling import mean_pool


@pytest.mark.parametrize("layers", [1, 3])
def test_lstm_is_the_cell_of_torch(layers: int) -> None:
    torch.manual_seed(0)
    ours = LSTM(4, D, layers=layers).double()
    cells = [copy_weights(ours, n, nn.LSTMCell(D if n else 4, D).double()) for n in range(layers)]
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    states = [(torch.zeros(2, D, dtype=torch.float64),) * 2 for _ in cells]
    rnn_state, expected = ours.zero_state(x), []
    for position in x.unbind(1):
        stepped, rnn_state = ours.step(position, rnn_state)
        for n, cell in enumerate(cells):
            states[n] = cell(position, states[n])
            position = states[n][0]
        torch.testing.assert_close(stepped, position)
        expected.append(position)
    whole = ours.run(x, ours.zero_state(x))
    torch.testing.assert_close(whole.output, torch.stack(expected, 1))
    for name, index in (("hidden", 0), ("cell", 1)):
        torch.testing.assert_close(
            whole.rnn_state[name], torch.stack([state[index] for state in states], 1)
        )
        torch.testing.assert_close(rnn_state[name], whole.rnn_state[name])


def test_gru_is_the_cell_of_torch() -> None:
    torch.manual_seed(0)
    ours = GRU(4, D).double()
    cell = copy_weights(ours, 0, nn.GRUCell(4, D).double())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    hidden, rnn_state = torch.zeros(2, D, dtype=torch.float64), ours.zero_state(x)
    for position in x.unbind(1):
        hidden = cell(position, hidden)
        stepped, rnn_state = ours.step(position, rnn_state)
        torch.testing.assert_close(stepped, hidden)
    torch.testing.assert_close(ours.run(x, ours.zero_state(x)).output[:, -1], hidden)


@needs_gpu
@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_the_fused_cell_of_a_gpu_is_the_one_of_the_host(kind: type[RNN]) -> None:
    """Values and gradients; input projections are computed before the loop."""
    torch.manual_seed(0)
    host = kind(4, D, layers=2)
    x = torch.randn(2, 5, 4)

    def outcome(rnn: RNN, x: Tensor) -> list[Tensor]:
        layers, outputs = rnn.split(rnn.zero_state(x)), []
        for gates in rnn.project(x).unbind(1):
            layers = rnn.advance(gates, layers)
            outputs.append(layers[-1][0])
        output = torch.stack(outputs, 1)
        return [
            output.cpu(),
            *(each.cpu() for each in torch.autograd.grad(output.square().sum(), rnn.parameters())),
        ]

    expected = outcome(host, x)
    torch.testing.assert_close(outcome(host.cuda(), x.cuda()), expected)


@pytest.mark.parametrize(("kind", "theirs"), [(LSTM, nn.LSTM), (GRU, nn.GRU)])
def test_bidirectional_rnn_equals_torch_with_packed_sequences(
    kind: type[RNN], theirs: type[nn.LSTM] | type[nn.GRU]
) -> None:
    """A backward reader must begin at each row's last real position (pytorch/translate#308)."""
    torch.manual_seed(0)
    ours = BidirectionalRNN(kind(4, 3), kind(4, 3)).double()
    reference = theirs(4, 3, batch_first=True, bidirectional=True).double()
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
        getattr(reference, name).data = getattr(ours.forward_rnn.module, name).data
        getattr(reference, f"{name}_reverse").data = getattr(ours.backward_rnn.module, name).data
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    packed = nn.utils.rnn.pack_padded_sequence(
        x, MASK.sum(1), batch_first=True, enforce_sorted=False
    )
    expected, _ = nn.utils.rnn.pad_packed_sequence(reference(packed)[0], batch_first=True)
    torch.testing.assert_close(ours(x, MASK)[MASK], expected[MASK])
    x[~MASK] = 1e3  # the content of the padding does not matter
    torch.testing.assert_close(ours(x, MASK)[MASK], expected[MASK])


def test_reversing_leaves_padding_at_the_end() -> None:
    x = torch.arange(10.0).view(2, 5, 1)
    assert reverse_padded(x, MASK).squeeze(2).tolist() == [[4, 3, 2, 1, 0], [7, 6, 5, 8, 9]]
    assert reverse_padded(reverse_padded(x, MASK), MASK).equal(x)
    assert reverse_padded(x, None).squeeze(2).tolist() == [[4, 3, 2, 1, 0], [9, 8, 7, 6, 5]]


def test_a_reversed_encoder_reads_the_reversed_source() -> None:
    """Luong et al. (2015), section 4.1: the last token is read first, padding never."""
    torch.manual_seed(0)
    plain = LSTMLayer.build(build_context(causal=False)).double()
    turned = LSTMLayer.build(build_context(causal=False), reverse=True).double()
    turned.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, D, dtype=torch.float64)
    expected = plain(x[1:, :3].flip(1), ForwardContext()).flip(1)
    torch.testing.assert_close(turned(x, ForwardContext(mask=MASK))[1:, :3], expected)


def test_final_states_ignore_padding() -> None:
    values = torch.arange(10.0).view(2, 5, 1)
    assert [
        summary(values, MASK).flatten().tolist() for summary in (first_state, last_state, mean_pool)
    ] == [[0, 5], [4, 7], [2, 6]]
    assert [
        summary(values, None).flatten().tolist() for summary in (first_state, last_state, mean_pool)
    ] == [[0, 5], [4, 9], [2, 7]]


def test_initialization_of_rnn_weights() -> None:
    torch.manual_seed(0)
    ours = LSTM(4, D)
    weight, bias = ours.module.weight_hh_l0, ours.module.bias_ih_l0
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    for gate in weight.split(D):
        torch.testing.assert_close(gate @ gate.T, torch.eye(D))
    assert (
        bias.tolist() == [0.0] * D + [1.0] * D + [0.0] * 2 * D
    )  # input, forget, candidate, output
