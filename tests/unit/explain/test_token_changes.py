"""Kept, changed and new tokens of two outputs, against the definition of the edit distance."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.inference import branches
from dragoman.inference.branches import compare_tokens

tokens = st.lists(st.integers(4, 7), max_size=9)


@pytest.mark.parametrize(
    ("before", "after", "states", "removed", "summary"),
    [
        ([4, 5], [4, 5], ["kept", "kept"], [], "no token changed"),
        ([4, 5, 6], [4, 9, 6], ["kept", "changed", "kept"], [], "1 of 3 tokens changed"),
        ([4, 6], [4, 5, 6], ["kept", "new", "kept"], [], "1 of 3 tokens new"),
        ([4, 5, 6], [4, 6], ["kept", "kept"], [1], "1 removed"),
        ([], [], [], [], "no token changed"),
        ([], [5], ["new"], [], "1 of 1 token new"),
        ([5], [], [], [0], "1 removed"),
        ([4, 5], [6, 7, 8], ["changed", "changed", "new"], [], "2 of 3 tokens changed, 1 new"),
    ],
)
def test_each_token_is_kept_changed_or_new(before, after, states, removed, summary) -> None:
    found = compare_tokens(before, after)
    assert (found.states, found.removed, found.summary) == (states, removed, summary)


def test_the_summary_has_both_scores() -> None:
    found = compare_tokens(
        range(9), [0, 1, 2, 30, 40, 50, 6, 7, 8], score_before=-4.21, score_after=-4.87
    )
    assert found.summary == "3 of 9 tokens changed, score -4.21 -> -4.87"
    assert found.to_dict()["summary"] == found.summary


def edit_distance(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Compute it as it is defined."""

    @cache
    def distance(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        replaced = distance(i - 1, j - 1) + (before[i - 1] != after[j - 1])
        return min(replaced, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    return distance(len(before), len(after))


@given(before=tokens, after=tokens)
def test_as_few_tokens_as_possible_change(before: list[int], after: list[int]) -> None:
    found = compare_tokens(before, after)
    assert len(found.states) == len(found.origins) == len(after)
    changes = sum(state != "kept" for state in found.states) + len(found.removed)
    assert changes == edit_distance(tuple(before), tuple(after))
    used = [origin for origin in found.origins if origin is not None]
    assert sorted([*used, *found.removed]) == list(range(len(before)))
    assert used == sorted(used)
    for state, origin, token in zip(found.states, found.origins, after, strict=True):
        if state == "kept":
            assert before[origin] == token
        elif state == "changed":
            assert before[origin] != token
        else:
            assert origin is None


def test_outputs_too_long_to_compare_keep_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "MAX_COMPARED", 3)
    found = compare_tokens([1, 5, 6, 2], [1, 7, 5, 8, 2])
    assert found.states == ["kept", "changed", "changed", "new", "kept"]
