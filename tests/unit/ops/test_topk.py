"""Finding the largest of a row by blocks, against torch's own search through all of it."""

from __future__ import annotations

import pytest
import torch

from dragoman.ops.topk import ARGMAX_BLOCK, TOPK_BLOCK, blocked_argmax, blocked_topk

WIDTHS = [7, ARGMAX_BLOCK * 4, ARGMAX_BLOCK * 4 + 1, 3000, TOPK_BLOCK * 50 + 3]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("levels", [0, 3], ids=["distinct", "many equal"])
def test_the_first_of_the_largest_is_found(width: int, levels: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, levels, (9, width)).float() if levels else torch.randn(9, width)
    x[4] = -torch.inf
    values, ids = blocked_argmax(x)
    for row in range(9):
        assert values[row] == x[row].max()
        assert ids[row] == (x[row] == x[row].max()).nonzero()[0]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("position", [0, -1])
def test_nan_is_not_skipped(width: int, position: int) -> None:
    x = torch.zeros(2, width)
    x[1, position] = torch.nan
    assert blocked_argmax(x).values.isnan().tolist() == [False, True]
    assert blocked_topk(x, 3).values[1].isnan().any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 5])
def test_several_are_those_of_topk(width: int, count: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(6, width)
    x[2, : width // 2] = 1.5  # more equal ones than are asked for
    x[3] = torch.arange(width).float()  # all of them at the end, where a block may be cut short
    values, ids = blocked_topk(x, count)
    assert torch.equal(values, x.topk(count).values)
    assert torch.equal(x.gather(1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist())
