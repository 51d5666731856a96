"""BLEU by length against sacreBLEU on the sentences of each bucket."""

from __future__ import annotations

import random

import pytest
import sacrebleu
from sacrebleu.metrics.bleu import BLEU

from dragoman.errors import DataError
from dragoman.explain.model_statistics import score_by_length


def corpus(count: int = 200) -> tuple[list[str], list[str], list[str]]:
    draw = random.Random(0)
    words = [f"w{number}" for number in range(30)]
    sources = [" ".join(draw.choices(words, k=draw.randint(1, 25))) for _ in range(count)]
    references = [text.upper() for text in sources]
    hypotheses = [
        " ".join(word if draw.random() < 0.8 else "X" for word in text.split())
        for text in references
    ]
    return sources, hypotheses, references


def test_each_bucket_has_the_score_of_its_sentences() -> None:
    sources, hypotheses, references = corpus()
    found = score_by_length(sources, hypotheses, references, BLEU(), samples=50)
    assert found.unit == "words"
    assert sum(bucket.sentences for bucket in found.buckets) == len(sources)
    assert len(found.buckets) == 6
    for bucket, following in zip(found.buckets, found.buckets[1:], strict=False):
        assert bucket.longest < following.shortest
    for bucket in found.buckets:
        rows = [
            at
            for at, text in enumerate(sources)
            if bucket.shortest <= len(text.split()) <= bucket.longest
        ]
        assert bucket.sentences == len(rows)
        expected = sacrebleu.corpus_bleu(
            [hypotheses[at] for at in rows], [[references[at] for at in rows]]
        ).score
        assert bucket.bleu == pytest.approx(expected)
        assert bucket.low <= expected <= bucket.high


def test_scripts_without_spaces_count_characters() -> None:
    texts = ["年月日" * (1 + at % 9) for at in range(60)]
    found = score_by_length(texts, texts, texts, BLEU(tokenize="zh"), samples=10)
    assert found.unit == "characters"
    assert found.buckets[-1].longest == 27
    assert found.buckets[-1].bleu == pytest.approx(100.0)


def test_few_sentences_are_one_bucket() -> None:
    [bucket] = score_by_length(["a b"], ["a b"], ["a b"], BLEU(), samples=10).buckets
    assert (bucket.shortest, bucket.longest, bucket.sentences) == (2, 2, 1)
    with pytest.raises(DataError, match="found 1 and 2"):
        score_by_length(["a", "b"], ["a"], ["a", "b"], BLEU())
