"""The length penalty of Wu et al. (2016), equation 14, by numbers."""

from __future__ import annotations

import math

import pytest

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty, parse_length_penalty
from dragoman.decoding.sampling import Sampling
from dragoman.errors import ConfigError


@pytest.mark.parametrize(
    ("alpha", "length", "divisor"),
    [(1.0, 0, 5 / 6), (1.0, 1, 1.0), (1.0, 7, 2.0), (0.5, 19, 2.0), (2.0, 13, 9.0), (0.0, 40, 1.0)],
)
def test_the_divisor_is_a_power_of_five_plus_the_length_over_six(
    alpha: float, length: int, divisor: float
) -> None:
    penalty = WuLengthPenalty(alpha)
    assert penalty.divisor(length) == pytest.approx(divisor)
    assert penalty.score(-3.0, length) == pytest.approx(-3.0 / divisor)


def test_alpha_is_a_finite_number_of_at_least_0_and_0_6_if_none_is_given() -> None:
    assert WuLengthPenalty().alpha == 0.6
    for strategy in (GreedySearch(), BeamSearch(), Sampling()):
        assert strategy.penalty == WuLengthPenalty(0.6)
    with pytest.raises(ConfigError, match=r"at least 0; found inf; try 0\.6"):
        WuLengthPenalty(math.inf)


def test_the_penalty_that_an_explanation_names_is_found_again() -> None:
    assert parse_length_penalty("gnmt 1.5") == WuLengthPenalty(1.5)
    assert parse_length_penalty("") == WuLengthPenalty(0.0)
    assert parse_length_penalty("none") == WuLengthPenalty(0.0)
