"""The tagging task: reading records, batches, losses, metrics and predictions."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.config.root_config import DataConfig
from dragoman.config.tagging import TagConfig
from dragoman.data.labeled_records import Record
from dragoman.errors import DataError
from dragoman.tasks.tagging import TagBatch, TaggingTask
from dragoman.tasks.tagging_preprocessor import TaggedSentence
from dragoman.text.special_tokens import UNK
from dragoman.text.tag_schemes import find_spans
from tests.tagging_kit import evaluate, make_config, make_records, make_task, train_task

VARIANTS: dict[str, dict[str, Any]] = {
    "bilstm-crf": {},
    "softmax": {"crf": False},
    "cnn": {"characters": "cnn"},
    "words": {"characters": "none", "features": ("shape", "prefix2", "suffix2")},
    "characters": {"word_width": 0},
    "column": {"input_field": "pos", "auxiliary_fields": ("pos", "frequency")},
    "transformer": {"encoder": "transformer", "crf": False},
    "transformer-crf": {"encoder": "transformer"},
    "bigru": {"encoder": "bigru"},
}


def build(name: str, **settings: Any) -> tuple[TaggingTask, torch.nn.Module]:
    torch.manual_seed(3)
    task = make_task(**(VARIANTS[name] | settings))
    return task, task.build_model()


def record(**fields: Any) -> Record:
    return Record(Path("bad.jsonl"), 7, fields)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_padding_and_other_rows_change_nothing(name: str) -> None:
    task, model = build(name)
    model.eval()
    store = task.encode(make_records(6, seed=5))
    batch = task.collate(store, np.arange(6))
    with torch.no_grad():
        together = task.loss(model, batch)
        single = [task.loss(model, task.collate(store, np.array([at]))) for at in range(6)]
        torch.testing.assert_close(together.nll, torch.stack([each.nll for each in single]).sum())
        assert float(together.count) == batch.tokens == store.lengths("words").sum()
        predictions = task.predict(model, batch)
        for at in range(6):
            (alone,) = task.predict(model, task.collate(store, np.array([at])))
            assert alone.tags == predictions[at].tags
            assert alone.probabilities == pytest.approx(predictions[at].probabilities, abs=1e-5)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_parameter_gets_a_gradient(name: str) -> None:
    task, model = build(name, word_dropout=0.1 if VARIANTS[name].get("word_width", 1) else 0.0)
    batch = task.collate(task.encode(make_records(30)), np.arange(30), training=True)
    task.loss(model.train(), batch).total.backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.abs().sum() > 0, path


@pytest.mark.parametrize("name", ["bilstm-crf", "softmax", "cnn", "transformer-crf", "column"])
def test_the_miniature_learns(name: str) -> None:
    records = make_records(60)
    task = make_task(records, **VARIANTS[name])
    model = train_task(task, records, steps=60, lr=0.01 if "transformer" in name else 0.03)
    metrics = evaluate(task, model, make_records(30, seed=9))
    assert metrics["f1"] > 0.9
    assert metrics["accuracy"] > 0.9


def test_unknown_words_are_tagged_by_their_characters() -> None:
    records = make_records(60)
    task = make_task(records, word_dropout=0.3)
    model = train_task(task, records, steps=80)
    store = task.encode_sentences([TaggedSentence(tokens=["sees", "Gerda", "1991", "Hanna"])])
    assert store.sequence("words", 0).tolist()[1:] == [UNK] * 3
    (found,) = task.predict(model, task.collate(store, np.arange(1)))
    assert [tag != "O" for tag in found.tags] == [False, True, False, True]


def test_word_dropout_reads_unknown_words_in_training_only() -> None:
    task, model = build("words", word_dropout=0.5, features=())
    batch = task.collate(task.encode(make_records(30)), np.arange(30))
    with torch.no_grad():
        model.train()
        assert not torch.equal(task.loss(model, batch).nll, task.loss(model, batch).nll)
        model.eval()
        assert torch.equal(task.loss(model, batch).nll, task.loss(model, batch).nll)


def test_auxiliary_losses_are_part_of_the_training_objective_only() -> None:
    task, model = build("column")
    batch = task.collate(task.encode(make_records(5)), np.arange(5))
    trained = task.loss(model.train(), batch)
    assert trained.total > trained.nll
    validated = task.loss(model.eval(), batch)
    torch.testing.assert_close(validated.total.detach(), validated.nll)
    torch.testing.assert_close(validated.nll, trained.nll)


def test_auxiliary_losses_have_their_weight() -> None:
    extra = []
    for weight in (0.5, 2.0):
        task, model = build("column", auxiliary_weight=weight)
        batch = task.collate(task.encode(make_records(6, seed=5)), np.arange(6))
        with torch.no_grad():
            found = task.loss(model.train(), batch)
        extra.append(float(found.total - found.nll))
    assert extra[0] > 0
    assert extra[1] == pytest.approx(4 * extra[0], rel=1e-4)


def test_padding_has_no_auxiliary_loss() -> None:
    task, model = build("column")
    store = task.encode(make_records(6, seed=5))
    batch = task.collate(store, np.arange(6))
    assert batch.mask is not None
    with torch.no_grad():
        together = task.loss(model.train(), batch)
        single = [task.loss(model, task.collate(store, np.array([at]))) for at in range(6)]
    torch.testing.assert_close(together.total, torch.stack([each.total for each in single]).sum())


def test_predictions_are_legal_spans_in_the_scheme_of_the_files() -> None:
    for crf in (True, False):
        task, model = build("bilstm-crf", crf=crf)
        store = task.encode(make_records(20))
        for tags, probabilities in task.predict(model.eval(), task.collate(store, np.arange(20))):
            assert len(tags) == len(probabilities)
            assert all(0 <= each <= 1 for each in probabilities)
            for span in find_spans(tags):
                assert tags[span.start] == f"B-{span.type}"
                assert set(tags[span.start + 1 : span.end]) <= {f"I-{span.type}"}


def test_metrics_of_the_true_tags_are_perfect() -> None:
    """A model whose emissions are the reference's tags scores 1 everywhere."""
    task, model = build("softmax")
    records = make_records(20)
    store = task.encode(records)
    rows = {
        tuple(store.sequence("words", at).tolist()): store.sequence("tags", at)
        for at in range(len(store))
    }

    def oracle(words: torch.Tensor, mask: Any, **_: Any) -> torch.Tensor:
        found = torch.zeros(*words.shape, len(task.text.labels))
        for row, ids in enumerate(words.tolist()):
            tags = next(
                tags
                for key, tags in rows.items()
                if ids[: len(key)] == list(key) and not any(ids[len(key) :])
            )
            for at, tag in enumerate(tags):
                found[row, at, tag] = 50.0
        return found

    model.forward = oracle  # type: ignore[method-assign]
    metrics = evaluate(task, model, records)
    assert metrics["loss"] < 1e-6
    assert {name: metrics[name] for name in ("accuracy", "precision", "recall", "f1")} == {
        "accuracy": 1.0,
        "precision": 1.0,
        "recall": 1.0,
        "f1": 1.0,
    }
    names = [score.name for score in task.scores(metrics)]
    assert names == ["accuracy", "precision", "recall", "f1"]
    assert "rules:conlleval" in task.scores(metrics)[-1].signature


@pytest.mark.parametrize(
    ("constrained", "tags", "score"),
    [(True, ["B-PER", "I-PER"], 1.0), (False, ["O", "B-PER"], 0.0)],
)
def test_validation_scores_the_tags_that_prediction_returns(
    constrained: bool, tags: list[str], score: float
) -> None:
    """O E-PER has the highest emissions, 2 + 3, and is not legal; read as O B-PER it scores 0. The
    best legal sequence is B-PER E-PER with 1 + 3, the reference.
    """
    task, model = build("softmax", constrained=constrained)
    records = [record(tokens=["Anna", "Meier"], tags=["B-PER", "I-PER"])]
    emissions = torch.zeros(1, 2, len(task.text.labels))
    for position, tag, value in ((0, "O", 2.0), (0, "B-PER", 1.0), (1, "E-PER", 3.0)):
        emissions[0, position, task.text.labels.index(tag)] = value
    model.forward = lambda *_, **__: emissions  # type: ignore[method-assign]
    (predicted,) = task.predict(model.eval(), task.collate(task.encode(records), np.arange(1)))
    assert predicted.tags == tags
    metrics = evaluate(task, model, records)
    assert metrics["f1"] == metrics["accuracy"] == score


def test_spans_of_unknown_types_are_missed_not_lost() -> None:
    task, model = build("bilstm-crf")
    found = evaluate(task, model, [record(tokens=["Anna", "sees"], tags=["B-ORG", "O"])])
    assert found["recall"] == 0.0
    assert np.isfinite(found["loss"])


def test_unknown_tags_are_counted_and_files_of_others_only_rejected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = make_task()
    tokens = ["Anna", "in", "Bonn"]
    task.encode([record(tokens=tokens, tags=["S-PER", "O", "B-LOC"])])
    assert not caplog.messages, "spans of known types, though in another scheme"
    task.encode([record(tokens=tokens, tags=["B-XYZ", "O", "B-LOC"])])
    assert caplog.messages == [
        "1 of 3 tags are not among those of training, and count as wrong: B-XYZ"
    ]
    with pytest.raises(DataError, match="found only others: NOUN, ADP; name the field of the tags"):
        task.encode([record(tokens=tokens, tags=["NOUN", "ADP", "NOUN"])])


def test_plain_tags_have_accuracy() -> None:
    records = [
        Record(Path("a.jsonl"), at, {"tokens": ["a", "cat"], "upos": ["DET", "NOUN"]})
        for at in range(4)
    ]
    task = make_task(records)
    assert task.text.scheme == "plain"
    metrics = evaluate(task, train_task(task, records, steps=20), records)
    assert metrics["accuracy"] == metrics["f1"] == 1.0
    assert [score.name for score in task.scores(metrics)] == ["accuracy"]


def test_word_segmentation_learns_from_spaced_text() -> None:
    lines = ["我 喜欢 猫", "猫 喜欢 我", "狗 喜欢 自然", "自然 喜欢 狗 和 猫", ""]
    records = [Record(Path("a.txt"), at, {"text": line}) for at, line in enumerate(lines, 1)]
    task = make_task(
        records, segmentation=True, characters="none", features=("previous_bigram", "next_bigram")
    )
    assert len(task.encode(records)) == 4  # without the empty line
    metrics = evaluate(task, train_task(task, records, steps=60), records)
    assert metrics["f1"] == 1.0
    assert task.scores(metrics)[-1].signature.startswith("words:exact")


def test_batches_are_padded_to_shapes_and_few_character_lengths() -> None:
    task, _ = build("bilstm-crf", max_characters=24)
    store = task.encode(make_records(30))
    plan = task.plan(store, batch_tokens=60, seed=1)
    for examples in plan.epoch(0):
        batch = task.collate(store, examples, shapes=plan.shapes)
        assert isinstance(batch, TagBatch)
        assert batch.characters is not None
        assert batch.characters.shape[2] % 8 == 0
        assert batch.words.shape[1] in {shape.src for shape in plan.shapes}
        assert batch.padded_tokens <= 60
        half = batch.rows(slice(1))
        assert half.tokens == batch.sizes[0]


def test_files_of_the_text_build_the_same_model() -> None:
    for name in ("bilstm-crf", "column", "words"):
        task, model = build(name)
        again = TaggingTask(task.config, TaggingTask.load_text(task.config, task.text_files()))
        other = again.build_model()
        other.load_state_dict(model.state_dict())
        inputs = task.golden_inputs(make_records(5))
        assert len(inputs) == 3
        assert again.golden_outputs(other.eval(), inputs) == task.golden_outputs(
            model.eval(), inputs
        )


def test_a_golden_input_that_is_not_valid_raises() -> None:
    task, model = build("column")
    for bad in (
        {"tokens": ["a"]},
        {"tokens": [1], "column": ["X"]},
        {"tokens": ["a"], "column": []},
    ):
        with pytest.raises((KeyError, ValueError, TypeError)):
            task.golden_outputs(model, [bad])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "as many values in 'tags' as in 'tokens'; found 1"),
        (
            {"tokens": ["a", ""], "tags": ["O", "O"]},
            "no empty token in 'tokens'; found one at posi",
        ),
        ({"tokens": [["a"]], "tags": ["O"]}, "must have a list of tokens in 'tokens'; found [["),
        ({"tokens": "a b", "tags": ["O"]}, "must have a list of tokens in 'tokens'; found \"a b\""),
    ],
)
def test_a_bad_record_is_named(fields: dict[str, Any], message: str) -> None:
    task, _ = build("bilstm-crf")
    with pytest.raises(DataError) as caught:
        task.encode([record(**fields)])
    assert "bad.jsonl line 7 " in str(caught.value)
    assert message in str(caught.value)


def test_tags_must_fit_a_configured_scheme() -> None:
    task = make_task(scheme="iob2")
    with pytest.raises(DataError, match=r"tag\.scheme=iob2 in 'tags'; found NOUN"):
        task.encode([record(tokens=["a"], tags=["NOUN"])])


def test_fields_are_named_or_detected() -> None:
    config = make_config(token_field="w", tag_field="t")
    records = [record(w=["a", "b"], t=["X", "Z"], tags=["Y", "Y"], tokens=["b", "c"])]
    task = TaggingTask(config, TaggingTask.fit_text(config, lambda: iter(records)))
    assert task.text.labels.names == ("X", "Z")
    with pytest.raises(DataError, match="must have a tag field, such as 'tags'; found only tokens"):
        TaggingTask.fit_text(make_config(), lambda: iter([record(tokens=["a"])]))
    with pytest.raises(DataError, match=r"must have the field 'pos' of tag\.input_field"):
        TaggingTask.fit_text(
            make_config(input_field="pos"), lambda: iter([record(tokens=["a"], tags=["O"])])
        )


def test_pretrained_vectors_start_the_word_embeddings(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("Anna 1 2 3\nbonn 4 5 6\nother 7 8 9\n", encoding="utf-8")
    task = make_task(vectors=str(path), word_width=3)
    table = task.build_model().inputs.words
    assert table is not None
    words = task.text.words
    assert table.weight[words.id("anna")].tolist() == [1, 2, 3]
    assert table.weight[words.id("bonn")].tolist() == [4, 5, 6]
    assert table.weight[words.id("sees")].abs().max() < 3
    assert task.describe().endswith("2 words with vectors")
    # The weights of a bundle have them: its text needs no file.
    assert TaggingTask.load_text(task.config, task.text_files()).vectors is None
    with torch.device("meta"):
        assert task.build_model().inputs.words is not None
    with pytest.raises(
        DataError, match=r"tag\.word_width=8 dimensions; found 3; set tag\.word_wid"
    ):
        make_task(vectors=str(path))


def test_training_data_without_sentences_is_an_error() -> None:
    with pytest.raises(DataError, match="training data must have tagged sentences; found none"):
        TaggingTask.fit_text(make_config(), lambda: iter(()))


def test_training_data_with_one_tag_is_an_error() -> None:
    records = [record(tokens=["a", "b"], tags=["O", "O"])]
    with pytest.raises(DataError, match="must have at least 2 tags; found O; check data"):
        TaggingTask.fit_text(make_config(), lambda: iter(records))


def test_segmentation_reads_the_text_field() -> None:
    config = make_config(segmentation=True, characters="none")
    config = config.replace(data={"text_field": "line"})
    assert isinstance(config.data, DataConfig)
    text = TaggingTask.fit_text(config, lambda: iter([record(line="我 们")]))
    assert len(text.words) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": ("shap",)}, "found 'shap'; did you mean shape?"),
        ({"features": ("shape", "shape")}, "tag.features must be distinct; found shape, shape"),
        ({"word_width": 0, "characters": "none"}, "found tag.word_width=0, tag.characters=none"),
        ({"word_width": 0, "vectors": "v.txt"}, "found tag.word_width=0 with 'v.txt'"),
        ({"character_features": 7}, "found 7; try 8"),
        ({"segmentation": True}, "needs tag.characters=none; found lstm"),
        (
            {"segmentation": True, "characters": "none", "input_field": "pos"},
            "tag.input_field is for tagged tokens; found pos",
        ),
        (
            {"segmentation": True, "characters": "none", "scheme": "iob2"},
            "tag.scheme must be bmes for word segmentation; found iob2",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    assert message in "; ".join(TagConfig(**settings).problems())


def test_emissions_are_float32_under_autocast() -> None:
    task, model = build("transformer-crf")
    batch = task.collate(task.encode(make_records(5)), np.arange(5))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = model.encode(batch.words, batch.mask, characters=batch.characters)
        emissions = model.emit(hidden)
        loss = task.loss(model, batch)
    assert emissions.dtype == loss.nll.dtype == torch.float32
    exact = hidden.double() @ model.emission.weight.double().t() + model.emission.bias
    torch.testing.assert_close(emissions.double(), exact, atol=1e-5, rtol=1e-5)


# Without the encoders whose sinusoidal positions are a table on the CPU.
@pytest.mark.parametrize(
    "name", sorted(name for name in VARIANTS if "encoder" not in VARIANTS[name])
)
def test_a_training_step_never_reads_a_value_of_a_tensor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors have none: what would synchronize with a GPU raises here."""
    # There is no autocast for meta tensors, not even to switch it off.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    task, _ = build(name, word_dropout=0.1 if VARIANTS[name].get("word_width", 1) else 0.0)
    batch = task.collate(task.encode(make_records(6)), np.arange(6), training=True)
    with torch.device("meta"):
        model = task.build_model().train()
        loss = task.loss(model, batch.to("meta"))
        loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_input_is_tokens_or_a_named_text() -> None:
    task = make_task()
    both = record(tokens=["Anna", "sees"], text="in Bonn", other="the")
    assert list(task.read_input(both).tokens) == ["Anna", "sees"]
    assert task.read_input(both, text_field="other") == "the"
    assert task.read_input(record(text="in Bonn")) == "in Bonn"
    config = task.config.replace(data={"text_field": "line"})
    named = TaggingTask(config, task.text)
    assert named.read_input(record(text="in Bonn", line="the")) == "the"
    assert named.read_input(record(text="in Bonn")) == "in Bonn"


@pytest.mark.parametrize("setting", ["input_dropout", "output_dropout"])
def test_dropout_of_inputs_and_outputs_acts_in_training_only(setting: str) -> None:
    rates = {"input_dropout": 0.0, "output_dropout": 0.0, "word_dropout": 0.0, setting: 0.5}
    task, model = build("bilstm-crf", **rates)
    batch = task.collate(task.encode(make_records(5)), np.arange(5))
    with torch.no_grad():
        model.train()
        assert not torch.equal(task.loss(model, batch).nll, task.loss(model, batch).nll)
        model.eval()
        assert torch.equal(task.loss(model, batch).nll, task.loss(model, batch).nll)


def test_dropped_words_are_embedded_as_unknown_ones() -> None:
    _, model = build("words", word_dropout=0.5, input_dropout=0.0, features=())
    inputs = model.inputs
    words = torch.full((20, 10), UNK + 1)
    with torch.no_grad():
        unknown, known = inputs.eval()(torch.tensor([[UNK], [UNK + 1]]))[:, 0]
        found = inputs.train()(words)
    hidden = torch.isclose(found, unknown, atol=1e-5).all(dim=-1)
    assert torch.equal(torch.isclose(found, known, atol=1e-5).all(dim=-1), ~hidden)
    assert 0.35 < hidden.float().mean() < 0.65


def test_tags_are_smoothed_in_training_only() -> None:
    task = make_task(crf=False)
    smoothed = TaggingTask(task.config.replace(train={"label_smoothing": 0.3}), task.text)
    torch.manual_seed(1)
    model = smoothed.build_model()
    store = smoothed.encode(make_records(4))
    batch = smoothed.collate(store, np.arange(4))
    found = smoothed.loss(model.eval(), batch)
    assert found.total.item() == pytest.approx(found.nll.item())
    found = smoothed.loss(model.train(), batch)
    assert found.total.item() != pytest.approx(found.nll.item(), rel=1e-3)
