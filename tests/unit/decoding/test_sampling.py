"""Epsilon sampling: which tokens are drawn, and how often."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import search
from dragoman.errors import ConfigError
from tests.search_kit import TableModel

PROBS = torch.tensor([0.05, 0.4, 0.05, 0.3, 0.2])
DRAWS = ((np.arange(4000) + 0.5) / 4000).tolist()


def frequencies(sampling: Sampling, probs: torch.Tensor = PROBS) -> list[float]:
    """Return how often each token is drawn at evenly spaced draws."""
    drawn = sampling.draw(probs.log().repeat(len(DRAWS), 1), DRAWS, 0)
    return (np.bincount(drawn.tokens, minlength=probs.numel()) / len(DRAWS)).tolist()


@pytest.mark.parametrize(
    ("epsilon", "kept"),
    [(0.0, [0, 1, 2, 3, 4]), (0.04, [0, 1, 2, 3, 4]), (0.1, [1, 3, 4]), (0.25, [1, 3]), (0.9, [1])],
)
def test_tokens_below_epsilon_are_never_drawn(epsilon: float, kept: list[int]) -> None:
    expected = torch.zeros(5)
    expected[kept] = PROBS[kept] / PROBS[kept].sum()
    assert frequencies(Sampling(epsilon=epsilon)) == pytest.approx(expected.tolist(), abs=1e-3)


def test_epsilon_is_of_the_models_own_probabilities() -> None:
    """A temperature flattens what is kept and keeps nothing else."""
    kept = PROBS[[1, 3]] ** 0.5
    found = frequencies(Sampling(temperature=2.0, epsilon=0.25))
    assert [found[1], found[3]] == pytest.approx((kept / kept.sum()).tolist(), abs=1e-3)


def test_top_p_counts_what_epsilon_left() -> None:
    assert frequencies(Sampling(epsilon=0.25, top_p=0.5)) == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_large_vocabulary_is_sorted_in_part_and_draws_the_same(temperature: float) -> None:
    """Equal probabilities too: the lower id first, as in a full sort."""
    torch.manual_seed(0)
    logits = torch.randn(64, 500).mul(3).round()
    log_probs = logits.log_softmax(-1)
    sampling = Sampling(temperature=temperature, epsilon=0.02)
    values, ids = sampling._sort_tokens(log_probs)
    assert ids.size(1) == 51
    full = torch.sort(log_probs.double() / temperature, dim=-1, descending=True, stable=True)
    kept = log_probs.gather(-1, full.indices) >= torch.tensor(0.02).log()
    kept = kept[:, :51]
    assert torch.equal(ids[kept], full.indices[:, :51][kept])
    assert torch.equal(values[kept], full.values[:, :51][kept])


def test_a_finished_sample_is_kept_beside_a_truncated_one_of_the_same_tokens() -> None:
    """At the limit a draw either ends the output or cuts it, after the same tokens."""
    [found] = search(
        TableModel(peak=0.1),
        torch.tensor([3]),
        limits=[1],
        strategy=Sampling(seed=2, samples=60),
    )
    outputs = [(tuple(each.tokens), each.finished) for each in found]
    assert len(outputs) == len(set(outputs))
    words = {tokens for tokens, _ in outputs if tokens}
    assert set(outputs) == {((), True)} | {(each, end) for each in words for end in (True, False)}
    finished = [end for _, end in outputs]
    assert finished == sorted(finished, reverse=True)


@pytest.mark.parametrize("epsilon", [-0.1, 1.0, float("nan")])
def test_an_impossible_epsilon_is_reported(epsilon: float) -> None:
    with pytest.raises(ConfigError, match=f"less than 1; found {epsilon}"):
        Sampling(epsilon=epsilon)
