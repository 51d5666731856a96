"""The tagger: texts, tokens, spans, words, long inputs and mistakes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from dragoman.data.labeled_records import Record
from dragoman.errors import DataError
from dragoman.inference.predictors import tagger as tagger_module
from dragoman.inference.predictors.tagger import EMPTY_NOTE, Tagger, _token_extents
from dragoman.tasks.tagging_preprocessor import TaggedSentence
from tests.tagging_kit import make_records, make_task, train_task


@functools.cache
def entity_tagger(input_field: str = "") -> Tagger:
    """Return a trained tagger of persons and places."""
    records = make_records(60)
    task = make_task(records, input_field=input_field)
    return Tagger(train_task(task, records, steps=60, lr=0.03), task)


@functools.cache
def segmenter() -> Tagger:
    lines = ["我 喜欢 猫", "猫 喜欢 我", "狗 喜欢 自然", "自然 喜欢 狗"]
    records = [Record(Path("a.txt"), at, {"text": line}) for at, line in enumerate(lines, 1)]
    task = make_task(records, segmentation=True, characters="none", features=("next_bigram",))
    return Tagger(train_task(task, records, steps=60), task)


def test_a_text_is_split_into_tokens_and_spans_quote_it() -> None:
    (found,) = entity_tagger().predict(["Anna  Meier sees in Bonn  West."])
    assert found.tokens == ("Anna", "Meier", "sees", "in", "Bonn", "West", ".")
    assert found.tags == ("B-PER", "I-PER", "O", "O", "B-LOC", "I-LOC", "O")
    assert [tuple(span) for span in found.spans] == [
        (0, 2, "PER", "Anna  Meier"),
        (4, 6, "LOC", "Bonn  West"),
    ]
    assert all(each > 0.5 for each in found.probabilities)
    assert found.to_line() == "Anna/B-PER Meier/I-PER sees/O in/O Bonn/B-LOC West/I-LOC ./O"


def test_tokens_are_taken_as_they_are() -> None:
    text, tokens = entity_tagger().predict(["Anna sees", ["Anna", "sees"]])
    assert tokens.tags == text.tags
    assert tokens.text == "Anna sees"
    assert tokens.spans[0].text == "Anna"
    assert tokens.to_dict() == {
        "text": "Anna sees",
        "tokens": ["Anna", "sees"],
        "tags": ["B-PER", "O"],
        "probabilities": [round(each, 6) for each in tokens.probabilities],
        "spans": [{"start": 0, "end": 1, "type": "PER", "text": "Anna"}],
        "notes": [],
    }


def test_batches_and_long_inputs_change_nothing_but_their_parts(monkeypatch: Any) -> None:
    tagger = entity_tagger()
    texts = ["Anna sees", "", "in Bonn", "Emil walks . Dora sees ."]
    together = tagger.predict(texts)
    assert [each.tags for each in together] == [
        each.tags for each in tagger.predict(texts, batch_size=1)
    ]
    assert together[1].notes == (EMPTY_NOTE,)
    assert together[1].to_line() == ""
    monkeypatch.setattr(tagger_module, "MAX_TOKENS", 3)
    whole, _, _, parts = tagger.predict(texts)
    assert whole.notes == ()
    assert parts.tags == together[3].tags
    assert parts.notes == ("tagged in 2 parts of at most 3 tokens",)


def test_up_to_1024_tokens_are_tagged_together() -> None:
    whole, parts = entity_tagger().predict([["Anna"] * 1024, ["Anna"] * 1025])
    assert whole.notes == ()
    assert parts.notes == ("tagged in 2 parts of at most 1,024 tokens",)
    assert len(parts.tags) == len(parts.probabilities) == 1025


def test_parts_of_a_long_input_have_columns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    tagger = entity_tagger("pos")
    first = TaggedSentence(tokens=["in", "Bonn", "West"], column=["Y", "X", "X"])
    second = TaggedSentence(tokens=["Anna", "sees", "."], column=["X", "Y", "Y"])
    whole = TaggedSentence(
        tokens=[*first.tokens, *second.tokens], column=[*first.column, *second.column]
    )
    monkeypatch.setattr(tagger_module, "MAX_TOKENS", 3)
    found, *parts = tagger.predict([whole, first, second], batch_size=1)
    assert found.tags == parts[0].tags + parts[1].tags
    assert found.probabilities == pytest.approx(parts[0].probabilities + parts[1].probabilities)
    assert found.tags == ("O", "B-LOC", "I-LOC", "B-PER", "O", "O")


def test_a_span_quotes_the_text_where_its_tokens_stand() -> None:
    """Not where the same tokens occurred before."""
    (found,) = entity_tagger().predict(["Anna sees Anna  Meier in Bonn . in Bonn  West ."])
    assert [span.text for span in found.spans] == ["Anna", "Anna  Meier", "Bonn", "Bonn  West"]
    assert _token_extents("in in  in", ["in", "in", "in"]) == [(0, 2), (3, 5), (7, 9)]


def test_an_empty_token_is_an_error() -> None:
    with pytest.raises(DataError, match=r"2 must have no empty token; found one at .* 2;"):
        entity_tagger().predict([["Anna"], ["Anna", "", "Bonn"]])


def test_segmentation_returns_words() -> None:
    found, spaced = segmenter().predict(["猫喜欢自然", "猫 喜欢自然"])
    assert found.words == spaced.words == ("猫", "喜欢", "自然")
    assert segmenter().predict([["猫", "", "喜欢自然"]])[0].words == found.words
    assert found.to_line() == "猫 喜欢 自然"
    assert found.to_dict()["words"] == ["猫", "喜欢", "自然"]
    assert "spans" not in found.to_dict()


def test_records_of_tokens_and_of_text() -> None:
    tagger = entity_tagger()
    path = Path("a.jsonl")
    sentence = tagger.read_record(Record(path, 1, {"tokens": ["Anna"], "tags": ["O"]}))
    assert isinstance(sentence, TaggedSentence)
    assert tagger.predict([sentence])[0].tags == ("B-PER",)
    assert tagger.read_record(Record(path, 1, {"text": "Anna sees"})) == "Anna sees"
    assert tagger.read_record(Record(path, 1, {"t": "x", "text": "y"}), text_field="t") == "x"
    with pytest.raises(DataError, match=r"--text-field must be known in a\.jsonl; found id"):
        tagger.read_record(Record(path, 1, {"id": "7"}))


def test_a_model_with_a_further_column_needs_it() -> None:
    tagger = entity_tagger("pos")
    record = Record(Path("a.jsonl"), 4, {"tokens": ["Anna"], "pos": ["X"]})
    assert tagger.predict([tagger.read_record(record)])[0].tags == ("B-PER",)
    with pytest.raises(DataError, match=r"reads 'pos' of every token.*found sentence 1 without it"):
        tagger.predict(["Anna"])
    given = {"tokens": ["Anna"], "pos": ["X"]}
    assert tagger.predict([given])[0].tags == ("B-PER",)
    assert entity_tagger().predict([given, {"text": "Anna"}])[1].tags == ("B-PER",)
    assert tagger.explain(given)
    with pytest.raises(DataError, match="input line 1 must have a field 'pos'; found tokens; name"):
        tagger.predict([{"tokens": ["Anna"]}])
    with pytest.raises(DataError, match="line 4 must have a field 'pos'; found tokens"):
        tagger.read_record(record._replace(fields={"tokens": ["Anna"]}))


@pytest.mark.parametrize("bad", [3, [1, 2], None, b"Anna"])
def test_input_that_is_not_a_sentence_is_rejected(bad: Any) -> None:
    with pytest.raises(DataError, match="sentence 2 must be a text or a list of tokens; found"):
        entity_tagger().predict(["Anna", bad])


def test_one_text_instead_of_a_list_is_rejected() -> None:
    with pytest.raises(DataError, match="one text, 'Anna'"):
        entity_tagger().predict("Anna")
