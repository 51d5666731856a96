"""Span scores by the rules of conlleval, on cases computed by hand."""

from __future__ import annotations

import pytest

from dragoman.evaluate.conlleval import SpanCounts, SpanScorer, span_signature


def score(*pairs: tuple[str, str]) -> SpanCounts:
    """Return the overall counts of pairs of reference and predicted tags."""
    scorer = SpanScorer()
    for reference, predicted in pairs:
        scorer.add(reference.split(), predicted.split())
    return scorer.overall()


def test_a_span_is_right_by_both_ends_and_its_type() -> None:
    counts = score(
        ("B-NP I-NP O B-VP B-NP", "B-NP I-NP O B-VP B-NP"),  # 3 of 3
        ("B-NP I-NP I-NP O", "B-NP I-NP O O"),  # ends too early
        ("B-NP O", "B-VP O"),  # another type
        ("O B-NP", "B-NP I-NP"),  # starts too early
        ("O O", "O B-PP"),  # too many
    )
    assert counts == SpanCounts(right=3, predicted=7, reference=6)
    assert counts.precision == pytest.approx(3 / 7)
    assert counts.recall == pytest.approx(3 / 6)
    assert counts.f1 == pytest.approx(2 * (3 / 7) * (3 / 6) / (3 / 7 + 3 / 6))


def test_illegal_tags_are_repaired_on_both_sides() -> None:
    """Strict scorers would find no span in these predictions."""
    assert score(("O B-NP I-NP", "O I-NP I-NP")) == SpanCounts(1, 1, 1)
    assert score(("B-NP B-VP I-VP", "B-NP I-VP I-VP")) == SpanCounts(2, 2, 2)
    assert score(("I-NP I-NP O", "B-NP I-NP O")) == SpanCounts(1, 1, 1)


def test_spans_do_not_cross_sentences() -> None:
    assert score(("O B-NP", "O B-NP"), ("I-NP O", "I-NP O")) == SpanCounts(2, 2, 2)


def test_accuracy_counts_tokens_and_f1_typed_spans() -> None:
    scorer = SpanScorer()
    scorer.add(["B-NP", "I-NP", "O", "B-VP"], ["B-NP", "I-NP", "B-PP", "O"])
    assert scorer.accuracy == 0.5
    assert scorer.overall() == SpanCounts(right=1, predicted=2, reference=2)


def test_nothing_scores_zero() -> None:
    counts = score(("O O", "O O"))
    assert (counts.precision, counts.recall, counts.f1) == (0.0, 0.0, 0.0)
    assert SpanScorer().accuracy == 0.0


def test_words_are_spans_of_characters() -> None:
    assert score(("B E S B M E", "B E B E B E")) == SpanCounts(1, 3, 3)


def test_the_signature_names_the_rules() -> None:
    assert span_signature("spans") == "spans:exact|illegal:repaired|rules:conlleval"
