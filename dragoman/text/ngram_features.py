"""N-gram features of tokenized texts: a table of the frequent ones, and their weights.

N-grams are identified by a 64-bit hash of their words. Two of a million collide with a probability
of about 3e-8.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import BundleError

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MAX_CACHED_WORDS = 1_000_000
_MERGE_EVERY = 8_000_000  # n-grams counted before their counts are merged
_ROW = np.dtype([("key", "<u8"), ("documents", "<u4")])


class NgramCounts(NamedTuple):
    """The n-grams of one text that a table holds."""

    ids: NDArray[np.int32]  # (K,) distinct, in order; 0 is left for padding
    counts: NDArray[np.int32]  # (K,) occurrences in the text


class NgramTable:
    """The n-grams of up to `order` words, with the number of documents that each occurs in."""

    def __init__(self, order: int, keys: NDArray[np.uint64], documents: NDArray[np.uint32]) -> None:
        self.order = order
        self._keys, self.documents = keys, documents
        self._hashes: dict[str, int] = {}

    @classmethod
    def build(
        cls, texts: Iterable[Sequence[str]], *, order: int, max_size: int, min_count: int
    ) -> NgramTable:
        """Count n-grams by documents and keep the most frequent, ties in order of their hashes."""
        table = cls(order, np.zeros(0, np.uint64), np.zeros(0, np.uint32))
        keys, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        pending: list[NDArray[np.uint64]] = []
        size = 0
        for words in texts:
            pending.append(np.unique(table._hash_ngrams(words)))
            size += len(pending[-1])
            if size >= _MERGE_EVERY:
                keys, counts = _merge(keys, counts, pending)
                pending, size = [], 0
        keys, counts = _merge(keys, counts, pending)
        frequent = counts >= min_count
        keys, counts = keys[frequent], counts[frequent]
        if len(keys) > max_size:
            kept = np.sort(np.lexsort((keys, -counts))[:max_size])
            keys, counts = keys[kept], counts[kept]
        return cls(order, keys, counts.astype(np.uint32))

    def __len__(self) -> int:
        """Return the number of feature ids, that of padding included."""
        return len(self._keys) + 1

    def count(self, words: Sequence[str]) -> NgramCounts:
        """Return the n-grams of a text with their numbers of occurrences."""
        keys, counts = np.unique(self._hash_ngrams(words), return_counts=True)
        if not len(self._keys) or not len(keys):
            return NgramCounts(np.zeros(0, np.int32), np.zeros(0, np.int32))
        indices = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        known = self._keys[indices] == keys
        return NgramCounts((indices[known] + 1).astype(np.int32), counts[known].astype(np.int32))

    def inverse_document_frequencies(self, documents: int) -> NDArray[np.float32]:
        """Return log((1 + documents) / (1 + documents with it)) + 1 by id; 0 for padding."""
        values = np.log((1 + documents) / (1 + self.documents.astype(np.float64))) + 1
        return np.concatenate([[0.0], values]).astype(np.float32)

    def to_bytes(self) -> bytes:
        """Return the table as a NumPy file."""
        rows = np.empty(len(self._keys), _ROW)
        rows["key"], rows["documents"] = self._keys, self.documents
        stream = io.BytesIO()
        np.save(stream, rows, allow_pickle=False)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, name: str, *, order: int) -> NgramTable:
        """Read a table; `name` is named in errors."""
        try:
            rows = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise BundleError(
                f"{name} must be a NumPy array",
                found=f"{error}"[:120],
                fix="copy the model directory again",
            ) from error
        if rows.dtype != _ROW or rows.ndim != 1 or (np.diff(rows["key"]) == 0).any():
            raise BundleError(
                f"{name} must hold distinct n-grams",
                found=f"{rows.dtype} {rows.shape}"[:120],
                fix="copy the model directory again",
            )
        if (rows["key"][1:] < rows["key"][:-1]).any():
            raise BundleError(
                f"{name} must be sorted",
                found="hashes out of order",
                fix="copy the model directory again",
            )
        return cls(order, np.ascontiguousarray(rows["key"]), rows["documents"].copy())

    def _hash_ngrams(self, words: Sequence[str]) -> NDArray[np.uint64]:
        """Return the hash of every n-gram of a text, shorter ones first."""
        if len(self._hashes) > _MAX_CACHED_WORDS:
            self._hashes.clear()
        known = self._hashes
        hashes = np.empty(len(words), np.uint64)
        for index, word in enumerate(words):
            value = known.get(word)
            if value is None:
                digest = hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8)
                value = known[word] = int.from_bytes(digest.digest(), "little")
            hashes[index] = value
        return np.concatenate(_combine(hashes, self.order)) if self.order else hashes[:0]


def hash_character_ngrams(text: str, order: int) -> list[NDArray[np.uint64]]:
    """Return the hashes of the character n-grams of a text: an array for each length from 1.

    Element i of the array of length n is the hash of the characters i to i + n - 1.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    return _combine(_mix(points + np.uint64(1)), order)


def _combine(hashes: NDArray[np.uint64], order: int) -> list[NDArray[np.uint64]]:
    """Return the hashes of n-grams of each length up to `order`, from those of single tokens."""
    parts, longer = [hashes], hashes
    for size in range(2, min(order, len(hashes)) + 1):
        longer = _mix(longer[:-1] * _MULTIPLIER + hashes[size - 1 :])
        parts.append(longer)
    return parts


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well-mixed hashes: the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _merge(
    keys: NDArray[np.uint64], counts: NDArray[np.int64], pending: list[NDArray[np.uint64]]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the sorted keys with their counts after adding one for each pending key."""
    new, occurrences = np.unique(
        np.concatenate(pending) if pending else keys[:0], return_counts=True
    )
    merged, inverse = np.unique(np.concatenate([keys, new]), return_inverse=True)
    total = np.zeros(len(merged), np.int64)
    np.add.at(total, inverse, np.concatenate([counts, occurrences]))
    return merged, total


def log_count_ratios(
    features: Sequence[NDArray[np.int32]],
    labels: NDArray[np.bool_],
    size: int,
    *,
    smoothing: float = 1.0,
) -> NDArray[np.float32]:
    r"""Return the naive-Bayes log-count ratios (F, C) of features, each class against the others.

    .. math:: r_c = \log \frac{p_c / \lVert p_c \rVert_1}{q_c / \lVert q_c \rVert_1}, \quad
        p_c = \alpha + \sum_{i: c \in y_i} f_i, \quad q_c = \alpha + \sum_{i: c \notin y_i} f_i

    Wang and Manning (2012), section 2.1, with binary f. `features` are the distinct feature ids of
    each text, `labels` (N, C) its classes, `size` the number of feature ids. Padding, id 0, has 0.
    """
    flat = np.concatenate(features) if features else np.zeros(0, np.int32)
    lengths = np.fromiter((len(each) for each in features), np.int64, len(features))
    total = np.bincount(flat, minlength=size).astype(np.float64)
    ratios = np.zeros((size, labels.shape[1]), np.float32)
    for label in range(labels.shape[1]):
        member = np.repeat(labels[:, label], lengths)
        inside = np.bincount(flat[member], minlength=size).astype(np.float64)
        p, q = smoothing + inside[1:], smoothing + (total - inside)[1:]
        ratios[1:, label] = np.log(p / p.sum()) - np.log(q / q.sum())
    return ratios
