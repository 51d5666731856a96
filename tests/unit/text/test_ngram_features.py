"""N-gram tables and naive-Bayes ratios against counting by hand."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pytest

from dragoman.errors import BundleError
from dragoman.text import ngram_features as module
from dragoman.text.ngram_features import NgramTable, log_count_ratios

TEXTS = [text.split() for text in ("a b a b", "b a c", "a b c d", "e", "", "c d a b")]


def list_ngrams(words: list[str], order: int) -> list[tuple[str, ...]]:
    return [
        tuple(words[at : at + size])
        for size in range(1, order + 1)
        for at in range(len(words) - size + 1)
    ]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_counts_are_those_of_the_ngrams(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MERGE_EVERY", 3)  # several merges
    table = NgramTable.build(TEXTS, order=order, max_size=100, min_count=2)
    documents = Counter(each for text in TEXTS for each in set(list_ngrams(text, order)))
    kept = {each: count for each, count in documents.items() if count >= 2}
    assert len(table) == len(kept) + 1
    ids: dict[tuple[str, ...], int] = {}
    for each, count in sorted(
        kept.items(), key=lambda item: len(item[0])
    ):  # alone, an n-gram has its parts beside it
        found = table.count(list(each))
        parts = {ids[part] for part in set(list_ngrams(list(each), order)) - {each} if part in ids}
        (own,) = set(found.ids.tolist()) - parts
        ids[each] = own
        assert table.documents[own - 1] == count
    for text in TEXTS:
        expected = {
            ids[each]: n for each, n in Counter(list_ngrams(text, order)).items() if each in ids
        }
        found = table.count(text)
        assert dict(zip(found.ids.tolist(), found.counts.tolist(), strict=True)) == expected


def test_the_most_frequent_are_kept() -> None:
    table = NgramTable.build(TEXTS, order=1, max_size=2, min_count=1)
    assert sorted(table.documents.tolist()) == [4, 4]  # a and b
    assert len(table.count(["c", "d", "e"]).ids) == 0
    assert len(table.count(["a", "c", "b"]).ids) == 2


def test_a_table_survives_its_file() -> None:
    table = NgramTable.build(TEXTS, order=2, max_size=100, min_count=1)
    again = NgramTable.from_bytes(table.to_bytes(), "text/ngrams.npy", order=2)
    for text in TEXTS:
        assert again.count(text).ids.tolist() == table.count(text).ids.tolist()
    with pytest.raises(BundleError, match=r"text/ngrams.npy must be a NumPy array"):
        NgramTable.from_bytes(b"something", "text/ngrams.npy", order=2)
    wrong = io.BytesIO()
    np.save(wrong, np.zeros(3))
    with pytest.raises(BundleError, match=r"found float64 \(3,\)"):
        NgramTable.from_bytes(wrong.getvalue(), "text/ngrams.npy", order=2)


def test_inverse_document_frequencies() -> None:
    table = NgramTable.build(TEXTS, order=1, max_size=100, min_count=1)
    found = table.inverse_document_frequencies(6)
    (rare,) = table.count(["e"]).ids
    assert found[0] == 0
    assert found[rare] == pytest.approx(np.log(7 / 2) + 1)


def test_ratios_are_those_of_naive_bayes() -> None:
    features = [np.array([1, 2], np.int32), np.array([1], np.int32), np.array([2, 3], np.int32)]
    labels = np.array([[True], [True], [False]])
    found = log_count_ratios(features, labels, 4)
    p, q = np.array([1 + 2, 1 + 1, 1 + 0]), np.array([1 + 0, 1 + 1, 1 + 1])
    expected = np.log((p / p.sum()) / (q / q.sum()))
    np.testing.assert_allclose(found[1:, 0], expected, rtol=1e-6)
    assert found[0, 0] == 0


def test_a_text_without_words_and_an_empty_table_have_no_counts() -> None:
    table = NgramTable.build(TEXTS, order=2, max_size=100, min_count=2)
    empty = NgramTable.build([], order=2, max_size=100, min_count=2)
    for counts in (table.count([]), empty.count(["a", "b"])):
        assert (len(counts.ids), len(counts.counts)) == (0, 0)
    assert len(empty) == 1
