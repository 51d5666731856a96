"""Explanations of labels: leave-one-out against a model that is known, spans."""

from __future__ import annotations

import math
import re

import pytest
from occlusion_kit import VALUES, explanation

from dragoman.explain import classification_occlusion
from dragoman.explain.classification_occlusion import (
    CharacterSpan,
    SentenceSpans,
    explain_text,
    find_spans,
    leave_out,
    merge_into_words,
)


def test_drops_are_those_of_the_model_without_the_word():
    found = explanation()
    total = sum(VALUES.values())
    for word in found.words:
        without = 1 / (1 + math.exp(-(total - VALUES.get(word.text, 0.0))))
        assert word.drop == pytest.approx(found.probability - without, abs=1e-12), word.text
    assert [word.text for word in found.ranked_words()[:4]] == [
        "wonderful",
        "great",
        "boring",
        "not",
    ]


def test_a_sentence_is_left_out_whole_and_an_only_one_is_not():
    found = explanation()
    assert [each.text for each in found.sentences] == [
        "A wonderful <b>film</b>.",
        "It is boring, though not slow & long.",
        "The end is great!",
    ]
    without = 1 / (1 + math.exp(-(2.0 + 1.0)))
    assert found.sentences[1].drop == pytest.approx(found.probability - without)
    assert [each.drop for each in explanation("A wonderful film.").sentences] == [None]


def test_of_many_words_those_with_the_largest_weights_are_left_out():
    text = "one two three four"
    calls = []

    def predict(texts):
        calls.extend(texts)
        return [0.5] * len(texts)

    spans = [CharacterSpan(match.start(), match.end()) for match in re.finditer(r"\w+", text)]
    found = explain_text(
        text,
        [SentenceSpans(words=spans, word_weights=[0.1, 0.4, 0.2, 0.3])],
        {"a": 0.75, "b": 0.25},
        "a",
        predict,
        max_left_out=2,
    )
    assert calls == ["one three four", "one two three"]
    assert [word.drop for word in found.words] == [None, 0.25, None, 0.25]
    assert found.notes == ["2 of 4 words were left out in turn: those with the largest weights"]
    plain = explain_text(
        text, [SentenceSpans(words=spans)], {"a": 0.75}, "a", predict, max_left_out=3
    )
    assert [word.drop for word in plain.words] == [0.25, 0.25, 0.25, None]
    assert plain.notes == ["the first 3 of 4 words were left out in turn"]


def test_of_many_words_those_of_sentences_with_weight_are_left_out():
    text = "aside. one two three"
    calls = []

    def predict(texts):
        calls.extend(texts)
        return [0.5] * len(texts)

    spans = [CharacterSpan(match.start(), match.end()) for match in re.finditer(r"\w+", text)]
    found = explain_text(
        text,
        [
            SentenceSpans(words=spans[:1], word_weights=[1.0], weight=0.1),
            SentenceSpans(words=spans[1:], word_weights=[0.5, 0.1, 0.4], weight=0.9),
        ],
        {"a": 0.75, "b": 0.25},
        "a",
        predict,
        max_left_out=2,
    )
    assert calls[:2] == ["aside. two three", "aside. one two"]
    assert [word.drop for word in found.words] == [None, 0.25, None, 0.25]


def test_the_words_that_the_model_reads_are_bounded(monkeypatch):
    monkeypatch.setattr(classification_occlusion, "MAX_RUN_WORDS", 24)
    text = "a b. " * 4
    spans = [CharacterSpan(at, at + 1) for at in range(len(text)) if text[at] in "ab"]
    sentences = [SentenceSpans(words=spans[at : at + 2]) for at in range(0, 8, 2)]
    calls = []

    def predict(texts):
        calls.extend(texts)
        return [0.5] * len(texts)

    found = explain_text(text, sentences, {"x": 0.75}, "x", predict)
    assert len(calls) == 2 * 24 // 8
    assert found.notes == [
        "the first 3 of 8 words were left out in turn",
        "the first 3 of 4 sentences were left out in turn",
    ]
    assert [sentence.drop for sentence in found.sentences] == [0.25, 0.25, 0.25, None]


@pytest.mark.parametrize(
    ("text", "word", "left"),
    [
        ("a good film", "good", "a film"),
        ("good film", "good", "film"),
        ("a good", "good", "a"),
        ("a good.", "good", "a ."),
        ("很好看", "好", "很看"),
        ("good", "good", ""),
        ("one\n good  \n two", "good", "one\n two"),
    ],
)
def test_a_word_is_left_out_with_one_of_its_spaces(text, word, left):
    at = text.index(word)
    assert leave_out(text, CharacterSpan(at, at + len(word))) == left


def test_tokens_are_found_in_order_ignoring_case():
    text = "It İs <br />GOOD good"
    assert find_spans(text, ["it", "good", "good", "bad"]) == [
        CharacterSpan(0, 2),
        CharacterSpan(12, 16),
        CharacterSpan(17, 21),
        None,
    ]


def test_subwords_are_merged_into_words_with_the_sum_of_their_weights():
    text = "won derful it's 很好!"
    spans = [
        CharacterSpan(0, 3),
        CharacterSpan(3, 7),
        CharacterSpan(7, 10),
        CharacterSpan(10, 15),
        CharacterSpan(16, 17),
        CharacterSpan(17, 18),
        CharacterSpan(18, 19),
    ]
    merged = merge_into_words(text, spans, [0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.2])
    assert [text[span.start : span.end] for span in merged.words] == [
        "won",
        "derful",
        "it's",
        "很",
        "好",
        "!",
    ]
    assert merged.word_weights == pytest.approx([0.1, 0.3, 0.2, 0.1, 0.1, 0.2])
    assert merge_into_words(text, spans, None).word_weights is None


def test_an_explanation_is_plain_json():
    found = explanation().to_dict()
    assert list(found) == ["text", "label", "probability", "probabilities", "sentences", "notes"]
    word = found["sentences"][0]["words"][1]
    assert word == {
        "word": "wonderful",
        "start": 2,
        "end": 11,
        "weight": 0.090909,
        "drop": 0.458499,
    }
