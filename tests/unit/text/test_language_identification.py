"""Language identification against naive Bayes by hand, and on held-out text of Tatoeba."""

from __future__ import annotations

import io
import lzma
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dragoman.errors import BundleError, DataError
from dragoman.text import language_identification as module
from dragoman.text.language_identification import FEATURES, SMOOTHING, LanguageIdentifier
from dragoman.text.ngram_features import hash_character_ngrams

DATA = Path(
    os.environ.get("DRAGOMAN_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
)
TEXTS = {
    "de": ["Guten Morgen.", "Wie geht es dir?", "Das ist ein Hund.", "Ich weiß es nicht."],
    "en": ["Good morning.", "How are you?", "This is a dog.", "I do not know it."],
    "fr": ["Bonjour.", "Comment vas-tu ?", "C'est un chien.", "Je ne le sais pas."],
}


def read_lines(file: Path) -> list[str]:
    with lzma.open(file, "rt", encoding="utf-8") as stream:
        return [line.rstrip("\n") for line in stream]


def count_by_hand(texts: list[str]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for text in texts:
        padded = f" {text} "
        for size in range(1, 5):
            for at in range(len(padded) - size + 1):
                longest = hash_character_ngrams(padded[at : at + size], 4)[-1]
                counts[int(longest[0]) % FEATURES] += 1
    return counts


def test_scores_are_those_of_naive_bayes() -> None:
    identifier = LanguageIdentifier.train(TEXTS)
    counts = {name: count_by_hand(texts) for name, texts in TEXTS.items()}
    text = "Das ist ein Morgen."
    expected = {}
    for name, own in counts.items():
        total = sum(own.values()) + SMOOTHING * FEATURES
        expected[name] = sum(
            times * math.log((own[each] + SMOOTHING) / total)
            for each, times in count_by_hand([text]).items()
        )
    mean = sum(expected.values()) / len(expected)
    found = identifier.scores(text)
    ngrams = sum(count_by_hand([text]).values())
    for name, value in expected.items():  # a weight is off by half a quantisation step at most
        assert abs(found[name] - (value - mean)) <= ngrams * identifier._scale / 2 + 1e-6


def test_ngrams_never_reach_into_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    one = LanguageIdentifier.train(TEXTS)
    monkeypatch.setattr(module, "_BLOCK_CHARACTERS", 1)  # every text is a block of its own
    other = LanguageIdentifier.train(TEXTS)
    assert one.to_bytes() == other.to_bytes()


def test_identifies_its_training_text_and_only_the_candidates() -> None:
    identifier = LanguageIdentifier.train(TEXTS)
    for name, texts in TEXTS.items():
        assert [identifier.identify(text) for text in texts] == [name] * len(texts)
    assert identifier.identify("Guten Morgen.", ["en", "fr"]) in ("en", "fr")
    assert identifier.identify("Guten Morgen.", ["fr"]) == "fr"
    assert identifier.identify("") == "de"  # no evidence: the first language
    with pytest.raises(DataError, match="found zh; the languages are de, en, fr"):
        identifier.identify("x", ["zh"])


def test_more_training_text_of_a_language_is_no_evidence_for_it() -> None:
    identifier = LanguageIdentifier.train(TEXTS | {"de": TEXTS["de"] * 200})
    for name in ("en", "fr"):
        assert [identifier.identify(text) for text in TEXTS[name]] == [name] * 4


def test_a_classifier_survives_its_file_and_is_small() -> None:
    identifier = LanguageIdentifier.train(TEXTS)
    data = identifier.to_bytes()
    assert len(data) < 50_000
    again = LanguageIdentifier.from_bytes(data, "text/language_id.npy")
    assert again.languages == ["de", "en", "fr"]
    assert again.scores("Wie geht es?") == pytest.approx(identifier.scores("Wie geht es?"), 1e-6)


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no array", "must be a NumPy array"),
        (_npy(np.zeros((2, 3), np.int8)), r"a row of 16,384 weights.*int8 \(2, 3\)"),
        (_npy(np.zeros(0, module._ROW)), r"found .*\(0,\)"),
        (_npy(np.zeros(2, module._ROW)), "a positive scale; found 0.0"),
    ],
)
def test_damaged_files_are_errors(data: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        LanguageIdentifier.from_bytes(data, "text/language_id.npy")


@pytest.mark.skipif(
    not (DATA / "tatoeba_ende").is_dir(), reason=f"no corpora at {DATA} (set DRAGOMAN_DATA)"
)
def test_held_out_sentences_of_tatoeba() -> None:
    """Short sentences, of which some have only names and words that two languages share."""
    train = {
        "de": "tatoeba_ende/train.de.xz",
        "en": "tatoeba_ende/train.en.xz",
        "fr": "tatoeba_enfr/train.fr.xz",
    }
    identifier = LanguageIdentifier.train(
        {name: read_lines(DATA / file) for name, file in train.items()}
    )
    for file in ("ende/test.de", "ende/test.en", "enfr/test.fr", "enfr/test.en"):
        texts = read_lines(DATA / f"tatoeba_{file}.xz")
        right = sum(identifier.identify(text) == file[-2:] for text in texts)
        assert right >= 0.995 * len(texts), file
