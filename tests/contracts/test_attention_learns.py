"""Every score and alignment function learns where to attend from the target output alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dragoman.attention import Mechanism
from dragoman.attention.catalogue import ALIGNMENTS, SCORES

LENGTH = 6
WIDTHS = {"query_width": LENGTH, "key_width": LENGTH, "score_width": 16}


def learn(score: str, alignment: str, order: Tensor) -> Tensor:
    """Train position t to attend to key order[t]; return the weights (T, S) after training."""
    torch.manual_seed(0)
    attention = Mechanism(SCORES.load(score)(**WIDTHS), ALIGNMENTS.load(alignment)(**WIDTHS))
    query_proj = nn.Linear(LENGTH, LENGTH)  # a dot product has nothing of its own to train
    optimizer = torch.optim.Adam([*attention.parameters(), *query_proj.parameters()], lr=0.05)
    positions = torch.eye(LENGTH).expand(16, LENGTH, LENGTH)
    for _ in range(150):
        value = torch.randn(16, LENGTH, 4)
        found = attention(query=query_proj(positions), key=positions, value=value).context
        loss = (found - value[:, order]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    attention.eval()
    with torch.no_grad():
        weights: Tensor = attention(
            query=query_proj(positions), key=positions, value=positions
        ).weights[0]
    return weights


@pytest.mark.parametrize("score", SCORES)
def test_a_score_learns_to_read_backwards(score: str) -> None:
    backwards = torch.arange(LENGTH).flip(0)
    weights = learn(score, "softmax", backwards)
    if "learns" in (SCORES[score].exempt or {}):  # the weaker promise: one row for all queries
        torch.testing.assert_close(weights, weights[:1].expand_as(weights))
        return
    assert weights.argmax(-1).tolist() == backwards.tolist()
    assert weights[torch.arange(LENGTH), backwards].mean() > 0.8


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_an_alignment_learns_to_read_along(alignment: str) -> None:
    """What monotonic attention learns as an expectation holds when it chooses: no gap between
    training and use.
    """
    weights = learn("normed_additive", alignment, torch.arange(LENGTH))
    assert weights.argmax(-1).tolist() == list(range(LENGTH))
    assert weights.diagonal().mean() > 0.8
