"""Vocabularies, features and label sets of taggers."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.config import Config
from dragoman.config.root_config import TextConfig
from dragoman.config.tagging import TOKEN_FEATURES, TagConfig
from dragoman.errors import BundleError, DataError
from dragoman.tasks.tagging_preprocessor import (
    TaggedSentence,
    TaggingPreprocessor,
    segment_tags,
    token_feature,
    word_shape,
)
from dragoman.text.special_tokens import UNK

SENTENCES = [
    TaggedSentence(
        tokens=["The", "cat", "sat", "42"],
        tags=["B-NP", "I-NP", "B-VP", "O"],
        column=["DT", "NN", "VB", "CD"],
        auxiliary={"xpos": ["a", "b", "c", "a"]},
    ),
    TaggedSentence(
        tokens=["the", "dog", "sat", "43"],
        tags=["B-NP", "I-NP", "B-VP", "O"],
        column=["DT", "NN", "VB", "CD"],
        auxiliary={"xpos": ["a", "b", "c", "a"]},
    ),
]


def build(**settings: Any) -> TaggingPreprocessor:
    config = Config(
        task="tag", text=TextConfig(lowercase=True, vocab_size=100), tag=TagConfig(**settings)
    )
    return TaggingPreprocessor.build(config, SENTENCES)


@pytest.mark.parametrize(
    ("word", "shape"),
    [
        ("The", "Xxx"),
        ("NATO", "XX"),
        ("1,234.5", "d,dd.d"),
        ("e-mail", "x-xx"),
        ("a.b.c.d.e.f", "x.x.x.x.x."),  # ten characters at most
        ("ǅungla", "Xxx"),  # a letter in title case is neither upper nor lower case
        ("", ""),
    ],
)
def test_word_shapes(word: str, shape: str) -> None:
    assert word_shape(word) == shape


def test_features_of_a_token() -> None:
    tokens = ["The", "walking", "dead"]
    found = {name: token_feature(name, tokens, 1) for name in TOKEN_FEATURES}
    assert found == {
        "shape": "xx",
        "prefix2": "wa",
        "prefix3": "wal",
        "prefix4": "walk",
        "suffix1": "g",
        "suffix2": "ng",
        "suffix3": "ing",
        "suffix4": "king",
        "previous_bigram": "Thewalking",
        "next_bigram": "walkingdead",
    }
    assert token_feature("previous_bigram", tokens, 0) == "<s>The"
    assert token_feature("next_bigram", tokens, 2) == "dead</s>"


def test_words_are_lowercased_and_characters_are_not() -> None:
    text = build(normalize_digits=True)
    the, cat, *_ = text.word_ids(["THE", "cat"])
    assert text.words.tokens[the] == "the"
    assert text.words.tokens[cat] == "cat"
    assert text.word_ids(["99"]) == text.word_ids(["42"])  # both are 00
    assert text.word_ids(["zebra"]) == [UNK]
    upper, lower = text.character_ids(["The", "the"])
    assert upper[0] != lower[0]
    assert (upper[1:] == lower[1:]).all()


def test_digits_are_kept_unless_they_are_normalized() -> None:
    text = build(normalize_digits=False)
    known, other, unseen = text.word_ids(["42", "43", "99"])
    assert UNK not in (known, other)
    assert known != other
    assert unseen == UNK


def test_a_feature_value_that_occurs_once_is_unknown() -> None:
    (suffixes,) = build(features=("suffix1",)).features
    assert suffixes.tokens[4:] == ("t", "e")
    (columns,) = build(input_field="pos").features
    assert columns.tokens[4:] == ("CD", "DT", "NN", "VB")


def test_long_words_keep_their_beginning_and_end() -> None:
    text = build(max_characters=5)
    whole = text.character_ids(["catXXXXdog"[:3] + "t" * 20 + "og"])[0]
    assert [text.characters.tokens[each] for each in whole] == ["c", "a", "t", "o", "g"]
    assert text.character_ids(["at"])[0].tolist()[2:] == [0, 0, 0]


def test_a_word_of_the_most_characters_is_whole_and_a_longer_one_loses_its_middle() -> None:
    text = build(max_characters=4)
    rows = text.character_ids(["cats", "catdog"])
    found = ["".join(text.characters.tokens[each] for each in row) for row in rows]
    assert found == ["cats", "caog"]


def test_spans_are_trained_as_iobes_and_written_as_read() -> None:
    text = build()
    assert text.scheme == "iob2"
    assert text.labels.names == (
        *("O", "B-NP", "I-NP", "E-NP", "S-NP"),
        *("B-VP", "I-VP", "E-VP", "S-VP"),
    )
    ids = text.tag_ids(["B-NP", "I-NP", "B-VP", "O"])
    assert [text.labels.names[each] for each in ids] == ["B-NP", "E-NP", "S-VP", "O"]
    assert text.tags_of(ids) == ["B-NP", "I-NP", "B-VP", "O"]


def test_unknown_tags_stay_spans_of_their_own() -> None:
    text = build()
    ids = text.tag_ids(["B-PP", "I-PP", "O"])
    assert ids[0] >= len(text.labels)
    assert text.tags_of(ids) == ["B-<unknown>", "I-<unknown>", "O"]
    plain = build(scheme="plain")
    assert plain.tags_of(plain.tag_ids(["B-PP", "O"])) == ["<unknown>", "O"]


def test_columns_share_one_table() -> None:
    text = build(input_field="pos", features=("shape", "suffix1"))
    ids = text.feature_ids(SENTENCES[0])
    assert ids.shape == (4, 3)
    first, second, third = (len(vocabulary) for vocabulary in text.features)
    assert (ids[:, 0] < first).all()
    assert (first <= ids[:, 1]).all()
    assert (ids[:, 1] < first + second).all()
    assert (ids[:, 2] < first + second + third).all()
    assert text.feature_size == first + second + third


def test_features_do_not_share_ids() -> None:
    text = build(input_field="pos", features=("shape", "suffix1"))
    assert [vocabulary.tokens[4:] for vocabulary in text.features] == [
        ("CD", "DT", "NN", "VB"),  # ids 4 to 7 of 0 to 7
        ("xx", "dd"),  # 12 and 13 of 8 to 13
        ("t", "e"),  # 18 and 19 of 14 to 19
    ]
    assert text.feature_ids(SENTENCES[0]).tolist() == [
        [5, 8 + UNK, 19],  # The/DT: its shape Xxx occurs once
        [6, 12, 18],
        [7, 12, 18],
        [4, 13, 14 + UNK],
    ]


def test_features_of_decomposed_letters_are_those_that_were_learnt() -> None:
    config = Config(
        task="tag",
        text=TextConfig(vocab_size=100, normalization="nfc"),
        tag=TagConfig(features=("suffix1", "prefix2", "shape")),
    )
    composed = TaggedSentence(tokens=["Été", "été", "Été"], tags=["X"] * 3)
    text = TaggingPreprocessor.build(config, [composed, composed])
    decomposed = TaggedSentence(
        tokens=[unicodedata.normalize("NFD", word) for word in composed.tokens]
    )
    np.testing.assert_array_equal(text.feature_ids(decomposed), text.feature_ids(composed))
    np.testing.assert_array_equal(
        text.character_ids(decomposed.tokens), text.character_ids(composed.tokens)
    )


def test_vocabularies_of_decomposed_letters_are_normalized() -> None:
    config = Config(task="tag", text=TextConfig(vocab_size=100, normalization="nfc"))
    word = unicodedata.normalize("NFD", "été")
    text = TaggingPreprocessor.build(config, [TaggedSentence(tokens=[word], tags=["X"])])
    assert UNK not in text.word_ids(["été"])
    assert text.characters.tokens[4:] == ("é", "t")


def test_vectors_of_another_width_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("the 1 2\ncat 3 4\n")
    for width in (1, 3):
        with pytest.raises(DataError, match=rf"tag\.word_width={width} dimensions; found 2"):
            build(vectors=str(path), word_width=width)


def test_a_lowercased_vocabulary_has_the_vectors_of_capitalized_words(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("The 1 2\nCat 3 4\nDOG 5 6\n")
    text = build(vectors=str(path), word_width=2)
    assert text.vectors is not None
    found = dict(zip(text.vectors.ids.tolist(), text.vectors.vectors.tolist(), strict=True))
    the, cat, dog = text.word_ids(["the", "cat", "dog"])
    assert found == {the: [1, 2], cat: [3, 4], dog: [5, 6]}


def test_auxiliary_targets_and_word_frequencies() -> None:
    text = build(auxiliary_fields=("frequency", "xpos"))
    assert text.auxiliary_sizes == {"frequency": 1, "xpos": 3}
    many = TaggingPreprocessor.build(
        Config(task="tag", tag=TagConfig(auxiliary_fields=("frequency",))),
        [TaggedSentence(tokens=["a"] * 8 + ["b"], tags=["X"] * 9)],
    )
    # int(log 8) = 2, int(log 1) = 0
    assert many.auxiliary_ids(TaggedSentence(tokens=["a", "b", "c"])).tolist() == [[2], [0], [0]]
    unseen = TaggedSentence(tokens=["the"], auxiliary={"xpos": ["z"]})
    assert text.auxiliary_ids(unseen)[0, 1] == -1


@pytest.mark.parametrize("fields", [("xpos", "frequency"), ("frequency", "xpos")])
def test_auxiliary_targets_are_in_the_order_of_the_setting(fields: tuple[str, ...]) -> None:
    text = build(auxiliary_fields=fields)
    expected = {"xpos": [0, 1, 2, 0], "frequency": [0, 0, 0, 0]}
    assert list(text.auxiliary_sizes) == list(fields)
    assert text.auxiliary_ids(SENTENCES[0]).T.tolist() == [expected[name] for name in fields]


def test_segmentation_tags_characters() -> None:
    sentence = segment_tags(["我", "喜欢", "自然语"])
    assert sentence.tokens == list("我喜欢自然语")
    assert "".join(sentence.tags) == "SBEBME"
    text = TaggingPreprocessor.build(
        Config(task="tag", tag=TagConfig(segmentation=True, characters="none")), [sentence]
    )
    assert text.scheme == "bmes"
    assert text.tags_of(text.tag_ids(sentence.tags)) == list("SBEBME")


def build_tagged(rows: list[list[str]], **settings: Any) -> TaggingPreprocessor:
    config = Config(task="tag", tag=TagConfig(**settings))
    sentences = [TaggedSentence(tokens=["a"] * len(row), tags=row) for row in rows]
    return TaggingPreprocessor.build(config, sentences)


@pytest.mark.parametrize("wrong", ["B", "I-", "NNP", ""])
def test_a_tag_that_hides_the_spans_of_all_others_is_warned_of(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [["B-PER", "I-PER", "O"]] * 10
    assert build_tagged([*rows, [wrong]]).scheme == "plain"
    assert f"because of those without a prefix and a type: {wrong!r}; correct them" in caplog.text
    caplog.clear()
    assert build_tagged([*rows, [wrong]], scheme="plain").scheme == "plain"
    assert build_tagged(rows).scheme == "iob2"
    assert build_tagged([["NOUN", "O", "B-X", "B"]] * 5).scheme == "plain"
    assert not caplog.text


def test_files_give_the_same_text_back() -> None:
    settings: dict[str, Any] = {
        "input_field": "pos",
        "features": ("shape",),
        "auxiliary_fields": ("xpos", "frequency"),
    }
    text = build(**settings)
    config = Config(
        task="tag", text=TextConfig(lowercase=True, vocab_size=100), tag=TagConfig(**settings)
    )
    files = text.to_files()
    again = TaggingPreprocessor.from_files(config, files)
    assert again.to_files() == files
    for sentence in SENTENCES:
        assert again.word_ids(sentence.tokens) == text.word_ids(sentence.tokens)
        assert again.tag_ids(sentence.tags) == text.tag_ids(sentence.tags)
        np.testing.assert_array_equal(again.feature_ids(sentence), text.feature_ids(sentence))
        np.testing.assert_array_equal(again.auxiliary_ids(sentence), text.auxiliary_ids(sentence))


def test_bad_files_are_rejected() -> None:
    text = build()
    config = Config(task="tag", tag=text.config)
    files = text.to_files()
    with pytest.raises(BundleError, match=r"must have labels\.json; found characters\.json"):
        TaggingPreprocessor.from_files(
            config, {k: v for k, v in files.items() if k != "labels.json"}
        )
    rest = json.loads(files["tagging.json"])
    for change in (
        {"format": 2},
        {"scheme": "iob9"},
        {"frequencies": [1]},
        {"features": [["a"]]},
        {"auxiliary": {"xpos": ["a"]}},
        {"auxiliary": []},
    ):
        bad = json.dumps(change | {k: v for k, v in rest.items() if k not in change}).encode()
        with pytest.raises(BundleError, match=r"tagging\.json must have the scheme") as caught:
            TaggingPreprocessor.from_files(config, files | {"tagging.json": bad})
        assert next(iter(change)) in str(caught.value)


def test_features_learnt_from_decomposed_letters_are_known_in_composed_ones() -> None:
    config = Config(
        task="tag",
        text=TextConfig(vocab_size=100, normalization="nfc"),
        tag=TagConfig(features=("suffix1",)),
    )
    word = unicodedata.normalize("NFD", "été")
    learnt = TaggedSentence(tokens=[word, word], tags=["X", "X"])
    text = TaggingPreprocessor.build(config, [learnt])
    assert text.features[0].tokens[4:] == ("é",)
    assert text.feature_ids(TaggedSentence(tokens=["été"])).tolist() == [[4]]
