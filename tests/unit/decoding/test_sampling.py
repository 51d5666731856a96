"""Epsilon sampling: which tokens are drawn, and how often."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling, uniform_draw
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


def test_top_p_is_applied_after_epsilon() -> None:
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


def test_top_p_is_applied_after_top_k() -> None:
    """Of 0.4 and 0.3 the first alone has more than 0.55."""
    assert frequencies(Sampling(top_k=2, top_p=0.55)) == [0, 1, 0, 0, 0]


def test_epsilon_applies_to_the_full_distribution() -> None:
    """0.3 of the model is below 0.35, though it is more of the two best."""
    assert frequencies(Sampling(top_k=2, epsilon=0.35)) == [0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("top_p", "count"), [(0.2, 1), (0.25, 1), (0.3, 2), (0.5, 2), (0.75, 3), (0.8, 4), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, count: int) -> None:
    """Of equal ones those with the lower ids."""
    expected = [1 / count] * count + [0.0] * (4 - count)
    found = frequencies(Sampling(top_p=top_p), torch.full((4,), 0.25))
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_token_of_exactly_epsilon_is_drawn() -> None:
    assert frequencies(Sampling(epsilon=0.5), torch.full((2,), 0.5, dtype=torch.float64)) == [
        0.5,
        0.5,
    ]


def test_where_all_tokens_are_below_epsilon_the_most_probable_is_drawn() -> None:
    flat = torch.tensor([0.2, 0.3, 0.25, 0.25], dtype=torch.float64)
    assert frequencies(Sampling(epsilon=0.5), flat) == [0, 1, 0, 0]


def test_equal_tokens_are_drawn_in_the_order_of_their_ids() -> None:
    quarters = torch.full((4, 4), 0.25).log()
    assert Sampling().draw(quarters, [0.0, 0.25, 0.5, 0.75], 0).tokens.tolist() == [0, 1, 2, 3]
    probs = torch.full((1, 100), 0.01)
    for draw, token in ((0.0, 0), (0.005, 0), (0.255, 25), (0.995, 99)):
        assert Sampling().draw(probs.log(), [draw], 0).tokens.tolist() == [token]


def test_a_draw_is_a_function_of_seed_line_sample_and_step() -> None:
    """By its value, so that a seed gives the same outputs in every version."""
    assert uniform_draw(1, 2, 3, 4) == 0.8237397162346505
    assert uniform_draw(1, 2, 3, 4, rejections=1) == 0.6236185650876989
    keys = [(1, 2, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3), (1, 2, 3, 5)]
    draws = [uniform_draw(*key, rejections=count) for key in keys for count in range(3)]
    assert len(set(draws)) == len(draws)
    many = np.array([uniform_draw(7, line, 0, 0) for line in range(2000)])
    assert many.min() < 0.01
    assert many.max() > 0.99
    assert many.mean() == pytest.approx(0.5, abs=0.03)


def test_samples_are_ranked_by_score_and_the_unfinished_come_last() -> None:
    for alpha in (0.0, 2.0):
        strategy = Sampling(seed=4, samples=40, penalty=WuLengthPenalty(alpha))
        [found] = search(
            TableModel(peak=0.3, end=-1.0), torch.tensor([3]), limits=[4], strategy=strategy
        )
        ranks = [(not each.finished, -each.score) for each in found]
        assert ranks == sorted(ranks)
        assert len({rank for rank, _ in ranks}) == 2
        for each in found:
            assert each.score == pytest.approx(
                WuLengthPenalty(alpha).score(each.total, len(each.log_probs))
            )


def test_equal_samples_are_returned_once_unless_all_are_requested() -> None:
    def draw(*, distinct: bool) -> list[tuple[list[int], bool]]:
        strategy = Sampling(seed=4, samples=40, distinct=distinct)
        [found] = search(TableModel(), torch.tensor([3]), limits=[2], strategy=strategy)
        return [(each.tokens, each.finished) for each in found]

    every, once = draw(distinct=False), draw(distinct=True)
    assert len(every) == 40
    assert len(once) < 40
    assert [each for at, each in enumerate(every) if each not in every[:at]] == once
    assert Sampling().distinct


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_least_and_the_largest_seed_draw(seed: int) -> None:
    [[found]] = search(TableModel(), torch.tensor([3]), limits=[2], strategy=Sampling(seed=seed))
    assert found.log_probs
    with pytest.raises(ConfigError, match=f"found {2**63}"):
        Sampling(seed=2**63)


def test_lines_without_numbers_are_numbered_by_their_place() -> None:
    model, strategy = TableModel(peak=0.1, end=-2.0), Sampling()
    assert strategy == Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=1, epsilon=0.0)
    sources = torch.tensor([7] * 12)
    plain = search(model, sources, limits=[6] * 12, strategy=strategy)
    numbered = search(
        model, sources, limits=[6] * 12, strategy=strategy, sample_ids=list(range(12))
    )
    assert plain == numbered


@pytest.mark.parametrize("epsilon", [-0.1, 1.0, float("nan")])
def test_an_impossible_epsilon_is_reported(epsilon: float) -> None:
    with pytest.raises(ConfigError, match=f"less than 1; found {epsilon}"):
        Sampling(epsilon=epsilon)


def test_every_sample_has_the_limit_and_the_prefix_of_its_own_line() -> None:
    limits, prefixes = [2, 5], [[4], [5, 6]]
    found = search(
        TableModel(peak=0.3, end=-9.0),
        torch.tensor([3, 4]),
        limits=limits,
        prefixes=prefixes,
        strategy=Sampling(samples=8, distinct=False),
    )
    for samples, limit, prefix in zip(found, limits, prefixes, strict=True):
        assert len(samples) == 8
        for sample in samples:
            assert sample.tokens[: len(prefix)] == prefix
        assert max(len(sample.tokens) for sample in samples) == limit
