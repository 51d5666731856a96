"""Co-attention against its equations, one position at a time."""

import pytest
import torch
from torch import nn

from dragoman.attention import edit, record
from dragoman.attention.co_attention import CoAttention
from dragoman.errors import DragomanError


def by_the_equations(first, second, first_length, second_length, projection):
    a, b = first[:first_length], second[:second_length]
    scores = torch.stack([torch.stack([projection(x) @ projection(y) for y in b]) for x in a])
    forward = torch.stack([scores[t].softmax(0) @ b for t in range(first_length)])
    backward = torch.stack([scores[:, s].softmax(0) @ a for s in range(second_length)])
    return forward, backward


@pytest.mark.parametrize("projected", [False, True])
def test_both_directions_are_those_of_the_paper(projected):
    torch.manual_seed(0)
    projection = nn.Sequential(nn.Linear(6, 5), nn.ReLU()) if projected else None
    attention = CoAttention(projection)
    first, second = torch.randn(2, 4, 6), torch.randn(2, 5, 6)
    lengths = ((4, 5), (2, 3))
    masks = [
        torch.arange(size) < torch.tensor([[pair[side]] for pair in lengths])
        for side, size in ((0, 4), (1, 5))
    ]
    found = attention(first, second, first_mask=masks[0], second_mask=masks[1])
    for row, (t, s) in enumerate(lengths):
        expected = by_the_equations(first[row], second[row], t, s, attention.projection)
        torch.testing.assert_close(found.first[row, :t], expected[0])
        torch.testing.assert_close(found.second[row, :s], expected[1])


def test_both_directions_are_recorded_and_edited():
    torch.manual_seed(0)
    model = nn.ModuleDict({"cross": CoAttention()})
    first, second = torch.randn(1, 3, 4), torch.randn(1, 2, 4)
    plain = model["cross"](first, second)
    with record(model) as records:
        again = model["cross"](first, second)
    torch.testing.assert_close(again.first, plain.first)
    assert list(records) == ["cross.a", "cross.b"]
    assert records["cross.a"].weights.shape == (1, 1, 3, 2)
    assert records["cross.b"].weights.shape == (1, 1, 2, 3)
    torch.testing.assert_close(records["cross.b"].weights.sum(-1), torch.ones(1, 1, 2))
    torch.testing.assert_close(records["cross.a"].output[:, 0], plain.first)
    with edit(model, {"cross.a": torch.zeros_like}):
        assert not model["cross"](first, second).first.any()


@pytest.mark.parametrize("side", ["first_mask", "second_mask"])
def test_a_mask_of_the_other_sequence_is_rejected(side):
    first, second = torch.randn(2, 4, 6), torch.randn(2, 5, 6)
    for size in (4, 5):
        masks = {side: torch.ones(2, size, dtype=torch.bool)}
        if size == (4 if side == "first_mask" else 5):
            CoAttention()(first, second, **masks)
        else:
            with pytest.raises(DragomanError, match="mask"):
                CoAttention()(first, second, **masks)
