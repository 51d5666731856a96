"""Convolution filters against plain loops."""

from __future__ import annotations

import pytest
import torch

from dragoman.layers.text_cnn import FilterBank, OneHotFilterBank


@pytest.mark.parametrize("length", [1, 3, 5])
def test_filters_see_every_window_that_holds_a_word(length: int) -> None:
    torch.manual_seed(0)
    bank = FilterBank(4, widths=(1, 3), filters=2).double()
    x = torch.randn(1, 5, 4, dtype=torch.float64)
    mask = torch.arange(5).unsqueeze(0) < length
    expected = []
    for width, convolution in zip((1, 3), bank.convolutions, strict=True):
        zeros = torch.zeros(width - 1, 4, dtype=torch.float64)
        extended = torch.cat([zeros, x[0, :length], zeros])
        responses = torch.stack(
            [
                (convolution.weight * extended[at : at + width].T).sum(dim=(1, 2))
                + convolution.bias
                for at in range(length + width - 1)
            ]
        )
        expected.append(responses.max(dim=0).values.relu())
    torch.testing.assert_close(bank(x, mask)[0], torch.cat(expected))


def test_one_hot_filters_equal_convolutions_of_one_hot_vectors() -> None:
    torch.manual_seed(0)
    bank = OneHotFilterBank(7, widths=(2, 3), filters=2).double()
    tokens = torch.tensor([[4, 5, 6, 4], [6, 4, 5, 5]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    one_hot = torch.nn.functional.one_hot(tokens, 7).double() * mask.unsqueeze(2)
    plain = FilterBank(7, widths=(2, 3), filters=2).double()
    with torch.no_grad():
        for width, table, bias, convolution in zip(
            (2, 3), bank.tables, bank.biases, plain.convolutions, strict=True
        ):
            bias.normal_()
            convolution.weight.copy_(table.view(7, width, 2).permute(2, 0, 1))
            convolution.bias.copy_(bias)
    torch.testing.assert_close(bank(tokens, mask), plain(one_hot, mask))
    bank(tokens, mask).sum().backward()
    assert not bank.tables[0].grad[0].any()  # padding


def test_windows_of_padding_alone_are_not_pooled() -> None:
    """Their response is the bias, here more than that of any window with a word."""
    bank = FilterBank(2, widths=(1, 3), filters=1)
    one_hot = OneHotFilterBank(7, widths=(1, 3), filters=1)
    with torch.no_grad():
        for convolution in bank.convolutions:
            convolution.weight.fill_(-0.1)
            convolution.bias.fill_(1.0)
        for table, bias in zip(one_hot.tables, one_hot.biases, strict=True):
            table[1:].fill_(-0.1)
            bias.fill_(1.0)
    x, tokens = torch.ones(1, 5, 2), torch.full((1, 5), 4)
    mask = torch.arange(5).unsqueeze(0) < 2
    torch.testing.assert_close(bank(x, mask), bank(x[:, :2], None))
    torch.testing.assert_close(one_hot(tokens, mask), one_hot(tokens[:, :2], None))
    torch.testing.assert_close(one_hot(tokens, mask), torch.full((1, 2), 0.9))


def test_one_hot_weights_start_as_small_as_the_papers() -> None:
    torch.manual_seed(0)
    (table,) = OneHotFilterBank(500, widths=(3,), filters=4).tables
    assert table[1:].std().item() == pytest.approx(0.01, rel=0.05)
    assert not table[0].any()
