"""Language identification: naive Bayes over hashed character n-grams, in int8.

`DirectionChooser` in inference/translation_direction_choice.py identifies the source language of
inputs.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import BundleError, DataError
from dragoman.text.ngram_features import hash_character_ngrams
from dragoman.text.sentencepiece_tokenizer import normalize

ORDER = 4  # longest n-grams, in characters
FEATURES = 1 << 14  # hash values; a language takes as many bytes
SMOOTHING = 0.5  # added to the count of every feature
MAX_TRAIN_CHARACTERS = 2_000_000  # of each language: more change nothing
MAX_TEXT_CHARACTERS = 2000  # of a text to identify: enough for any
_MAX_LANGUAGES = 1000
_MAX_NAME_BYTES = 24
_BLOCK_CHARACTERS = 1 << 18  # hashed together in training
_ROW: Any = np.dtype(
    [("language", f"S{_MAX_NAME_BYTES}"), ("scale", "<f4"), ("weights", "i1", (FEATURES,))]
)


class LanguageIdentifier:
    r"""Classifies the language of a text by the character n-grams that it has.

    .. math:: \hat{l} = \arg\max_l \sum_g \log p(g \mid l), \quad
        p(g \mid l) = \frac{\alpha + n_l(g)}{\sum_{g'} \alpha + n_l(g')}

    The sum is over all n-grams g of the text, from 1 to 4 characters, hashed to FEATURES values.
    Languages are equally likely a priori. Only differences between languages matter, so the
    weights are log p(g|l) less its mean over the languages, rounded to int8.
    """

    def __init__(
        self, languages: Sequence[str], weights: NDArray[np.int8], *, scale: float
    ) -> None:
        self.languages = list(languages)
        self._weights, self._scale = weights, scale  # (L, FEATURES)

    @classmethod
    def train(cls, texts: Mapping[str, Iterable[str]]) -> LanguageIdentifier:
        """Train on texts of each language; the first MAX_TRAIN_CHARACTERS of each are read."""
        languages = sorted(texts)
        counts = np.stack([_count_features(texts[language]) for language in languages])
        smoothed = counts + SMOOTHING
        log_probs = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))
        ratios = log_probs - log_probs.mean(axis=0)
        scale = float(np.abs(ratios).max()) / 127 or 1.0
        return cls(languages, np.rint(ratios / scale).astype(np.int8), scale=scale)

    def scores(self, text: str) -> dict[str, float]:
        """Return the log-probability of a text's n-grams by language, up to a common constant."""
        features = _text_features(text[:MAX_TEXT_CHARACTERS])
        sums = self._weights[:, features].sum(axis=1, dtype=np.int64) * self._scale
        return dict(zip(self.languages, sums.tolist(), strict=True))

    def identify(self, text: str, among: Collection[str] = ()) -> str:
        """Return the most probable language, of those in `among` if given; ties by the alphabet."""
        scores = self.scores(text)
        candidates = [name for name in self.languages if not among or name in among]
        if not candidates:
            raise DataError(
                "a language to identify must be one of the model's",
                found=", ".join(sorted(among)),
                fix=f"the languages are {', '.join(self.languages)}; name the source language",
            )
        return max(candidates, key=lambda name: scores[name])

    def to_bytes(self) -> bytes:
        """Return the classifier as a NumPy file with a row for each language."""
        rows = np.zeros(len(self.languages), _ROW)
        rows["language"] = [name.encode() for name in self.languages]
        rows["scale"], rows["weights"] = self._scale, self._weights
        stream = io.BytesIO()
        np.save(stream, rows, allow_pickle=False)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> LanguageIdentifier:
        """Read a classifier; `name` is named in errors."""
        fix = "copy the model directory again"
        try:
            rows = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise BundleError(
                f"{name} must be a NumPy array", found=f"{error}"[:120], fix=fix
            ) from error
        if rows.dtype != _ROW or rows.ndim != 1 or not 0 < len(rows) <= _MAX_LANGUAGES:
            raise BundleError(
                f"{name} must have a row of {FEATURES:,} weights for each language",
                found=f"{rows.dtype} {rows.shape}"[:120],
                fix=fix,
            )
        scale = float(rows["scale"][0])
        if not 0 < scale < 1e3:
            raise BundleError(f"{name} must have a positive scale", found=f"{scale}", fix=fix)
        languages = [bytes(each).decode("ascii", "replace") for each in rows["language"]]
        return cls(languages, np.ascontiguousarray(rows["weights"]), scale=scale)


def _count_features(texts: Iterable[str]) -> NDArray[np.float64]:
    """Count the features of many texts."""
    counts = np.zeros(FEATURES, np.int64)
    block, size, total = list[str](), 0, 0
    for text in texts:
        block.append(_prepare(text))
        size, total = size + len(text), total + len(text)
        if size >= _BLOCK_CHARACTERS:
            counts += np.bincount(_block_features(block), minlength=FEATURES)
            block, size = [], 0
        if total >= MAX_TRAIN_CHARACTERS:
            break
    counts += np.bincount(_block_features(block), minlength=FEATURES)
    return counts.astype(np.float64)


def _block_features(texts: Sequence[str]) -> NDArray[np.int64]:
    """Return the features of prepared texts; n-grams never reach from one text to the next."""
    if not texts:
        return np.zeros(0, np.int64)
    joined = "".join(texts)
    ends = np.cumsum([len(text) for text in texts])
    last = np.repeat(ends, [len(text) for text in texts])  # the end of each character's text
    return np.concatenate(
        [
            (hashes & np.uint64(FEATURES - 1)).astype(np.int64)[
                np.arange(len(hashes)) + size <= last[: len(hashes)]
            ]
            for size, hashes in enumerate(hash_character_ngrams(joined, ORDER), start=1)
        ]
    )


def _text_features(text: str) -> NDArray[np.int64]:
    """Return the features of one text, repeated as often as they occur."""
    return _block_features([_prepare(text)])


def _prepare(text: str) -> str:
    """Return a text with a space before and after it: beginnings and ends of words count."""
    return f" {' '.join(normalize(text, 'nfc').split())} "
