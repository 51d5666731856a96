"""Scores of couplets: counts by hand, BLEU by sacreBLEU, perplexity by its formula."""

from __future__ import annotations

import math

import pytest
import sacrebleu

from dragoman.decoding.output_constraint_definitions import Forbid
from dragoman.errors import DataError
from dragoman.evaluate.couplet_metrics import perplexity_per_character, score_couplets

FIRST = ["处处春风", "山高，水远", "一二三"]
SECOND = ["家家夏雨", "海阔，天空", "四五六"]


def test_gold_couplets_violate_nothing() -> None:
    scores = score_couplets(FIRST, SECOND, SECOND, constraints=[Forbid(["死"])])
    assert scores.any_violation == 0
    assert set(scores.violations) == {
        "equal_length",
        "mirror",
        "no_copy",
        "punctuation",
        "forbid 死",
    }
    assert scores.equal_length == 1.0
    assert scores.bleu.value == pytest.approx(100.0)


def test_violations_are_counted_by_line() -> None:
    outputs = ["家人夏雨", "海阔水，空", "四五六七"]
    scores = score_couplets(FIRST, outputs, SECOND)
    assert scores.violations == {"equal_length": 1, "mirror": 1, "no_copy": 1, "punctuation": 1}
    assert scores.any_violation == 3
    assert scores.equal_length == pytest.approx(2 / 3)
    assert scores.bleu.value == pytest.approx(
        sacrebleu.corpus_bleu(outputs, [SECOND], tokenize="char").score
    )
    assert "smooth:exp" in scores.bleu.signature
    assert "smooth:add-k[1.00]" in scores.sentence_bleu.signature
    assert scores.to_dict()["bleu"]["signature"] == scores.bleu.signature


def test_unequal_numbers_of_lines_are_an_error() -> None:
    with pytest.raises(DataError, match="found 1 and 3"):
        score_couplets(FIRST, ["家"], SECOND)


def test_perplexity_counts_the_end_of_a_line() -> None:
    """A uniform choice of 50 characters and the end has perplexity 51."""
    log_probs = [-(len(text) + 1) * math.log(51) for text in SECOND]
    assert perplexity_per_character(log_probs, SECOND) == pytest.approx(51)


def test_the_perplexity_of_no_lines_is_one() -> None:
    assert perplexity_per_character([], []) == 1.0


def test_every_reference_needs_its_first_line() -> None:
    with pytest.raises(DataError, match="found 1 and 3"):
        score_couplets(FIRST[:1], SECOND, SECOND)


def test_sentence_bleu_is_the_mean_of_smoothed_scores_of_the_lines() -> None:
    outputs = ["家人夏雨", "海阔，天空", "四五"]
    scores = score_couplets(FIRST, outputs, SECOND)
    metric = sacrebleu.BLEU(
        tokenize="char", smooth_method="add-k", smooth_value=1, effective_order=True
    )
    expected = [
        metric.sentence_score(output, [reference]).score
        for output, reference in zip(outputs, SECOND, strict=True)
    ]
    assert scores.sentence_bleu.value == pytest.approx(sum(expected) / 3)
    assert "eff:yes" in scores.sentence_bleu.signature
    assert scores.to_dict()["sentence_bleu"]["score"] == scores.sentence_bleu.value


def test_spaces_around_a_first_line_violate_nothing() -> None:
    scores = score_couplets([f" {line} " for line in FIRST], SECOND, SECOND)
    assert scores.any_violation == 0


def test_a_perplexity_beyond_all_numbers_is_a_large_one() -> None:
    assert perplexity_per_character([-1e6], ["春"]) == pytest.approx(math.exp(700))
