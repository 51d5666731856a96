"""Poolings and label attention against loops over single rows."""

from __future__ import annotations

import math

import torch

from dragoman.attention import record
from dragoman.layers.label_wise_attention import LabelAttention, LabelNames, LabelOutput
from dragoman.layers.sequence_pooling import (
    LastBidirectionalPooling,
    LastPooling,
    MaxPooling,
    MeanPooling,
)

LENGTHS = (5, 2, 0)


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.tensor(LENGTHS).unsqueeze(1)
    return torch.randn(3, 5, 4, dtype=torch.float64), mask


def test_mean_and_max_are_those_of_the_real_positions() -> None:
    x, mask = sequences()
    mean, most = MeanPooling()(x, mask=mask), MaxPooling()(x, mask=mask)
    for row, length in enumerate(LENGTHS[:2]):
        torch.testing.assert_close(mean[row], x[row, :length].mean(dim=0))
        torch.testing.assert_close(most[row], x[row, :length].max(dim=0).values)
    assert not mean[2].any()
    assert not most[2].any()
    torch.testing.assert_close(MaxPooling()(x), x.max(dim=1).values)


def test_last_is_the_final_state_of_each_direction() -> None:
    x, mask = sequences()
    last, both = LastPooling()(x, mask=mask), LastBidirectionalPooling()(x, mask=mask)
    for row, length in enumerate(LENGTHS[:2]):
        torch.testing.assert_close(last[row], x[row, length - 1])
        torch.testing.assert_close(both[row], torch.cat([x[row, length - 1, :2], x[row, 0, 2:]]))


def test_label_attention_equals_one_softmax_per_label() -> None:
    x, mask = sequences()
    for score_width in (0, 3):
        attention = LabelAttention(4, labels=2, score_width=score_width).double()
        output = LabelOutput(4, 2).double()
        with record(attention) as records:
            vectors, weights = attention(x, mask=mask)
        logits = output(vectors)
        for row, length in enumerate(LENGTHS[:2]):
            real = x[row, :length]
            keys = (
                real if attention.hidden is None else torch.tanh(real @ attention.hidden.weight.T)
            )
            for label in range(2):
                alpha = torch.softmax(keys @ attention.queries.weight[label], dim=0)
                torch.testing.assert_close(weights[row, label, :length], alpha)
                pooled = alpha @ real
                torch.testing.assert_close(vectors[row, label], pooled)
                expected = output.weight[label] @ pooled + output.bias[label]
                torch.testing.assert_close(logits[row, label], expected)
        assert not weights[2].any()
        torch.testing.assert_close(records[""].weights[:, 0], weights)


def test_label_attention_reads_the_names_of_labels() -> None:
    names = LabelNames([(5,), (6, 7), ()])
    matches = names(torch.tensor([[5, 6, 1, 5], [7, 2, 6, 3], [7, 7, 1, 1]]))
    assert matches.whole.tolist() == [
        [True, False, False],
        [False, True, False],
        [False, False, False],
    ]
    assert matches.positions[0].tolist() == [
        [True, False, False, True],
        [False, True, False, False],
        [False] * 4,
    ]
    assert not names.state_dict(), "names are computed from the vocabulary"

    x, _ = sequences()
    x = x[:, :4]
    attention, output = LabelAttention(4, labels=3, names=True), LabelOutput(4, 3, names=True)
    attention, output = attention.double(), output.double()
    with torch.no_grad():
        output.bias.copy_(torch.tensor([-2.0, -6.0, -4.0]))
        assert output.name_weights.tolist() == [0.0, 0.5]
        output.name_weights.copy_(torch.tensor([0.5, 0.25]))
        plain = attention(x)
        found = attention(x, matches=matches)
        odds = found.weights / plain.weights  # each word of a name weighs e times as much
        torch.testing.assert_close(odds[0, 0, 0] / odds[0, 0, 1], torch.tensor(math.e).double())
        torch.testing.assert_close(found.weights[0, 2], plain.weights[0, 2])
        change = output(found.vectors, matches) - output(found.vectors)
    expected = [[0.5 + 0.5, 0.0, 0.0], [0.0, 0.5 + 1.5, 0.0], [0.0, 0.0, 0.0]]
    torch.testing.assert_close(change, torch.tensor(expected).double())
