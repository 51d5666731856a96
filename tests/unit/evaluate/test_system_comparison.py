"""Comparison of systems: sacreBLEU's paired bootstrap and the largest changes."""

from __future__ import annotations

import pytest
import sacrebleu

from dragoman.errors import ConfigError, DataError
from dragoman.evaluate.system_comparison import SystemScore, compare_systems, largest_changes

REFERENCES = [
    f"The {animal} number {n} sleeps on the old mat."
    for n, animal in enumerate(["cat", "dog", "bird"] * 20)
]
GOOD = list(REFERENCES)
BAD = [text.replace("sleeps on", "is lying at") for text in REFERENCES]


def test_a_real_difference_is_clear() -> None:
    found = compare_systems({"bad": BAD, "good": GOOD}, REFERENCES, samples=100)
    by_name = {(each.system, each.metric): each for each in found.results}
    assert by_name["bad", "BLEU"].p is None, "the first system is the baseline"
    assert by_name["good", "BLEU"].is_significant
    assert by_name["good", "BLEU"].value == pytest.approx(100.0)
    assert not by_name["bad", "BLEU"].is_significant
    assert by_name["good", "TER"].value == pytest.approx(0.0)


def test_the_same_output_twice_is_chance() -> None:
    found = compare_systems({"one": BAD, "two": list(BAD)}, REFERENCES, samples=100)
    assert not any(each.is_significant for each in found.results)
    assert found.moved == ()


def test_signatures_contain_the_resampling() -> None:
    found = compare_systems({"bad": BAD, "good": GOOD}, REFERENCES, samples=50)
    assert "bs:50" in found.signatures["BLEU"]
    assert "seed:" in found.signatures["BLEU"]
    assert set(found.signatures) == {"BLEU", "chrF2", "TER"}


@pytest.mark.parametrize("by", ["chrf", "bleu"])
def test_largest_difference_comes_first(by: str) -> None:
    after = list(BAD)
    after[7] = REFERENCES[7]  # a gain
    after[11] = "x"  # a loss, and the largest change of all
    moved = largest_changes(BAD, after, REFERENCES, by=by)
    assert {each.line for each in moved} == {8, 12}
    assert abs(moved[0].change) >= abs(moved[1].change)
    gain = next(each for each in moved if each.line == 8)
    assert gain.change > 0
    assert (gain.before, gain.after, gain.reference) == (BAD[7], REFERENCES[7], REFERENCES[7])


def test_a_difference_in_case_is_no_change_with_lowercase() -> None:
    after = list(BAD)
    after[2] = BAD[2].upper()
    after[5] = REFERENCES[5]
    found = compare_systems({"bad": BAD, "new": after}, REFERENCES, lowercase=True, samples=10)
    assert [each.line for each in found.moved] == [6, 3]
    assert found.moved[1].change == 0
    [cased, _] = compare_systems({"bad": BAD, "new": after}, REFERENCES, samples=10).moved
    assert cased.line == 3


def test_no_more_sentences_than_requested() -> None:
    assert len(largest_changes(BAD, GOOD, REFERENCES, show=4)) == 4


def test_ter_cannot_rank_sentences() -> None:
    with pytest.raises(ConfigError, match="--by must be chrf or bleu; found 'ter'"):
        largest_changes(BAD, GOOD, REFERENCES, by="ter")


def test_one_system_is_not_a_comparison() -> None:
    with pytest.raises(DataError, match="found 1; name at least two"):
        compare_systems({"one": BAD}, REFERENCES)


def test_a_short_file_is_named_with_the_numbers() -> None:
    with pytest.raises(
        DataError, match="short must have as many lines as the reference; found 59 and 60"
    ):
        compare_systems({"bad": BAD, "short": GOOD[:-1]}, REFERENCES)


def test_a_comparison_turns_into_plain_values() -> None:
    values = compare_systems({"bad": BAD, "good": GOOD}, REFERENCES, samples=50, show=1).to_dict()
    assert values["samples"] == 50
    assert values["results"][0] == {
        **values["results"][0],
        "system": "bad",
        "metric": "BLEU",
        "p": None,
    }
    assert values["moved"][0]["line"] >= 1


@pytest.mark.parametrize(
    ("p", "significant"), [(0.0, True), (0.049, True), (0.05, False), (None, False)]
)
def test_a_difference_is_significant_below_five_percent(p: float | None, significant: bool) -> None:
    assert SystemScore("a", "BLEU", 1.0, 1.0, 0.1, p).is_significant == significant


def test_a_score_has_the_mean_and_margin_of_its_samples() -> None:
    mixed = [*GOOD[:30], *BAD[30:]]
    found = compare_systems({"bad": BAD, "mixed": mixed}, REFERENCES, samples=100).results
    each = next(one for one in found if (one.system, one.metric) == ("mixed", "BLEU"))
    assert each.value == pytest.approx(sacrebleu.corpus_bleu(mixed, [REFERENCES]).score)
    assert each.mean == pytest.approx(each.value, abs=2)
    assert 0 < each.margin < 20


def test_changes_of_equal_size_are_in_the_order_of_lines() -> None:
    moved = largest_changes(["a b"] * 4, ["a c", "a b", "c b", "a c"], ["a b"] * 4)
    assert [each.line for each in moved if each.change == moved[0].change][:2] == [1, 3]
    lines = [each.line for each in largest_changes(["x"] * 5, ["y z"] * 5, ["y z"] * 5, show=3)]
    assert lines == [1, 2, 3]


def test_short_sentences_are_ranked_by_bleu_of_their_own_order() -> None:
    before, after, reference = "a cat", "a dog", "a dog"
    [moved] = largest_changes([before], [after], [reference], by="bleu")
    scores = [sacrebleu.sentence_bleu(text, [reference]).score for text in (before, after)]
    assert moved.change == pytest.approx(scores[1] - scores[0])
    assert scores[1] == pytest.approx(100.0)


def test_changes_are_those_of_the_first_two_systems_by_the_chosen_metric() -> None:
    systems = {"bad": BAD, "new": [GOOD[0], *BAD[1:]], "good": GOOD}
    options = {"samples": 10, "tokenize": "char", "tgt_lang": "zh"}
    for by in ("chrf", "bleu"):
        found = compare_systems(systems, REFERENCES, by=by, **options).moved
        assert found == tuple(
            largest_changes(BAD, systems["new"], REFERENCES, by=by, tokenize="char", tgt_lang="zh")
        )
        assert [each.line for each in found] == [1]
