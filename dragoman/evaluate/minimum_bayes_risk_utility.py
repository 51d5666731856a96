"""Sentence chrF and BLEU of all pairs of texts at once, equal to sacreBLEU's sentence scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from dragoman.evaluate.translation_metrics import build_metrics

FloatMatrix = NDArray[np.float64]
# Scores of all texts (N,) as hypotheses, by row, against all as references, by column: (N, N).
PairwiseMetric = Callable[[Sequence[str]], FloatMatrix]


def build_pairwise_metric(name: str, tgt_lang: str = "") -> PairwiseMetric:
    """Return `chrf`, or `bleu` with the tokenizer of a target language."""
    if name == "chrf":
        return pairwise_chrf
    bleu = build_metrics(tgt_lang=tgt_lang, sentence=True).bleu
    return lambda texts: pairwise_bleu(texts, bleu)


def pairwise_chrf(texts: Sequence[str]) -> FloatMatrix:
    """Return sentence chrF of each text as hypothesis against each as reference, (N, N).

    It is the F-score of Popović (2015) over character n-grams up to 6 without spaces, from the
    precisions and recalls averaged over the orders that both texts have.
    """
    rows = [
        np.frombuffer("".join(text.split()).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        for text in texts
    ]
    precision, recall, orders = (np.zeros((len(texts), len(texts))) for _ in range(3))
    for order, matches in enumerate(_ngram_matches(rows, CHRF.CHAR_ORDER), start=1):
        counts = np.array([max(0, row.size - order + 1) for row in rows], dtype=np.float64)
        divisor = np.maximum(counts, 1.0)
        has_both = (counts[:, None] > 0) & (counts[None, :] > 0)
        precision += np.where(has_both, matches / divisor[:, None], 0.0)
        recall += np.where(has_both, matches / divisor[None, :], 0.0)
        orders += has_both
    precision, recall = (each / np.maximum(orders, 1.0) for each in (precision, recall))
    factor = CHRF.BETA**2
    divisor = factor * precision + recall
    return 100.0 * (1 + factor) * precision * recall / np.where(divisor > 0, divisor, 1.0)


def pairwise_bleu(texts: Sequence[str], bleu: BLEU) -> FloatMatrix:
    """Return sentence BLEU of each text as hypothesis against each as reference, (N, N).

    The tokenizer is that of `bleu`; orders without a match are smoothed by 1/2, 1/4 and so on, and
    orders that a hypothesis is too short for are left out (sacreBLEU's smooth:exp|eff:yes).
    """
    numbers: dict[str, int] = {}
    rows = [
        np.array(
            [
                numbers.setdefault(token, len(numbers))
                for token in bleu._preprocess_segment(text).split()
            ],
            dtype=np.uint32,
        )
        for text in texts
    ]
    lengths = np.array([row.size for row in rows], dtype=np.float64)
    shape = (len(texts), len(texts))
    log_precision, smoothing, any_match = np.zeros(shape), np.ones(shape), np.zeros(shape, bool)
    for order, matches in enumerate(_ngram_matches(rows, bleu.max_ngram_order), start=1):
        counts = np.maximum(lengths - order + 1, 0.0)[:, None]
        is_smoothed = (counts > 0) & (matches == 0)
        smoothing = np.where(is_smoothed, 2.0 * smoothing, smoothing)
        correct = np.where(is_smoothed, 1.0 / smoothing, matches)
        log_precision += np.log(np.where(counts > 0, correct / np.maximum(counts, 1.0), 1.0))
        any_match |= matches > 0
    effective_order = np.clip(lengths, 1, bleu.max_ngram_order)[:, None]
    hypothesis, reference = lengths[:, None], lengths[None, :]
    brevity = np.minimum(0.0, 1.0 - reference / np.maximum(hypothesis, 1.0))
    scores: FloatMatrix = 100.0 * np.exp(brevity + log_precision / effective_order)
    return np.where(any_match, scores, 0.0)


def _ngram_matches(rows: Sequence[NDArray[np.uint32]], max_order: int) -> list[FloatMatrix]:
    """Return for each order the n-grams that each two sequences have in common, (N, N).

    The common count min(a, b) of an n-gram is the number of k with a >= k and b >= k: the k-th
    occurrence of an n-gram in a sequence is a column of a binary matrix, and the counts are its
    product with its transpose.
    """
    owners = np.repeat(np.arange(len(rows)), [row.size for row in rows])
    ends = np.cumsum([row.size for row in rows])[owners]  # of the sequence of each item
    items = _number(np.concatenate(rows))
    starts, ngrams = np.arange(items.size), items
    matches = [_common_counts(owners, ngrams, len(rows))]
    for order in range(2, max_order + 1):
        fits = starts + order <= ends[starts]
        starts, ngrams = starts[fits], ngrams[fits]
        ngrams = _number(ngrams * (items.size + 1) + items[starts + order - 1])
        matches.append(_common_counts(owners[starts], ngrams, len(rows)))
    return matches


def _number(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return consecutive ids of the distinct values."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64).reshape(-1)


def _common_counts(owners: NDArray[np.int64], ngrams: NDArray[np.int64], count: int) -> FloatMatrix:
    """Return how many n-grams each two owners have in common, (N, N)."""
    if not ngrams.size:
        return np.zeros((count, count))
    pairs = owners * (int(ngrams.max()) + 1) + ngrams
    order = np.argsort(pairs, kind="stable")
    positions = np.arange(pairs.size)
    is_first = np.concatenate([[True], np.diff(pairs[order]) != 0])
    occurrence = np.empty_like(pairs)  # of the same n-gram before, in the same sequence
    occurrence[order] = positions - np.maximum.accumulate(np.where(is_first, positions, 0))
    columns = _number(ngrams * pairs.size + occurrence)
    has = np.zeros((count, int(columns.max()) + 1), dtype=np.float32)
    has[owners, columns] = 1.0
    return (has @ has.T).astype(np.float64)  # exact: integers below 2**24
