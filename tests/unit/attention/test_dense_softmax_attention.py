"""Dense softmax gates and multi-dimensional pooling."""

from __future__ import annotations

import pytest
import torch

from dragoman.attention import FeatureGate, MultiDimensionalPooling, PositionGate, record
from dragoman.errors import DragomanError


def test_a_feature_gate_is_a_softmax_times_its_input() -> None:
    torch.manual_seed(0)
    gate, x = FeatureGate(4), torch.randn(2, 3, 4)
    expected = x * torch.softmax(x @ gate.dense.weight.T + gate.dense.bias, dim=-1)
    torch.testing.assert_close(gate(x), expected)


def test_a_position_gate_weights_positions_by_feature_and_skips_padding() -> None:
    torch.manual_seed(0)
    gate, x = PositionGate(5), torch.randn(2, 5, 3)
    mask = torch.arange(5) < torch.tensor([[5], [2]])
    with record(torch.nn.Sequential(gate)) as records:
        gated = gate(x, mask=mask)
    (weights,) = [each.weights for each in records.values()]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 1, 3))
    assert not weights[1, 0, :, 2:].any()
    scores = torch.einsum("sr,brd->bsd", gate.dense.weight, x) + gate.dense.bias[:, None]
    torch.testing.assert_close(gated[0], (x * scores.softmax(1))[0])
    changed = x.clone()
    changed[1, 2:] = 9.0
    torch.testing.assert_close(gate(changed, mask=mask)[1, :2], gated[1, :2])


def test_a_position_gate_has_one_length() -> None:
    with pytest.raises(DragomanError, match="5 positions of its gate; found 4; pad it"):
        PositionGate(5)(torch.randn(2, 4, 3))


def test_every_feature_has_weights_of_its_own() -> None:
    torch.manual_seed(0)
    pooling, x = MultiDimensionalPooling(3), torch.randn(2, 4, 3)
    mask = torch.arange(4) < torch.tensor([[4], [2]])
    pooled = pooling(x, mask=mask)
    torch.testing.assert_close(pooled.weights.sum(2), torch.ones(2, 3))
    for row, length in enumerate((4, 2)):
        alone = pooling(x[row : row + 1, :length])
        torch.testing.assert_close(pooled.vectors[row], alone.vectors[0])
        for feature in range(3):
            weights = alone.weights[0, feature]
            expected = weights @ x[row, :length, feature]
            torch.testing.assert_close(pooled.vectors[row, feature], expected)
    assert (pooled.weights[0, 0] - pooled.weights[0, 1]).abs().max() > 1e-3


def test_scores_of_features_are_two_layers_with_elu() -> None:
    torch.manual_seed(0)
    pooling, x = MultiDimensionalPooling(3, score_width=5), torch.randn(2, 4, 3)
    hidden = pooling.hidden(x)
    hidden = torch.where(hidden > 0, hidden, hidden.exp() - 1)
    expected = pooling.scores(hidden).softmax(dim=1).transpose(1, 2)
    torch.testing.assert_close(pooling(x).weights, expected)
