"""BLEU by length: where buckets begin and end, what a length counts, and the interval."""

from __future__ import annotations

from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU

from dragoman.evaluate.bleu_by_length import BOOTSTRAP_SAMPLES, score_by_length


def texts_of(lengths: range) -> list[str]:
    return [" ".join(["word"] * length) for length in lengths]


@pytest.mark.parametrize(
    ("sentences", "edges"),
    [
        (39, [(1, 39)]),
        (40, [(1, 21), (22, 40)]),
        (60, [(1, 21), (22, 41), (42, 60)]),
    ],
)
def test_a_bucket_has_at_least_twenty_sentences_or_so(
    sentences: int, edges: list[tuple[int, int]]
) -> None:
    texts = texts_of(range(1, sentences + 1))
    found = score_by_length(texts, texts, texts, BLEU(), samples=2).buckets
    assert [(bucket.shortest, bucket.longest) for bucket in found] == edges


def test_there_are_no_more_buckets_than_requested() -> None:
    texts = texts_of(range(1, 61))
    found = score_by_length(texts, texts, texts, BLEU(), buckets=2, samples=2).buckets
    assert [bucket.sentences for bucket in found] == [31, 29]


def test_sentences_of_one_length_share_a_bucket() -> None:
    texts = texts_of(range(3, 4)) * 80
    [bucket] = score_by_length(texts, texts, texts, BLEU(), samples=2).buckets
    assert (bucket.shortest, bucket.longest, bucket.sentences) == (3, 3, 80)


def test_spaces_around_a_text_are_not_counted() -> None:
    found = score_by_length(["  年月日  "], ["a"], ["a"], BLEU())
    assert (found.unit, found.buckets[0].longest) == ("characters", 3)


def test_the_interval_is_that_of_the_samples_and_not_below_zero() -> None:
    resamples = list[int]()

    class Recorded(BLEU):
        def corpus_score(self, *given: Any, n_bootstrap: int = 1) -> Any:
            resamples.append(n_bootstrap)
            return super().corpus_score(*given, n_bootstrap=n_bootstrap)

    references = ["one two three four five", *["six seven eight nine ten"] * 3]
    outputs = [references[0], *["x y z u v"] * 3]
    [bucket] = score_by_length(references, outputs, references, Recorded(), samples=30).buckets
    assert resamples == [1, 30]
    assert bucket.low == 0.0
    assert bucket.high > bucket.bleu > 10
    score_by_length(references, outputs, references, Recorded())
    assert resamples[-1] == BOOTSTRAP_SAMPLES == 1000


def test_two_sentences_have_an_interval_and_one_has_none() -> None:
    references = ["one two three four five", "six seven eight nine ten"]
    outputs = [references[0], "x y z u v"]
    [pair] = score_by_length(references, outputs, references, BLEU(), samples=30).buckets
    assert pair.low < pair.bleu < pair.high
    [single] = score_by_length(references[:1], outputs[:1], references[:1], BLEU()).buckets
    assert single.low == single.high == single.bleu == pytest.approx(100)
