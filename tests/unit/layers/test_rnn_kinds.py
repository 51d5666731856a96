"""Plain RNN, SRU, sliced RNN and final states, against loops written from the papers."""

from __future__ import annotations

import pytest
import torch
from recurrent_kit import MASK, D, copy_weights
from torch import Tensor, nn

from dragoman.layers.rnn import GRU, LSTM, RNN, SRU, SlicedRNN, TanhRNN

KINDS = [TanhRNN, GRU, LSTM, SRU]


def randomized(module: nn.Module) -> nn.Module:
    """Set every parameter to random values, which differ from the initial ones."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.6)
    return module.double()


def sequence(length: int = 5, width: int = D) -> Tensor:
    torch.manual_seed(4)
    return torch.randn(2, length, width, dtype=torch.float64)


@torch.no_grad()
def test_a_plain_rnn_is_pytorchs_cell() -> None:
    rnn = randomized(TanhRNN(D, D, layers=2))
    assert isinstance(rnn, TanhRNN)
    x = sequence()
    found = rnn.run_forward(x)
    cells = [copy_weights(rnn, layer, nn.RNNCell(D, D).double()) for layer in range(2)]
    for row in range(2):
        states = [torch.zeros(D, dtype=torch.float64) for _ in cells]
        for position in range(5):
            hidden = x[row, position]
            for layer, cell in enumerate(cells):
                states[layer] = hidden = cell(hidden, states[layer])
            torch.testing.assert_close(found[row, position], hidden)


@pytest.mark.parametrize("inputs", [D, D + 3])
@torch.no_grad()
def test_sru_is_the_papers_equations(inputs: int) -> None:
    """Lei et al. (2018), equations 1 to 4, with the scaled skip connection of section 3.2; a fourth
    matrix for other widths.
    """
    sru = randomized(SRU(inputs, D, layers=2))
    assert isinstance(sru, SRU)
    x = sequence(width=inputs)
    output, final = sru.run(x, sru.zero_state(x))
    for row in range(2):
        below = list(x[row])
        for layer in range(2):
            matrices = getattr(sru, f"weight_l{layer}").split(D)
            v_f, v_r = getattr(sru, f"recurrent_l{layer}")
            b_f, b_r = getattr(sru, f"bias_l{layer}")
            cell, above = torch.zeros(D, dtype=torch.float64), []
            for token in below:
                forget = torch.sigmoid(matrices[1] @ token + v_f * cell + b_f)
                reset = torch.sigmoid(matrices[2] @ token + v_r * cell + b_r)
                cell = forget * cell + (1 - forget) * (matrices[0] @ token)
                skip = matrices[3] @ token if len(matrices) == 4 else token
                above.append(reset * cell + (1 - reset) * 3**0.5 * skip)
            torch.testing.assert_close(final["cell"][row, layer], cell)
            below = above
        torch.testing.assert_close(output[row], torch.stack(below))


def test_sru_starts_with_matrices_of_variance_one_over_the_inputs() -> None:
    torch.manual_seed(0)
    sru = SRU(256, 256)
    assert sru.weight_l0.var().item() == pytest.approx(1 / 256, rel=0.02)
    assert not sru.bias_l0.any()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_equal_the_run(kind: type[RNN]) -> None:
    rnn = randomized(kind(D, D, layers=2))
    assert isinstance(rnn, RNN)
    x = sequence()
    whole, final = rnn.run(x, rnn.zero_state(x))
    state = rnn.zero_state(x)
    for position in range(5):
        output, state = rnn.step(x[:, position], state)
        torch.testing.assert_close(output, whole[:, position])
    for name, value in final.items():
        torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_final_state_is_that_of_the_last_real_token_read(
    kind: type[RNN], layers: int, reverse: bool
) -> None:
    """Hidden states and cells of all layers, of padded rows as of rows alone, whatever the padding
    holds.
    """
    rnn = randomized(kind(D, D, layers=layers)).eval()
    assert isinstance(rnn, RNN)
    x = sequence()
    x[1, 3:] = 100.0
    output, final = rnn.encode(x, MASK, reverse=reverse)
    for row, length in enumerate((5, 3)):
        alone = x[row : row + 1, :length]
        alone = alone.flip(1) if reverse else alone
        expected, state = rnn.run(alone, rnn.zero_state(alone))
        expected = expected.flip(1) if reverse else expected
        torch.testing.assert_close(output[row, :length], expected[0])
        for name in rnn.state_names:
            torch.testing.assert_close(final[name][row], state[name][0])
    without, state = rnn.encode(x[:1], None, reverse=reverse)
    torch.testing.assert_close(without[0], output[0])
    torch.testing.assert_close(state["hidden"][0], final["hidden"][0])


def test_the_final_states_have_gradients() -> None:
    rnn = LSTM(D, D, layers=2).double()
    x = sequence().requires_grad_()
    final = rnn.encode(x, MASK, reverse=True).rnn_state
    (final["hidden"].sum() + final["cell"].sum()).backward()
    assert x.grad is not None
    assert not x.grad[1, 3:].any()
    assert all(parameter.grad is not None for parameter in rnn.parameters())


def paper_sliced(levels: list[RNN], x: Tensor, slice_length: int) -> Tensor:
    """Return F of Yu and Liu (2018), for a row (T, D): slices of a level in a loop, last states to
    the next.
    """
    for level, rnn in enumerate(levels):
        top = level + 1 == len(levels)
        size = len(x) if top else slice_length
        last = []
        for start in range(0, len(x), size):
            part = x[start : start + size].unsqueeze(0)
            last.append(rnn.run_forward(part)[0, -1])
        x = torch.stack(last)
    assert len(x) == 1
    return x[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "levels"), [(27, 3), (9, 2), (3, 2), (20, 3)])
@torch.no_grad()
def test_a_sliced_rnn_is_the_papers(kind: type[RNN], length: int, levels: int) -> None:
    """With T = n ** (k + 1) the paper's; a last slice may be shorter. The last position has it,
    plus its states below.
    """
    layers = [randomized(kind(D, D)) for _ in range(levels)]
    sliced = SlicedRNN(layers, 3)  # type: ignore[arg-type]
    x = sequence(length)
    found = sliced(x, None)
    for row in range(2):
        part, below = x[row], torch.zeros(D, dtype=torch.float64)
        for rnn in layers[:-1]:  # states of the last slice at the levels below the top
            states = [
                rnn.run_forward(part[start : start + 3].unsqueeze(0))[0, -1]  # type: ignore[operator]
                for start in range(0, len(part), 3)
            ]
            part = torch.stack(states)
            below = below + states[-1]
        top = paper_sliced(layers, x[row], 3)  # type: ignore[arg-type]
        torch.testing.assert_close(found[row, -1], top + below)


@torch.no_grad()
def test_a_slice_does_not_see_the_slices_after_it() -> None:
    sliced = SlicedRNN([GRU(D, D).double(), GRU(D, D).double()], 3)
    x = sequence(9)
    changed = x.clone()
    changed[:, 6:] += 1
    torch.testing.assert_close(sliced(changed, None)[:, :6], sliced(x, None)[:, :6])


@torch.no_grad()
def test_dropout_between_the_layers_of_an_sru_acts_in_training_only() -> None:
    torch.manual_seed(0)
    rnn, x = SRU(4, 4, layers=2, dropout=0.5), torch.randn(2, 3, 4)
    state = rnn.zero_state(x)
    for run in (lambda: rnn.run(x, state).output, lambda: rnn.step(x[:, 0], state).output):
        rnn.train()
        assert not torch.equal(run(), run())
        rnn.eval()
        assert torch.equal(run(), run())


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_dropout_acts_between_layers_and_not_on_the_input(kind: type[RNN], in_steps: bool) -> None:
    """With a probability of 1 the second layer reads zeros, and the first reads all."""
    rnn = randomized(kind(D, D, layers=2, dropout=1.0))
    assert isinstance(rnn, RNN)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        output, state = (
            rnn.step(x[:, 0], rnn.zero_state(x)) if in_steps else rnn.run(x, rnn.zero_state(x))
        )
        return output, state["hidden"][:, 0]

    one, other = sequence(1), -2 * sequence(1)
    top, bottom = run(one)
    assert torch.equal(top, run(other)[0])
    assert not torch.equal(bottom, run(other)[1])
    rnn.eval()
    torch.testing.assert_close(bottom, run(one)[1])
    assert not torch.equal(run(one)[0], run(other)[0])


@torch.no_grad()
def test_a_slice_with_one_token_counts_at_every_level() -> None:
    """Of three tokens in slices of two, the second slice is half empty."""
    low, middle, top = levels = [randomized(GRU(D, D)) for _ in range(3)]
    sliced, x = SlicedRNN(levels, 2), sequence(3)  # type: ignore[arg-type]
    first, second = low.run_forward(x[:, :2]), low.run_forward(x[:, 2:])
    above = middle.run_forward(torch.stack([first[:, -1], second[:, -1]], dim=1))
    highest = top.run_forward(above[:, -1:])
    expected = second[:, 0] + above[:, 1] + highest[:, 0]
    torch.testing.assert_close(sliced(x, None)[:, 2], expected)
    padded = torch.cat([x, sequence(6)], dim=1)
    mask = (torch.arange(9) < 3).expand(2, -1)
    torch.testing.assert_close(sliced(padded, mask)[:, 2], expected)
