r"""NB-SVM: a linear classifier on n-grams, the baseline that a text classifier should beat.

Wang and Manning (2012), "Baselines and Bigrams: Simple, Good Sentiment and Topic Classification".
Features are binary: whether a unigram or a bigram occurs. Each is scaled by its naive Bayes
log-count ratio, and a support vector machine with squared hinge loss is trained on them:

.. math:: p = \alpha + \sum_{i: y_i = 1} f_i, \quad q = \alpha + \sum_{i: y_i = -1} f_i, \quad
    r = \log\frac{p / \lVert p \rVert_1}{q / \lVert q \rVert_1}

.. math:: \min_{w, b} \; w^\top w
    + C \sum_i \max(0, 1 - y_i (w^\top (r \circ f_i) + b))^2

The weights are interpolated with their mean magnitude, which keeps naive Bayes where the SVM is
unsure: :math:`w' = (1 - \beta) \lVert w \rVert_1 / |V| + \beta w` and :math:`b' = \beta b`.
More than two labels are trained one against the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dragoman.errors import DataError

# The paper's values for every data set (section 4.3).
SMOOTHING, COST, INTERPOLATION = 1.0, 1.0, 0.25
_MAX_WORDS = 1 << 31  # the factor in a bigram's number
_MAX_ITERATIONS = 100  # of L-BFGS; IMDB converges in 35
_WORD = re.compile(r"\w+(?:'\w+)?|[^\w\s]")
_LINE_BREAK = re.compile(r"<br\s*/?>")


def split_words(text: str) -> list[str]:
    """Return the lowercased words and punctuation marks of a text; HTML line breaks are spaces."""
    return _WORD.findall(_LINE_BREAK.sub(" ", text).lower())


@dataclass(frozen=True, slots=True)
class BinaryRows:
    """Sparse rows of zeros and ones: row i has columns[starts[i] : starts[i + 1]]."""

    starts: NDArray[np.int64]  # (N + 1,)
    columns: NDArray[np.int64]
    width: int

    def dot(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the product of the matrix and a vector (V,): (N,)."""
        sums = np.concatenate([[0.0], np.cumsum(weights[self.columns])])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def transposed_dot(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the product of the transposed matrix and a vector (N,): (V,)."""
        repeated = np.repeat(values, np.diff(self.starts))
        sums = np.bincount(self.columns, weights=repeated, minlength=self.width)
        return sums.astype(np.float64, copy=False)


class NgramVectorizer:
    """The unigrams and bigrams of training texts, each a column.

    A word is a number; the bigram of the words i and j is (i + 1) 2^31 + j, so that texts
    are counted without building strings. N-grams that training texts do not have are left out.
    """

    def __init__(self, texts: Iterable[Sequence[str]]) -> None:
        self._words: dict[str, int] = {}
        tokens = [
            [self._words.setdefault(word, len(self._words)) for word in text] for text in texts
        ]
        rows = [self._ngrams(np.array(text, np.int64)) for text in tokens]
        self._keys = np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)
        self.training_rows = self._rows(rows)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._keys)

    def encode(self, texts: Iterable[Sequence[str]]) -> BinaryRows:
        """Return the rows of further texts."""
        return self._rows(
            self._ngrams(np.array([self._words.get(word, -1) for word in text], np.int64))
            for text in texts
        )

    def _ngrams(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the distinct unigrams and bigrams of known words; -1 is an unknown word."""
        known = words >= 0
        pairs = (words[:-1] + 1) * _MAX_WORDS + words[1:]
        return np.unique(np.concatenate([words[known], pairs[known[:-1] & known[1:]]]))

    def _rows(self, rows: Iterable[NDArray[np.int64]]) -> BinaryRows:
        """Return n-grams as columns."""
        found, lengths = list[NDArray[np.int64]](), [0]
        for row in rows:
            at = np.searchsorted(self._keys, row)
            at = (
                at[self._keys[np.minimum(at, len(self._keys) - 1)] == row] if len(self) else row[:0]
            )
            found.append(at)
            lengths.append(len(at))
        columns = np.concatenate(found) if found else np.zeros(0, np.int64)
        return BinaryRows(np.cumsum(lengths, dtype=np.int64), columns, len(self))


def log_count_ratio(
    rows: BinaryRows, positive: NDArray[np.bool_], *, smoothing: float = SMOOTHING
) -> NDArray[np.float64]:
    """Return the naive Bayes log-count ratio r of every column: (V,)."""
    p = smoothing + rows.transposed_dot(positive.astype(np.float64))
    q = smoothing + rows.transposed_dot((~positive).astype(np.float64))
    return np.log(p / p.sum()) - np.log(q / q.sum())


@dataclass(frozen=True, slots=True)
class LinearClassifier:
    """Weights of a decision function."""

    weights: NDArray[np.float64]  # (V,)
    bias: float

    def scores(self, rows: BinaryRows) -> NDArray[np.float64]:
        """Return the signed score of every row: (N,)."""
        return rows.dot(self.weights) + self.bias


def train_svm(
    rows: BinaryRows,
    positive: NDArray[np.bool_],
    *,
    scale: NDArray[np.float64],
    cost: float = COST,
) -> LinearClassifier:
    """Minimize the squared hinge loss on columns multiplied by `scale`, by L-BFGS.

    The returned weights are those of the scaled columns.
    """
    signs = np.where(positive, 1.0, -1.0)
    parameters = torch.zeros(rows.width + 1, dtype=torch.float64)  # w, then b
    optimizer = torch.optim.LBFGS(
        [parameters],
        max_iter=_MAX_ITERATIONS,
        history_size=10,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        values = parameters.numpy()
        weights = values[:-1]
        slack = np.maximum(0.0, 1.0 - signs * (rows.dot(scale * weights) + values[-1]))  # (N,)
        pull = -2.0 * cost * signs * slack
        gradient = np.append(2.0 * weights + scale * rows.transposed_dot(pull), pull.sum())
        parameters.grad = torch.from_numpy(gradient)
        return float(weights @ weights + cost * slack @ slack)

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    values = parameters.numpy()
    return LinearClassifier(values[:-1].copy(), float(values[-1]))


@dataclass(slots=True)
class NBSVM:
    """A trained NB-SVM: predicts the label of a text from its unigrams and bigrams."""

    smoothing: float = SMOOTHING
    cost: float = COST
    interpolation: float = INTERPOLATION
    labels: list[str] = field(default_factory=list)
    _features: NgramVectorizer | None = None
    _classifiers: list[LinearClassifier] = field(default_factory=list)

    def fit(self, texts: Iterable[str], labels: Sequence[str]) -> NBSVM:
        """Train on texts with one label each; raise DataError if there are fewer than two."""
        self.labels = sorted(set(labels))
        if len(self.labels) < 2:
            raise DataError(
                "NB-SVM must be trained on two labels or more",
                found=", ".join(self.labels) or "none",
                fix="add texts of another label",
            )
        self._features = NgramVectorizer(map(split_words, texts))
        rows = self._features.training_rows
        found = np.array(labels)
        # Two labels need one decision function: that of the second.
        wanted = self.labels[1:] if len(self.labels) == 2 else self.labels
        self._classifiers = [self._train(rows, found == label) for label in wanted]
        return self

    def predict(self, texts: Iterable[str]) -> list[str]:
        """Return the label of each text."""
        assert self._features is not None, "fit() comes first"
        rows = self._features.encode(map(split_words, texts))
        scores = np.stack([each.scores(rows) for each in self._classifiers], axis=1)  # (N, labels)
        chosen = scores[:, 0] > 0 if scores.shape[1] == 1 else scores.argmax(axis=1)
        return [self.labels[int(index)] for index in chosen]

    def _train(self, rows: BinaryRows, positive: NDArray[np.bool_]) -> LinearClassifier:
        """Train one decision function and interpolate its weights with naive Bayes."""
        ratio = log_count_ratio(rows, positive, smoothing=self.smoothing)
        svm = train_svm(rows, positive, scale=ratio, cost=self.cost)
        mean = np.abs(svm.weights).sum() / rows.width
        mixed = (1.0 - self.interpolation) * mean + self.interpolation * svm.weights
        # Multiplied by r here, so that scores are computed on the binary columns. The bias shrinks
        # with the weights, as in liblinear, where it is one of them.
        return LinearClassifier(ratio * mixed, self.interpolation * svm.bias)
