"""Classifier: labels and probabilities, batches that change nothing, explanations that hold."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import dragoman
from dragoman.attention.attention_weight_hooks import record
from dragoman.data.labeled_records import Record
from dragoman.errors import BundleError, DataError
from dragoman.inference.predictors.classifier import Classifier
from tests.classifier_kit import BAD, GOOD, reviews, write_classifier


@pytest.fixture(scope="module")
def han(tmp_path_factory) -> Classifier:
    path = tmp_path_factory.mktemp("models") / "han"
    return dragoman.load(write_classifier(path, hierarchical=True), device="cpu")


@pytest.fixture(scope="module")
def flat(tmp_path_factory) -> Classifier:
    path = tmp_path_factory.mktemp("models") / "flat"
    return dragoman.load(write_classifier(path), device="cpu")


def test_load_returns_a_classifier_that_has_learned(han):
    assert isinstance(han, Classifier)
    assert han.labels == ("negative", "neutral", "positive")
    held_out = reviews(200, seed=5)
    found = han.predict([each.text("text") for each in held_out])
    right = [one.label == each.text("label") for one, each in zip(found, held_out, strict=True)]
    assert np.mean(right) > 0.95
    assert repr(han).startswith("Classifier(recipe none, cpu")


@pytest.mark.parametrize("name", ["han", "flat"])
def test_batching_does_not_change_results(name, request):
    predictor = request.getfixturevalue(name)
    texts = [each.text("text") for each in reviews(40, seed=6)]
    together = predictor.predict(texts)
    alone = [predictor.predict([text])[0] for text in texts]
    assert [each.label for each in together] == [each.label for each in alone]
    np.testing.assert_allclose(
        [each.values for each in together], [each.values for each in alone], atol=1e-5
    )
    assert all(math.isclose(sum(each.probabilities.values()), 1, abs_tol=1e-5) for each in alone)


def test_probabilities_come_most_probable_first(han):
    [found] = han.predict(["The film was wonderful."])
    assert next(iter(found.probabilities)) == "positive"
    assert sorted(found.probabilities.values(), reverse=True) == list(found.probabilities.values())
    assert found.label == "positive"
    assert found.probability == pytest.approx(found.probabilities["positive"])
    assert found.to_line() == f"positive\t{found.probability:.4f}\tThe film was wonderful."
    two = found.to_line(top=2).split("\t")
    assert two[0::2] == [*list(found.probabilities)[:2], "The film was wonderful."]
    assert found.to_dict()["labels"] == ["positive"]


def test_tabs_and_line_ends_do_not_break_a_line(han):
    [found] = han.predict(["A great\tfilm.\nIt was\r good."])
    assert found.to_line().count("\t") == 2
    assert "\n" not in found.to_line()
    label = dataclasses.replace(
        found, names=("a\tb", "\x1b[1m"), labels=("a\tb",), values=np.array([0.75, 0.25])
    )
    assert label.to_line() == "a\\tb\t0.7500\tA great film. It was  good."
    assert label.to_line(top=2).startswith("a\\tb\t0.7500\t\\x1b[1m\t0.2500\tA ")


def test_a_text_without_words_has_no_label(han):
    empty, other, blank = han.predict(["", "a great film.", " \n "])
    assert other.label == "positive"
    for found in (empty, blank):
        assert found.label == ""
        assert found.probability == 0
        assert found.notes == ("the text has no words: it has no label",)
        assert found.to_line().startswith("\t0.0000\t")
    assert empty.to_dict()["probabilities"] == {}
    assert len(han.predict([""])) == 1
    assert han.predict([]) == []


@pytest.mark.parametrize("name", ["han", "flat"])
def test_an_explanation_finds_the_word_that_decides(name, request):
    predictor = request.getfixturevalue(name)
    for word, label in [(GOOD[0], "positive"), (BAD[0], "negative")]:
        text = f"It was a story of two men. The film is {word}, and it was the film."
        found = predictor.explain_words(text)
        assert found.label == label
        assert found.ranked_words()[0].text == word
        [without] = predictor.predict([text.replace(f"{word}, and", ", and")])
        expected = found.probability - without.probabilities[label]
        assert found.ranked_words()[0].drop == pytest.approx(expected, abs=1e-5)
        assert found.ranked_words()[0].drop > 0.2


def test_two_levels_of_weights_sum_to_one(han):
    found = han.explain_words("It was a story. The film is great! Two men.")
    assert [each.text for each in found.sentences] == [
        "It was a story.",
        "The film is great!",
        "Two men.",
    ]
    assert sum(each.weight for each in found.sentences) == pytest.approx(1, abs=1e-5)
    for sentence in found.sentences:
        assert sum(word.weight for word in sentence.words) == pytest.approx(1, abs=1e-5)
    most = max(found.sentences, key=lambda each: each.drop)
    assert most.text == "The film is great!"


def test_one_level_of_weights(flat):
    found = flat.explain_words("It was a story. The film is great!")
    assert len(found.sentences) == 1
    assert not found.has_sentence_weights
    assert sum(word.weight for word in found.words) == pytest.approx(1, abs=1e-5)


def test_the_weight_of_a_word_is_the_mean_over_the_hops(tmp_path):
    path = write_classifier(tmp_path / "model", steps=5, pooling="structured", hops=3)
    predictor = dragoman.load(path, device="cpu")
    text = "The film is a great story"
    with record(predictor.model, ["pooling"]) as records:
        predictor.predict([text])
    hops = records["pooling"].weights[0, 0]
    assert hops.shape == (3, 6)
    assert not torch.allclose(hops[0], hops.mean(dim=0), atol=1e-4), "the hops must differ"
    found = predictor.explain_words(text)
    expected = hops.mean(dim=0).tolist()
    assert [word.weight for word in found.words] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_smaller_tokens_are_explained_as_words(tokenizer, tmp_path):
    path = write_classifier(tmp_path / "model", steps=1, text_tokenizer=tokenizer)
    found = dragoman.load(path, device="cpu").explain_words("Ein schöner Film, 很好!")
    words = [word.text for word in found.words]
    assert words == ["Ein", "schöner", "Film", ",", "很", "好", "!"]
    assert sum(word.weight for word in found.words) == pytest.approx(1, abs=0.2)


def test_a_model_without_attention_is_explained_by_leaving_out(tmp_path):
    path = write_classifier(tmp_path / "model", pooling="max")
    found = dragoman.load(path, device="cpu").explain_words("The film is great!")
    assert not found.has_word_weights
    assert found.ranked_words()[0].text == "great"


def test_several_labels_with_thresholds_and_attention_by_label(tmp_path):
    path = write_classifier(tmp_path / "model", multi_label=True, pooling="labels", steps=120)
    predictor = dragoman.load(path, device="cpu")
    [found] = predictor.predict(["The film is great."])
    assert set(found.labels) == {"positive", "short"}
    names, values, _ = found.to_line().split("\t")
    assert set(names.split(",")) == {"positive", "short"}
    assert len(values.split(",")) == 2
    good = predictor.explain_words("The film is great.", label="positive")
    short = predictor.explain_words("The film is great.", label="short")
    assert [word.weight for word in good.words] != [word.weight for word in short.words]
    assert good.ranked_words()[0].text == "great"
    with pytest.raises(
        DataError, match=r"one of the model's; found 'nice'; choose one of negative"
    ):
        predictor.explain_words("The film is great.", label="nice")


def test_labels_above_their_thresholds_come_most_probable_first(tmp_path, monkeypatch):
    path = write_classifier(tmp_path / "model", multi_label=True, steps=1)
    predictor = dragoman.load(path, device="cpu")
    assert predictor.labels == ("negative", "neutral", "positive", "short")
    predictor.model.thresholds.copy_(torch.tensor([0.2, 0.2, 0.9, 0.2]))
    values = np.array([[0.3, 0.1, 0.8, 0.7]], np.float32)
    monkeypatch.setattr(predictor, "_probabilities", lambda *_: values)
    [found] = predictor.predict(["The film is great."])
    assert found.labels == ("short", "negative")
    assert (found.label, found.probability) == ("short", pytest.approx(0.7))
    assert found.to_line() == "short,negative\t0.7000,0.3000\tThe film is great."
    assert found.to_line(top=2).split("\t")[::2] == ["positive", "short", "The film is great."]
    assert list(found.to_dict()["probabilities"]) == ["positive", "short", "negative", "neutral"]


def test_without_a_label_the_most_probable_one_is_explained(tmp_path):
    path = write_classifier(tmp_path / "model", multi_label=True, steps=60)
    predictor = dragoman.load(path, device="cpu")
    predictor.model.thresholds.fill_(1.0)
    text = "The film is great."
    [found] = predictor.predict([text])
    assert found.labels == ()
    assert predictor.explain_words(text).label == next(iter(found.probabilities)) == "positive"


def test_the_text_is_that_of_the_field_of_training_unless_another_is_named(flat):
    record = Record(Path("a.jsonl"), 1, {"text": "one", "review": "two", "title": "three"})
    config = flat.config.replace(data={"text_field": "review"})
    predictor = Classifier(flat.model, type(flat.task)(config, flat.task.text))
    assert predictor.read_record(record) == "two"
    assert predictor.read_record(record, text_field="title") == "three"
    assert predictor.read_record(Record(Path("a.txt"), 1, {"text": "one"})) == "one"


def test_truncated_text_has_a_note(han):
    longest = han.config.data.max_length
    word = "film "
    [exact, cut] = han.predict([word * longest, word * (longest + 1)])
    assert exact.notes == ()
    note = f"only its first {longest:,} of {longest + 1:,} tokens were read"
    assert cut.notes[0].startswith(note)
    assert cut.label
    assert cut.to_dict()["probabilities"]
    assert han.explain_words(word * (longest + 1)).notes[0].startswith(note)


def test_an_input_that_is_not_text_is_named(han):
    with pytest.raises(DataError, match=r"text 2 must be a text; found 3 \(int\)"):
        han.predict(["one", 3])


def test_text_to_explain_must_hold_words(han):
    with pytest.raises(DataError, match="must hold words; found ' '"):
        han.explain_words(" ")


def test_a_translator_does_not_load_a_classifier(tmp_path):
    path = write_classifier(tmp_path / "model", steps=1)
    with pytest.raises(BundleError, match="found a model of task classify; use `dragoman predict"):
        dragoman.Translator.load(path)


def test_full_memory_changes_nothing(han, monkeypatch, caplog):
    texts = [each.text("text") for each in reviews(20, seed=7)]
    expected = [each.values for each in han.predict(texts)]
    predictor = Classifier(han.model, han.task)
    run = Classifier._probabilities

    def limited(self, model, encoded, device):
        if len(encoded) > 4 and model is self.model:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, model, encoded, device)

    monkeypatch.setattr(Classifier, "_probabilities", limited)
    found = [each.values for each in predictor.predict(texts)]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "in halves" in caplog.text


def test_a_lone_surrogate_is_an_error(flat):
    for run in (flat.predict, flat.read_arguments, lambda texts: flat.explain(texts[0])):
        with pytest.raises(DataError, match=r"valid Unicode; found U\+DCE9, a lone surr"):
            run(["x\udce9y"])


def test_an_input_that_is_not_text_is_not_explained(han):
    with pytest.raises(DataError, match="text 1 must be a text; found None"):
        han.explain_words(None)
