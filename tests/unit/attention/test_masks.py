"""Attention masks, drawn: a row is a query, x what it may attend to."""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.attention import masks


def drawn(mask: Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in mask]


def test_a_prefix_is_visible_to_all_and_the_rest_is_causal() -> None:
    assert drawn(masks.prefix(2, 4)) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert torch.equal(masks.prefix(0, 4), masks.causal(4))
    assert masks.prefix(4, 4).all()


def test_the_order_of_the_ranks_is_the_order_of_the_factorization() -> None:
    # predicted in the order 2, 0, 1
    assert drawn(masks.permuted(torch.tensor([[1, 2, 0]]))[0]) == ["x.x", "xxx", "..x"]
    assert torch.equal(masks.permuted(torch.arange(4)[None])[0], masks.causal(4))
    assert masks.permuted(torch.zeros(1, 4)).all()


def test_queries_attend_to_earlier_positions_and_are_never_attended_to() -> None:
    ranks = torch.tensor([[0, 2, 1, 0]])  # 0 and 3 are given; 2, then 1 is predicted
    assert drawn(masks.two_stream(ranks, ranks[:, [1, 2]])[0]) == [
        "x..x..",  # content
        "xxxx..",
        "x.xx..",
        "x..x..",
        "x.xx..",  # what predicts 1 sees 2
        "x..x..",  # what predicts 2 sees what is given
    ]
