"""NB-SVM against its formulas, written out on dense arrays, and against an exact minimum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dragoman.errors import DataError
from dragoman.evaluate.nb_svm import (
    COST,
    INTERPOLATION,
    NBSVM,
    SMOOTHING,
    BinaryRows,
    NgramVectorizer,
    log_count_ratio,
    split_words,
    train_svm,
)

TEXTS = [
    "A good film. Very good!",
    "good fun , good cast",
    "A bad film.<br /><br />Not good.",
    "bad , boring , bad",
    "so good it isn't bad",
]
LABELS = ["yes", "yes", "no", "no", "yes"]


def dense(rows: BinaryRows) -> np.ndarray:
    found = np.zeros((len(rows.starts) - 1, rows.width))
    for row, (start, end) in enumerate(zip(rows.starts, rows.starts[1:])):
        found[row, rows.columns[start:end]] = 1
    return found


def ngrams(text: str) -> set[tuple[str, ...]]:
    words = split_words(text)
    return {(word,) for word in words} | set(itertools.pairwise(words))


def test_words_are_lowercase_and_line_breaks_are_spaces():
    assert split_words("It isn't<br />GOOD.") == ["it", "isn't", "good", "."]
    assert split_words("a<br>b<br/>c") == ["a", "b", "c"]


def test_rows_hold_each_texts_distinct_unigrams_and_bigrams():
    features = NgramVectorizer(map(split_words, TEXTS))
    vocabulary = sorted(set().union(*map(ngrams, TEXTS)))
    assert len(features) == len(vocabulary)
    expected = np.array([[gram in ngrams(text) for gram in vocabulary] for text in TEXTS], float)
    # The same columns, in another order.
    assert sorted(map(tuple, dense(features.training_rows).T)) == sorted(map(tuple, expected.T))


def test_unknown_ngrams_of_further_texts_are_left_out():
    features = NgramVectorizer(map(split_words, TEXTS))
    known = set().union(*map(ngrams, TEXTS))
    further = ["a dull film, very good", "", "nothing known"]
    sizes = np.diff(features.encode(map(split_words, further)).starts).tolist()
    assert sizes == [len(ngrams(text) & known) for text in further]
    # A pair of known words that never followed each other is no bigram.
    assert ("film", ",") not in known
    np.testing.assert_array_equal(
        dense(features.encode(map(split_words, TEXTS))), dense(features.training_rows)
    )


def test_log_count_ratio_is_the_papers_formula():
    rows = NgramVectorizer(map(split_words, TEXTS)).training_rows
    positive = np.array([label == "yes" for label in LABELS])
    binary = dense(rows)
    p, q = 1 + binary[positive].sum(axis=0), 1 + binary[~positive].sum(axis=0)
    expected = np.log((p / np.abs(p).sum()) / (q / np.abs(q).sum()))
    np.testing.assert_allclose(log_count_ratio(rows, positive), expected, rtol=1e-12)


def test_svm_finds_the_minimum_of_its_objective():
    rng = np.random.default_rng(0)
    binary = rng.random((40, 12)) < 0.4
    starts = np.concatenate([[0], np.cumsum(binary.sum(axis=1))])
    rows = BinaryRows(starts.astype(np.int64), np.nonzero(binary)[1].astype(np.int64), 12)
    positive, scale, cost = rng.random(40) < 0.5, rng.normal(size=12), 0.7
    found = train_svm(rows, positive, scale=scale, cost=cost)
    x, y = np.c_[binary * scale, np.ones(40)], np.where(positive, 1.0, -1.0)

    def objective(v: np.ndarray) -> float:
        return v[:-1] @ v[:-1] + cost * (np.maximum(0, 1 - y * (x @ v)) ** 2).sum()

    best = np.append(found.weights, found.bias)
    # Newton's method on the rows inside the margin, which is exact for a squared hinge.
    newton = np.zeros(13)
    ridge = np.diag([1.0] * 12 + [0.0])
    for _ in range(50):
        inside = y * (x @ newton) < 1
        newton = np.linalg.solve(
            ridge + cost * x[inside].T @ x[inside], cost * x[inside].T @ y[inside]
        )
    np.testing.assert_allclose(best, newton, atol=1e-5)
    assert all(objective(best + 1e-3 * rng.normal(size=13)) > objective(best) for _ in range(100))


def test_interpolation_of_zero_is_naive_bayes_scaled_and_one_is_the_svm():
    model = NBSVM(interpolation=1.0).fit(TEXTS, LABELS)
    features = NgramVectorizer(map(split_words, TEXTS))
    positive = np.array([label == "yes" for label in LABELS])
    ratio = log_count_ratio(features.training_rows, positive)
    svm = train_svm(features.training_rows, positive, scale=ratio)
    np.testing.assert_allclose(model._classifiers[0].weights, ratio * svm.weights)
    naive = NBSVM(interpolation=0.0).fit(TEXTS, LABELS)
    mean = np.abs(svm.weights).mean()
    np.testing.assert_allclose(naive._classifiers[0].weights, ratio * mean)


def test_it_learns_two_labels_and_three():
    rng = np.random.default_rng(1)
    words = {"sun": "warm hot summer", "ice": "cold winter frost", "rain": "wet grey cloud"}

    def draw(count: int) -> tuple[list[str], list[str]]:
        labels = [str(rng.choice(list(words))) for _ in range(count)]
        texts = [
            " ".join(rng.choice([*words[label].split(), "the", "a", "day", "is"], size=8))
            for label in labels
        ]
        return texts, labels

    texts, labels = draw(300)
    held_out, expected = draw(100)
    model = NBSVM().fit(texts, labels)
    assert model.labels == ["ice", "rain", "sun"]
    assert np.mean([a == b for a, b in zip(model.predict(held_out), expected)]) > 0.95
    two = [(text, label) for text, label in zip(texts, labels) if label != "rain"]
    pair = NBSVM().fit(*map(list, zip(*two)))
    assert pair.predict(["a warm summer day", "the frost is cold"]) == ["sun", "ice"]


def test_one_label_is_an_error():
    with pytest.raises(DataError, match=r"two labels or more; found yes"):
        NBSVM().fit(["a", "b"], ["yes", "yes"])


def test_ngrams_after_the_last_known_one_are_left_out() -> None:
    vectorizer = NgramVectorizer([["a", "b"]])
    rows = vectorizer.encode([["b", "b"], ["a", "b"], ["z"]])
    assert dense(rows).sum(axis=1).tolist() == [1, 3, 0]


def test_the_constants_are_the_papers() -> None:
    assert (SMOOTHING, COST, INTERPOLATION) == (1.0, 1.0, 0.25)
    model = NBSVM()
    assert (model.smoothing, model.cost, model.interpolation) == (1.0, 1.0, 0.25)


def test_weights_and_bias_are_interpolated_and_options_are_used() -> None:
    model = NBSVM(smoothing=0.5, cost=3.0, interpolation=0.4).fit(TEXTS, LABELS)
    features = NgramVectorizer(map(split_words, TEXTS))
    positive = np.array([label == "yes" for label in LABELS])
    ratio = log_count_ratio(features.training_rows, positive, smoothing=0.5)
    svm = train_svm(features.training_rows, positive, scale=ratio, cost=3.0)
    (found,) = model._classifiers
    mixed = 0.6 * np.abs(svm.weights).mean() + 0.4 * svm.weights
    np.testing.assert_allclose(found.weights, ratio * mixed)
    assert abs(svm.bias) > 1e-3
    assert found.bias == pytest.approx(0.4 * svm.bias)
    # A text without known n-grams has the bias alone.
    rows = features.encode([["unheard"], ["good"]])
    assert found.scores(rows)[0] == pytest.approx(found.bias)
    assert found.scores(rows)[1] == pytest.approx(
        found.bias + (dense(rows)[1] * found.weights).sum()
    )
    assert model.predict(["unheard"]) == ["yes" if svm.bias > 0 else "no"]
