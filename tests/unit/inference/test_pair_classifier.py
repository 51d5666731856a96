"""PairClassifier: inputs, batches, predictions and co-attention."""

from pathlib import Path

import pytest
import torch

from dragoman.config import Config, ModelConfig, TextConfig
from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.data.labeled_records import Record
from dragoman.errors import ConfigError, DataError
from dragoman.inference.predictors.sentence_pair_classifier import (
    EMPTY_NOTE,
    PairClassifier,
    PairPrediction,
)
from dragoman.tasks.sentence_pair_classification import PairsTask

PAIRS = [("A man plays", "A man is playing"), ("A dog", "The dog is not running here"), ("a", "x")]


def record_of(**fields) -> Record:
    return Record(Path("in.txt"), 3, fields)


def classifier_of(**pairs) -> PairClassifier:
    config = Config(
        task="pairs",
        text=TextConfig(tokenizer="words", lowercase=True),
        model=ModelConfig(
            encoder=("bilstm",), width=8, heads=2, ffn_width=8, dropout=0.0, positions="none"
        ),
        pairs=PairsConfig(classifier_width=6, match_features=True, **pairs),
    )
    rows = [
        record_of(a=a, b=b, label=label, relatedness=2)
        for (a, b), label in zip(PAIRS, "xyx", strict=True)
    ]
    task = PairsTask(config, PairsTask.fit_text(config, lambda: iter(rows)))
    torch.manual_seed(0)
    return PairClassifier(task.build_model(), task)


def test_control_characters_of_labels_do_not_break_a_line():
    found = PairPrediction("a\tb\n", {"a\tb\n": 0.75, "\x1b": 0.25}, None)
    assert found.to_line(top=2) == "a\\tb\\n\t0.7500\t\\x1b\t0.2500"


@pytest.mark.parametrize("interaction", ["co_attention", "decomposable", "none", "sequence"])
def test_batching_does_not_change_results(interaction):
    model = classifier_of(interaction=interaction)
    together = model.predict(PAIRS)
    for pair, expected in zip(PAIRS, together, strict=True):
        (alone,) = model.predict([pair])
        assert alone.probabilities == pytest.approx(expected.probabilities, rel=1e-4)
        assert alone.score == pytest.approx(expected.score, rel=1e-4)
    first = together[0]
    assert 1 <= first.score <= 5
    assert sum(first.probabilities.values()) == pytest.approx(1.0)
    line = first.to_line()
    assert line == f"{first.label}\t{first.probabilities[first.label]:.4f}\t{first.score:.3f}"
    assert first.to_line(top=2).count("\t") == 4
    assert set(first.to_dict()) == {"label", "probabilities", "score"}


def test_a_score_is_the_mean_of_the_scores_of_training_by_their_probability():
    """Those of training are 1 to 5."""
    model = classifier_of()
    batch = model.task.batch_pairs(model.encode(PAIRS))
    with torch.no_grad():
        output = model.model(batch.token_ids, batch.flags, batch.lengths)
    expected = (output.score.softmax(1) * torch.tensor([1.0, 2, 3, 4, 5])).sum(1).tolist()
    assert [each.score for each in model.predict(PAIRS)] == pytest.approx(expected, rel=1e-4)


def test_the_length_of_a_pair_counts_both_padded_sentences():
    model = classifier_of()
    assert [model.length(each) for each in model.encode(PAIRS)] == [8, 12, 2]


def test_named_fields_come_before_those_of_training():
    model = classifier_of(first_field="a", second_field="b")
    record = record_of(a="one", b="two", c="three")
    assert model.read_record(record) == ("one", "two")
    assert model.read_record(record, text_field="c", second_field="a") == ("three", "one")


def test_a_line_has_a_tab_and_a_record_two_fields():
    model = classifier_of()
    assert model.read_record(record_of(text="one\ttwo")) == ("one", "two")
    assert model.read_record(record_of(premise="one", hypothesis="two")) == ("one", "two")
    with pytest.raises(DataError, match=r"in\.txt line 3 .* tab in between; found 'one'"):
        model.read_record(record_of(text="one"))
    with pytest.raises(DataError, match=r"tab in between; found 3 columns in 'one"):
        model.read_record(record_of(text="one\ttwo\tthree"))
    with pytest.raises(DataError, match="name them: --text-field a --text-field other"):
        model.read_record(record_of(a="one", other="two"))


def test_the_fields_of_a_pair_can_be_named():
    model = classifier_of()
    record = record_of(a="one", other="two", third="three")
    assert model.read_record(record, text_field="third", second_field="2") == ("three", "two")
    with pytest.raises(DataError, match="must have the field 'x' of --text-field"):
        model.read_record(record_of(text="one\ttwo"), text_field="x")


def test_a_lone_surrogate_is_an_error():
    model = classifier_of()
    for run in (lambda pair: model.predict([pair]), model.explain, model.explain_words):
        with pytest.raises(DataError, match=r"text must be valid Unicode; found U\+D800"):
            run(("a man", "b\ud800"))


def test_a_pair_with_an_empty_sentence_has_no_label():
    model = classifier_of()
    lines = ["", "\t", "a\t", "a\tx"]
    found = model.predict([model.read_record(record_of(text=line)) for line in lines])
    assert [each.notes for each in found] == [(EMPTY_NOTE,)] * 3 + [()]
    assert [each.to_line() for each in found[:3]] == ["\t0.0000"] * 3
    assert found[2].to_dict() == {"label": "", "probabilities": {}, "notes": [EMPTY_NOTE]}
    assert found[3].label in ("x", "y")
    for explain in (model.explain, model.explain_words):
        with pytest.raises(DataError, match=r"must hold words; found \('a', ' '\)"):
            explain(("a", " "))


def test_an_input_that_is_not_a_pair_is_an_error():
    model = classifier_of()
    with pytest.raises(DataError, match="list of pairs; found 'x'"):
        model.predict("x")
    for wrong in ("ab", ("a",), ("a", 1)):
        with pytest.raises(DataError, match="pair of texts; found"):
            model.predict([wrong])


def test_an_explanation_has_the_weights_of_both_directions():
    model = classifier_of()
    found = model.explain_words(PAIRS[0])
    assert found.first == ["A", "man", "plays"]
    assert found.first_weights.shape == (3, 4)
    assert found.second_weights.shape == (4, 3)
    torch.testing.assert_close(found.first_weights.sum(1), torch.ones(3))
    assert found.prediction.probabilities == pytest.approx(
        model.predict([PAIRS[0]])[0].probabilities, rel=1e-5
    )
    assert len(found.to_dict()["second_weights"]) == 4
    lines = found.to_text().splitlines()
    assert lines[0] == found.prediction.to_line()
    assert lines[2].split("\t")[0] == "A"
    for line, weights in zip(lines[6:], found.second_weights, strict=True):
        assert line.split("\t")[1] == found.first[int(weights.argmax())]
    with pytest.raises(ConfigError, match=r"found pairs\.interaction=none"):
        classifier_of(interaction="none").explain_words(PAIRS[0])


def test_a_line_has_the_most_probable_labels_and_the_score() -> None:
    found = PairPrediction("b", {"a": 0.2, "b": 0.7, "c": 0.1}, 3.25)
    assert found.to_line() == "b\t0.7000\t3.250"
    assert found.to_line(top=2) == "b\t0.7000\ta\t0.2000\t3.250"


@pytest.mark.parametrize("value", [None, 5, float("nan"), {"a": 1}, "ab", ("a",), ("a", 1)])
def test_no_other_value_is_a_pair(value):
    with pytest.raises(DataError, match="an input must be a pair of texts; found "):
        classifier_of().predict([value])
