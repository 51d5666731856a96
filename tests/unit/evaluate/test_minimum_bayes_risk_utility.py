"""Pairwise sentence scores against sacreBLEU, pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from dragoman.evaluate.minimum_bayes_risk_utility import (
    build_pairwise_metric,
    pairwise_bleu,
    pairwise_chrf,
)

TEXTS = [
    "The dog is running across the green meadow.",
    "A dog runs across a green meadow .",
    "the the the the the the the",
    "the the",
    "Hund",
    "",
    " ",
    "a",
    "Ein Hund läuft über die grüne Wiese – 你好 🙂!",
]


def sacrebleu_scores(metric: Any, texts: list[str]) -> list[list[float]]:
    return [[metric.sentence_score(a, [b]).score for b in texts] for a in texts]


def test_scores_equal_sacrebleus() -> None:
    bleu = BLEU(effective_order=True)
    np.testing.assert_allclose(
        pairwise_chrf(TEXTS), sacrebleu_scores(CHRF(), TEXTS), rtol=1e-12, atol=1e-12
    )
    np.testing.assert_allclose(
        pairwise_bleu(TEXTS, bleu), sacrebleu_scores(bleu, TEXTS), rtol=1e-12, atol=1e-12
    )


@settings(deadline=None, max_examples=60)
@given(some.lists(some.text(alphabet="ab .\U0001f642", max_size=20), min_size=1, max_size=6))
def test_scores_of_any_texts_equal_sacrebleus(texts: list[str]) -> None:
    bleu = BLEU(effective_order=True)
    np.testing.assert_allclose(
        pairwise_chrf(texts), sacrebleu_scores(CHRF(), texts), rtol=1e-12, atol=1e-12
    )
    np.testing.assert_allclose(
        pairwise_bleu(texts, bleu), sacrebleu_scores(bleu, texts), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("lang", "tokenize"), [("en", "13a"), ("zh", "zh")])
def test_bleu_has_the_tokenizer_of_the_target_language(lang: str, tokenize: str) -> None:
    texts = ["我 有一只狗。", "我有一只猫,真的。", "A dog, really."]
    bleu = BLEU(effective_order=True, tokenize=tokenize)
    scores = build_pairwise_metric("bleu", lang)(texts)
    np.testing.assert_allclose(scores, sacrebleu_scores(bleu, texts), rtol=1e-12, atol=1e-12)
