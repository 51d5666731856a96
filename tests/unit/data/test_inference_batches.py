"""Batches of similar lengths: their order, how full they are, and what limits them."""

from __future__ import annotations

import pytest

from dragoman.data.inference_batches import group_by_length


def test_the_longest_rows_come_first_and_equal_ones_keep_their_order() -> None:
    groups = group_by_length([2, 5, 3, 5, 2], batch_tokens=10)
    assert groups == [[1, 3], [2, 0, 4]]


def test_a_batch_is_filled_to_its_padded_tokens() -> None:
    assert group_by_length([4] * 5, batch_tokens=12) == [[0, 1, 2], [3, 4]]
    assert group_by_length([4] * 5, batch_tokens=11) == [[0, 1], [2, 3], [4]]
    assert group_by_length([4, 3, 2, 1], batch_tokens=12) == [[0, 1, 2], [3]], "padded to 4"


@pytest.mark.parametrize(("rows_per_sentence", "count"), [(1, 6), (2, 3), (3, 2), (6, 1), (7, 1)])
def test_a_row_counts_as_often_as_its_beam_has_hypotheses(
    rows_per_sentence: int, count: int
) -> None:
    groups = group_by_length([2] * 6, batch_tokens=12, rows_per_sentence=rows_per_sentence)
    assert [len(group) for group in groups] == [count] * (6 // count)


def test_a_row_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    assert group_by_length([3, 40, 50, 3], batch_tokens=10) == [[2], [1], [0, 3]]


def test_a_limit_on_rows_replaces_the_limit_on_tokens() -> None:
    groups = group_by_length([9] * 5, batch_tokens=10, rows_per_sentence=4, max_rows=2)
    assert groups == [[0, 1], [2, 3], [4]]
    assert group_by_length([1, 1], batch_tokens=1000, max_rows=1) == [[0], [1]]
