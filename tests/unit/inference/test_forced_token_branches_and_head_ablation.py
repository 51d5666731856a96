"""Branches: another token at a step, the tokens before it kept, and the rest decoded again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from translator_kit import load_translator_that_ends

from dragoman.errors import DataError
from dragoman.explain import Explanation
from dragoman.inference import (
    Translator,
    forced_token_branches_and_head_ablation,
    single_batch_translator,
)
from dragoman.inference.forced_token_branches_and_head_ablation import (
    compare_outputs,
    compare_tokens,
)
from dragoman.text.special_tokens import BOS, PAD, UNK

SOURCE = "Zwei Kinder spielen?"


@pytest.fixture(scope="module")
def translator(bundle: Path) -> Translator:
    return load_translator_that_ends(bundle)


@pytest.fixture(scope="module")
def explanation(translator: Translator) -> Explanation:
    return translator.explain(SOURCE, beam=3, length_penalty=1.0)


def test_branches_of_a_file_are_those_that_a_page_would_ask_for(
    translator: Translator, explanation: Explanation
) -> None:
    found = translator.add_branches(explanation, per_step=2)
    assert found.digest == explanation.digest, "branches are no part of it"
    assert len(found.branches) == 2 * len(explanation.steps)
    for name, branch in found.branches.items():
        step, token = map(int, name.split(":"))
        assert token not in (PAD, BOS)
        alone = translator.branch(explanation, step, token)
        assert branch["target"]["text"] == alone.translation
        ids = [each["id"] for each in branch["target"]["tokens"]]
        assert ids == [each.id for each in alone.target.tokens]
        assert ids[: step + 1] == [each.id for each in explanation.target.tokens[:step]] + [token]
        assert branch["score"]["sum"] == pytest.approx(alone.score["sum"], abs=1e-4)
        assert branch["score"]["normalised"] == pytest.approx(alone.score["normalised"], abs=1e-4)
        assert branch["score"]["penalty"] == alone.score["penalty"] == "gnmt 1"
        for mine, other in zip(branch["steps"], alone.steps, strict=True):
            assert mine["id"] == other.id
            assert mine["forced"] == other.forced
            assert mine["logprob"] == pytest.approx(other.logprob, abs=1e-4)
        changes = compare_outputs(explanation, alone)
        assert branch["changes"]["states"] == list(changes.states)
    read = Explanation.from_json(found.to_json())
    assert read.branches == found.branches
    small = found.to_dict(budget=len(explanation.to_json()))
    assert small["branches"] == {}
    assert "branches" in small["limits"]["dropped"]


def test_the_alternatives_of_forced_tokens_are_no_branches(translator: Translator) -> None:
    found = translator.explain(SOURCE, beam=2, prefix_ids=[300, 301])
    assert {
        step for step, _ in forced_token_branches_and_head_ablation.list_branches(found, 1)
    } == set(range(2, len(found.steps)))


def test_there_are_at_most_so_many_branches(
    translator: Translator, explanation: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forced_token_branches_and_head_ablation, "MAX_BRANCHES", 3)
    assert len(translator.add_branches(explanation, per_step=8).branches) == 3
    assert translator.add_branches(explanation, per_step=0).branches == {}


@pytest.mark.parametrize("step", [-1, 99])
def test_a_branch_must_leave_at_a_step_of_the_target(
    translator: Translator, explanation: Explanation, step: int
) -> None:
    with pytest.raises(DataError, match=f"a branch must leave the target .*; found {step}"):
        translator.branch(explanation, step, 300)


def test_special_token_cannot_start_a_branch(
    translator: Translator, explanation: Explanation
) -> None:
    with pytest.raises(DataError, match="found 1"):
        translator.branch(explanation, 0, BOS)


def test_a_branch_has_the_heads_off_that_its_explanation_had_off(translator: Translator) -> None:
    off = ["x0.1", "d1.0"]
    found = translator.explain(SOURCE, beam=2, off=off)
    [(step, token), *_] = forced_token_branches_and_head_ablation.list_branches(found, 1)
    branch = translator.branch(found, step, token)
    assert branch.request["off"] == off
    assert (
        branch.digest
        == translator.explain(
            SOURCE,
            beam=2,
            off=off,
            prefix_ids=[*(each.id for each in found.target.tokens[:step]), token],
        ).digest
    )
    stored = translator.add_branches(found, per_step=1).branches[f"{step}:{token}"]
    assert stored["target"]["text"] == branch.translation
    assert stored["score"]["sum"] == pytest.approx(branch.score["sum"], abs=1e-4)


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
    monkeypatch.setattr(forced_token_branches_and_head_ablation, "MAX_COMPARED", 3)
    found = compare_tokens([1, 5, 6, 2], [1, 7, 5, 8, 2])
    assert found.states == ["kept", "changed", "changed", "new", "kept"]


def test_heads_are_listed_by_the_size_of_their_effect(explanation: Explanation) -> None:
    """An exact effect counts before an estimate, and neither its sign nor a missing one does."""
    effects = [(0.1, -3.0), (2.0, None), (-1.0, None), (9.0, 0.5), (None, None)]
    heads = [
        replace(explanation.heads[0], head=number, effect_estimate=estimate, effect_exact=exact)
        for number, (estimate, exact) in enumerate(effects)
    ]
    changed = replace(explanation, heads=heads)
    site = explanation.heads[0].site
    names = [f"{site}.{number}" for number in (0, 1, 2, 3)]
    assert forced_token_branches_and_head_ablation.list_heads(changed, 10) == names
    assert forced_token_branches_and_head_ablation.list_heads(changed, 2) == names[:2]


def test_branches_are_batched_by_source_and_prefix(
    translator: Translator, explanation: Explanation, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped = list[int]()

    def group(lengths: list[int], **options: object) -> list[list[int]]:
        grouped.extend(lengths)
        return [[number] for number in range(len(lengths))]

    monkeypatch.setattr(single_batch_translator, "group_by_length", group)
    translator.add_branches(explanation, per_step=1)
    source = len(explanation.source.tokens)  # with its end of sentence
    assert grouped == [source + step + 1 for step in range(len(explanation.steps))]


def test_an_unknown_token_can_be_forced(translator: Translator) -> None:
    found = translator.explain(SOURCE, prefix_ids=[UNK], attribution=None)
    assert found.target.tokens[0].id == UNK
    with pytest.raises(DataError, match=f"prefix_ids must be tokens of the target, {UNK} to"):
        translator.explain(SOURCE, prefix_ids=[BOS])
