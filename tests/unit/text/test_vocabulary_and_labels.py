"""Vocabularies and label sets: ids, files and errors."""

from __future__ import annotations

import itertools
import json

import pytest

from dragoman.config.root_config import TextConfig
from dragoman.errors import BundleError
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK
from dragoman.text.vocabulary_and_labels import (
    Labels,
    Vocabulary,
    _label_order,
    build_vocabulary,
    normalize_text,
    split_words,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A wonderful film.", ["A", "wonderful", "film", "."]),
        ("It isn't well-made, is it?", ["It", "isn't", "well-made", ",", "is", "it", "?"]),
        ("1,000.50 at 10:30", ["1,000.50", "at", "10:30"]),
        ("Bad.<br /><br>Worse", ["Bad", ".", "<br />", "<br>", "Worse"]),
        ("naïve café 北京", ["naïve", "café", "北京"]),
        ("a_b $5", ["a", "_", "b", "$", "5"]),
        ("  ", []),
    ],
)
def test_words_numbers_and_punctuation_are_separated(text, words):
    assert split_words(text) == words


def test_frequent_tokens_come_first_and_ties_are_sorted():
    vocabulary = Vocabulary.build([["b", "a", "c"], ["c", "b"], ["d"]], max_size=100)
    assert vocabulary.tokens == (*SPECIAL_TOKENS, "b", "c", "a", "d")
    assert vocabulary.ids(["a", "zebra"]) == [6, UNK]
    assert vocabulary.id("zebra") == UNK
    assert "a" in vocabulary
    assert "zebra" not in vocabulary


def test_size_count_and_case_are_limited():
    texts = [["The", "the", "cat"], ["sat", "sat"]]
    config = TextConfig(tokenizer="words", vocab_size=6, min_count=2, lowercase=True)
    vocabulary = build_vocabulary(texts, config)
    assert vocabulary.tokens == (*SPECIAL_TOKENS, "sat", "the")
    assert vocabulary.ids(["THE", "cat"]) == [5, UNK]
    kept = Vocabulary.build(texts, max_size=5, keep=["<mask>"])
    assert kept.tokens == (*SPECIAL_TOKENS, "<mask>")


def test_bytes_have_fixed_ids():
    vocabulary = Vocabulary.of_bytes()
    assert len(vocabulary) == 260
    assert vocabulary.id("<0x41>") == 4 + 0x41


def test_files_round_trip():
    vocabulary = Vocabulary.build([["naïve", "北京"]], max_size=9, lowercase=True)
    again = Vocabulary.from_bytes(vocabulary.to_bytes(), "words.json")
    assert (again.tokens, again.lowercase) == (vocabulary.tokens, True)
    assert again.digest == vocabulary.digest
    labels = Labels.build(["10", "2", "pos", "neg"])
    assert Labels.from_bytes(labels.to_bytes(), "labels.json").names == ("2", "10", "neg", "pos")
    assert labels.index("pos") == 3
    assert "pos" in labels
    assert "none" not in labels


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", "found Expecting"),
        (b"[]", "format 1; found []"),
        (b'{"format": 2}', "format 1; found 2"),
        (b'{"format": 1, "tokens": "ab"}', "distinct tokens; found 'ab'"),
        (b'{"format": 1, "tokens": ["a", "a"]}', "distinct tokens; found ['a', 'a']"),
        (b'{"format": 1, "tokens": [1]}', "distinct tokens; found [1]"),
        (b'{"format": 1, "tokens": ["a", "b"]}', "special tokens <pad>, <s>, </s>, <unk>; found"),
    ],
)
def test_damaged_files_are_rejected(content, found):
    with pytest.raises(BundleError) as error:
        Vocabulary.from_bytes(content, "text/words.json")
    assert "text/words.json" in str(error.value)
    assert found in str(error.value)


def test_a_label_twice_is_rejected():
    data = json.dumps({"format": 1, "labels": ["a", "a"]}).encode()
    with pytest.raises(BundleError, match="distinct labels"):
        Labels.from_bytes(data, "text/labels.json")


def test_normalization_forms():
    assert normalize_text("é", "nfc") == "é"
    assert normalize_text("ﬁ", "nfkc") == "fi"
    assert normalize_text("ﬁ", "nfc") == "ﬁ"
    assert normalize_text("é", "none") == "é"


def test_labels_have_one_order_even_if_one_is_called_nan():
    expected = ["-inf", "2", "9", "10", "b", "nan"]
    assert list(Labels.build(expected[::-1]).names) == expected
    # The order of a set differs between processes: whatever it is, the labels have theirs.
    for names in itertools.permutations(expected):
        assert sorted(names, key=_label_order) == expected
