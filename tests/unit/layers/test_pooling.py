"""Poolings and label attention against loops over single rows."""

from __future__ import annotations

import torch

from dragoman.attention import record
from dragoman.layers.pooling import (
    LabelAttention,
    LabelOutput,
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
