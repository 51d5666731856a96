"""The classification task: texts, labels, batches, losses, thresholds and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dragoman.bundle import format as bundle_format
from dragoman.config import Config, DataConfig, ModelConfig, TextConfig, TrainConfig
from dragoman.config.classification import ClassifyConfig
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.labeled_records import Record, read_records
from dragoman.errors import BundleError, ConfigError, DataError
from dragoman.tasks import classification_preprocessor
from dragoman.tasks.classification import MAX_GOLDEN_CHARACTERS, ClassificationTask
from dragoman.tasks.classification_preprocessor import split_document
from dragoman.text.special_tokens import UNK
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import QuietProgress
from tests.classify_kit import fit_task, make_records, micro_f1, train_steps

FLOAT32 = Precision(torch.float32, "for tests")


def configure(**classify: Any) -> Config:
    return Config(
        task="classify",
        text=TextConfig(tokenizer="words", lowercase=True),
        data=DataConfig(max_length=100),
        model=ModelConfig(encoder=("bigru",), width=16, positions="none", dropout=0.0),
        classify=ClassifyConfig(**{"dropout": 0.0, **classify}),
        train=TrainConfig(label_smoothing=0.0, batch_tokens=400, learning_rate=1e-2),
    )


def records_of(*fields: dict[str, Any]) -> list[Record]:
    return [Record(Path("x.jsonl"), number, each) for number, each in enumerate(fields, 1)]


def test_documents_are_split_at_punctuation_and_line_breaks() -> None:
    text = "It is good. Very good!<br /><br />Dr. Who likes it\nSo do I"
    found = list(split_document(configure(hierarchical=True), text))
    assert found == [
        ["It", "is", "good", "."],
        ["Very", "good", "!"],
        ["Dr", ".", "Who", "likes", "it"],
        ["So", "do", "I"],
    ]


def test_anonymised_text_is_split_at_its_second_most_frequent_token() -> None:
    config = configure(hierarchical=True, sentence_end="second_most_frequent", max_sentence_words=3)
    texts = ["7 9 8 7 8 7 5 7 6 8 4", "7 8 7", "7 8"]  # 7 is the comma, 8 the full stop
    records = records_of(
        *({"text": text, "label": number % 2} for number, text in enumerate(texts))
    )
    task = fit_task(config, records)
    assert task.text.sentence_end == "8"
    assert task.tokenize(texts[0]).sentences == [
        ["7", "9", "8"],
        ["7", "8"],
        ["7", "5", "7"],
        ["6", "8"],
        ["4"],
    ]
    with pytest.raises(DataError, match="at least two different tokens; found 1"):
        fit_task(config, records_of({"text": "7", "label": 0}, {"text": "7", "label": 1}))


def test_a_sentence_ends_at_its_token_in_either_case_if_the_vocabulary_is_lowercased() -> None:
    config = configure(hierarchical=True)
    assert list(split_document(config, "a B c b d", "b")) == [["a", "B"], ["c", "b"], ["d"]]
    cased = config.replace(text={"lowercase": False})
    assert list(split_document(cased, "a B c b d", "b")) == [["a", "B", "c", "b"], ["d"]]


def test_frequencies_ignore_case_if_the_vocabulary_is_lowercased() -> None:
    config = configure(hierarchical=True, sentence_end="second_most_frequent")
    records = records_of(  # "end" three times, in either case alone less often than "the"
        {"text": "The end a the END b the END", "label": 0}, {"text": "the b c", "label": 1}
    )
    task = fit_task(config, records)
    assert task.text.sentence_end == "end"
    assert task.tokenize("a END b").sentences == [["a", "END"], ["b"]]


def test_equally_frequent_tokens_are_ranked_by_code_point() -> None:
    config = configure(hierarchical=True, sentence_end="second_most_frequent")
    records = records_of({"text": "8 9 7", "label": 0}, {"text": "7 9 8", "label": 1})
    assert fit_task(config, records).text.sentence_end == "8"


def test_lists_of_one_label_are_single_labels_if_multi_label_is_off() -> None:
    records = records_of({"text": "a", "label": ["x"]}, {"text": "b", "label": ["y"]})
    found = {
        setting: fit_task(configure(multi_label=setting), records).text.multi_label
        for setting in ("off", "auto", "on")
    }
    assert found == {"off": False, "auto": True, "on": True}


def test_decomposed_letters_are_the_tokens_that_were_learnt() -> None:
    config = configure().replace(text={"normalization": "nfc"})
    records = records_of({"text": "\u00e9t\u00e9", "label": 0}, {"text": "b", "label": 1})
    task = fit_task(config, records)
    assert task.tokenize("e\u0301te\u0301").tokens == ["\u00e9t\u00e9"]


def test_texts_are_cut_after_the_longest_length() -> None:
    for hierarchical in (False, True):
        config = configure(hierarchical=hierarchical).replace(data={"max_length": 5})
        task = fit_task(config, make_records(20, seed=0))
        found = task.tokenize("one two. three four! five six")
        assert found.tokens == ["one", "two", ".", "three", "four"]


def test_the_longest_length_bounds_documents_of_many_sentences() -> None:
    config = configure(hierarchical=True, max_sentence_words=2).replace(data={"max_length": 7})
    task = fit_task(config, make_records(20, seed=0))
    found = task.tokenize("A b. C d! E f. G h")
    assert found.sentences == [["A", "b"], ["."], ["C", "d"], ["!"], ["E"]]
    found = task.tokenize("A b. C d e. F g.")  # the second sentence ends at the limit
    assert found.sentences == [["A", "b"], ["."], ["C", "d"], ["e", "."]]


def test_batches_hold_the_words_of_documents() -> None:
    config = configure(hierarchical=True, max_sentence_words=4)
    records = records_of({"text": "a b c. d e f g h", "label": "x"}, {"text": "b", "label": "y"})
    task = fit_task(config, records)
    batch = task.collate(task.encode(records), np.arange(2))
    tokens = task.text.vocabulary.tokens
    rows = [
        [[tokens[word] for word in sentence] for sentence in document]
        for document in batch.words.tolist()
    ]
    pad = "<pad>"
    assert rows[0] == [["a", "b", "c", "."], ["d", "e", "f", "g"], ["h", pad, pad, pad]]
    assert rows[1] == [["b", pad, pad, pad], [pad] * 4, [pad] * 4]
    assert batch.lengths.tolist() == [[4, 4, 1], [1, 0, 0]]
    assert (batch.tokens, batch.padded_tokens) == (10, 24)
    assert batch.mask is not None
    assert torch.equal(batch.mask, batch.words != 0)


def test_batches_are_filled_with_documents_up_to_the_padded_batch_size() -> None:
    """Four documents of three sentences of at most four words are 48 padded tokens."""
    config = configure(hierarchical=True, max_sentence_words=4)
    records = records_of(*({"text": "a b. c d. e f.", "label": at % 2} for at in range(8)))
    task = fit_task(config, records)
    store = task.encode(records)
    assert task.lengths(store).tolist() == [3] * 8
    plan = task.plan(store, batch_tokens=48, seed=1)
    assert [len(examples) for examples in plan.epoch(0)] == [4, 4]


def test_with_bucket_shapes_sentences_have_one_width() -> None:
    """CUDA graphs are captured by shape: without buckets a batch is as wide as its sentences."""
    config = configure(hierarchical=True, max_sentence_words=6)
    records = records_of({"text": "A b. C d. E", "label": 0}, {"text": "f", "label": 1})
    task = fit_task(config, records)
    store = task.encode(records)
    assert task.collate(store, np.arange(2)).words.shape == (2, 3, 3)
    shapes = [BatchShape(src=4, tgt=1)]
    assert task.collate(store, np.arange(2), shapes=shapes).words.shape == (2, 4, 6)


def test_values_of_ngrams_are_normalized_tf_idf() -> None:
    records = records_of(
        {"text": "a a b", "label": ["x"]}, {"text": "b c", "label": []}, {"text": "b", "label": []}
    )
    config = configure(
        pooling="none", ngrams=1, ngram_min_count=1, ngram_weights="tf_idf", multi_label="on"
    )
    task = fit_task(config, records)
    batch = task.collate(task.encode(records), np.arange(3))
    assert batch.ngram_values is not None
    a, b = (1 + np.log(2)) * (np.log(4 / 2) + 1), np.log(4 / 4) + 1
    found = batch.ngram_values[0][batch.ngram_values[0] > 0].sort().values
    np.testing.assert_allclose(found, sorted(np.array([a, b]) / np.hypot(a, b)), rtol=1e-5)


def test_ngrams_of_documents_are_those_of_their_sentences() -> None:
    config = configure(hierarchical=True, ngrams=2, ngram_min_count=1)
    records = records_of({"text": "a b<br />c d", "label": "x"}, {"text": "e f", "label": "y"})
    task = fit_task(config, records)
    assert task.text.ngrams is not None
    assert len(task.encode(records).sequence("ngrams", 0)) == 7  # a, b, c, d, ab, bc, cd
    assert len(task.text.ngrams) == 1 + 7 + 3  # padding, and e, f, ef
    batch = task.collate(task.encode(records), np.arange(2))
    assert batch.ngrams is not None
    assert batch.ngrams.count_nonzero(dim=1).tolist() == [7, 3]


def test_ngrams_begin_with_naive_bayes_ratios() -> None:
    records = make_records(60, seed=0)
    task = fit_task(configure(pooling="none", ngrams=1), records)
    model = task.build_model()
    assert model.bag is not None
    assert task.text.ngrams is not None
    money, sport = task.text.labels.names
    (goal,) = task.text.ngrams.count(["goal"]).ids
    assert model.bag.ratios[goal, task.text.labels.index(sport)] > 1
    assert model.bag.ratios[goal, task.text.labels.index(money)] < -1


def test_the_loss_is_the_cross_entropy_of_the_class() -> None:
    records = make_records(40, seed=0)
    config = configure(class_weights="balanced").replace(train={"label_smoothing": 0.1})
    task = fit_task(config, records)
    model = task.build_model().eval()
    batch = task.collate(task.encode(records), np.arange(7))
    loss = task.loss(model, batch)
    logits = task.forward(model, batch).logits
    counts = torch.tensor(task.text.label_counts, dtype=torch.float)
    weights = 40 / (2 * counts)
    log_probs = logits.log_softmax(-1)
    smooth = 0.9 * F.one_hot(batch.labels, 2) + 0.05
    expected = -(smooth * weights * log_probs).sum()
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.nll, -log_probs[range(7), batch.labels].sum())
    assert float(loss.count) == 7


def test_the_loss_of_several_labels_branches_and_attributes() -> None:
    records = make_records(40, seed=0, several=True)
    config = configure(
        ngrams=1,
        branch_loss=0.5,
        pooling="max",
        attribute_field="attributes",
        attribute_weight=2.0,
        auxiliary_field="fine",
        auxiliary_weight=3.0,
    )
    unknown = Record(Path("x.jsonl"), 41, {**records[0].fields, "attributes": None})
    task = fit_task(config, records)
    assert task.text.multi_label
    model = task.build_model()
    batch = task.collate(task.encode([*records[:5], unknown]), np.arange(6))
    output = task.forward(model, batch)
    loss = task.loss(model, batch)

    def entropy(logits: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
        assert logits is not None
        p = logits.sigmoid()
        return -(targets * p.log() + (1 - targets) * (1 - p).log()).sum()

    labels = batch.labels.double()
    assert output.attributes is not None
    assert output.auxiliary is not None
    assert batch.attributes is not None
    assert batch.auxiliary is not None
    fine = output.auxiliary.log_softmax(-1)[range(6), batch.auxiliary]
    expected = (
        entropy(output.logits, labels)
        + 0.5 * entropy(output.encoder_logits, labels)
        + 0.5 * entropy(output.ngram_logits, labels)
        + 2.0 * entropy(output.attributes[:5], batch.attributes[:5])
        - 3.0 * fine.sum()
    )
    torch.testing.assert_close(loss.total, expected.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(loss.nll, entropy(output.logits, labels).float())


def test_label_smoothing_of_several_labels_is_towards_one_half() -> None:
    """Targets are 0.9 and 0.1 instead of 1 and 0; examples with a label have its weight."""
    config = configure(class_weights="balanced").replace(train={"label_smoothing": 0.2})
    records = make_records(40, seed=0, several=True)
    task = fit_task(config, records)
    model = task.build_model().eval()
    batch = task.collate(task.encode(records), np.arange(7))
    p = task.forward(model, batch).logits.sigmoid()
    counts = torch.tensor(task.text.label_counts)
    assert (counts != 20).all()  # the weights are not 1
    present, absent = -(40 - counts) / counts * p.log(), -(1 - p).log()
    losses = torch.where(
        batch.labels == 1, 0.9 * present + 0.1 * absent, 0.1 * present + 0.9 * absent
    )
    torch.testing.assert_close(task.loss(model, batch).total, losses.sum())


def test_balanced_labels_weigh_as_much_as_their_absence() -> None:
    task = fit_task(configure(class_weights="balanced"), make_records(50, seed=0, several=True))
    weights = task._class_weights
    assert weights is not None
    counts = np.array(task.text.label_counts)
    np.testing.assert_allclose(weights.numpy() * counts, 50 - counts, rtol=1e-6)


def test_a_label_that_a_record_repeats_counts_once() -> None:
    labels = (["a", "a"], ["a", "b"], ["b"], ["c"])
    records = records_of(*({"text": "w", "label": names} for names in labels))
    task = fit_task(configure(), records)
    assert task.text.labels.names == ("a", "b", "c")
    assert task.text.label_counts == (2, 2, 1)
    batch = task.collate(task.encode(records), np.arange(4))
    assert batch.labels[0].tolist() == [1, 0, 0]


def test_thresholds_are_tuned_on_the_validation_set_and_used() -> None:
    config = configure(tune_threshold="labels", threshold=0.9, ngrams=1)
    records = make_records(200, seed=0, several=True)
    task = fit_task(config, records)
    model = train_steps(task, records, steps=8)
    assert model.thresholds.tolist() == pytest.approx([0.9, 0.9])
    before = micro_f1(task, model, records)
    with torch.no_grad():
        decided = task.finish(
            model,
            task.encode(records),
            device=torch.device("cpu"),
            precision=FLOAT32,
            progress=QuietProgress(),
        )
    model.load_state_dict({**model.state_dict(), **decided})
    assert len(set(model.thresholds.tolist())) == 2
    assert micro_f1(task, model, records) > before


def test_validation_decides_by_the_threshold_of_each_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A label at its threshold is predicted: tuned thresholds are probabilities that occurred."""
    records = records_of({"text": "w", "label": ["a"]}, {"text": "v", "label": ["a", "b"]})
    task = fit_task(configure(), records)
    model = task.build_model()
    model.thresholds.copy_(torch.tensor([0.5, 0.9]))
    logits = np.log([[1.0, 4.0], [3.0, 19.0]]).astype(np.float32)  # p = 0.5, 0.8; 0.75, 0.95
    monkeypatch.setattr(task, "logits", lambda *_, **__: logits)
    found = task.evaluate(
        model,
        task.encode(records),
        device=torch.device("cpu"),
        precision=FLOAT32,
        progress=QuietProgress(),
    )
    assert found["accuracy"] == found["micro_f1"] == 1.0


def test_a_global_threshold_is_the_same_for_all_labels() -> None:
    records = make_records(60, seed=0, several=True)
    task = fit_task(configure(tune_threshold="global", ngrams=1), records)
    model = train_steps(task, records, steps=2)
    with torch.no_grad():
        tuned = task.finish(
            model,
            task.encode(records),
            device=torch.device("cpu"),
            precision=FLOAT32,
            progress=QuietProgress(),
        )["thresholds"]
    assert tuned[0] == tuned[1] != 0.5


def test_labels_are_predicted_from_their_threshold_on() -> None:
    task = fit_task(configure(), make_records(20, seed=0, several=True))
    probabilities = np.array([[0.5, 0.5], [0.25, 0.75]], np.float32)
    found = task.decide(probabilities, np.array([0.5, 0.75], np.float32))
    assert found.tolist() == [[True, False], [False, True]]


def test_metrics_are_those_of_all_examples() -> None:
    records = make_records(150, seed=0)
    task = fit_task(configure(), records)
    model = train_steps(task, records, steps=30)
    with torch.no_grad():
        found = task.evaluate(
            model,
            task.encode(records),
            device=torch.device("cpu"),
            precision=FLOAT32,
            progress=QuietProgress(),
        )
    assert found["accuracy"] == pytest.approx(micro_f1(task, model, records))
    with torch.no_grad():
        probabilities = task.golden_outputs(model, [record.text("text") for record in records])
    losses = [
        -np.log(row[record.fields["label"]])
        for row, record in zip(probabilities, records, strict=True)
    ]
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert set(found) == {"loss", *task.metrics}
    assert set(task.metrics) == set(ClassifyConfig.metrics)
    signatures = {score.name: score.signature for score in task.scores(found)}
    assert signatures["macro_f1"] == ("classes:2|mean|undefined:0")


@pytest.mark.parametrize(("tuned", "stated"), [("off", "0.3"), ("labels", "labels")])
def test_signatures_of_several_labels_state_the_threshold(tuned: str, stated: str) -> None:
    config = configure(threshold=0.3, tune_threshold=tuned)
    task = fit_task(config, make_records(20, seed=0, several=True))
    (score,) = task.scores({"accuracy": 0.5})
    assert score.signature == f"labels:2|threshold:{stated}|exact"


def test_golden_inputs_are_cut_to_a_length_that_a_bundle_can_record() -> None:
    task = fit_task(configure(), make_records(20, seed=0))
    found = task.golden_inputs(records_of({"text": "word " * 1000, "label": "sport"}))
    assert found == ["word " * 400]


@pytest.mark.parametrize("several", [False, True])
def test_a_text_without_words_has_no_label_in_an_evaluation(several: bool) -> None:
    records = make_records(60, seed=0, several=several)
    task = fit_task(configure(tune_threshold="off", threshold=0.0), records)
    model = task.build_model().eval()
    with torch.no_grad():
        [guess] = task.golden_outputs(model, [""])  # which no prediction shows
    best = max(guess, key=guess.__getitem__)
    empty = records_of(*[{"text": " ", "label": [best] if several else best}] * 60)
    options = {
        "device": torch.device("cpu"),
        "precision": FLOAT32,
        "progress": QuietProgress(),
    }
    with torch.no_grad():
        plain = task.evaluate_in_detail(model, task.encode(records), **options)
        found = task.evaluate_in_detail(model, task.encode([*records, *empty]), **options)
        (alone, _) = task.evaluate_in_detail(model, task.encode(empty), **options)
    assert found.metrics["accuracy"] == pytest.approx(plain.metrics["accuracy"] / 2)
    error = plain.metrics["calibration_error"]
    assert found.metrics["calibration_error"] == pytest.approx(error, rel=1e-3)
    assert [row["predicted"] for row in found.rows] == [row["predicted"] for row in plain.rows]
    assert (alone["accuracy"], alone["micro_f1"], alone["calibration_error"]) == (0.0, 0.0, 0.0)


def test_text_survives_its_files() -> None:
    config = configure(
        ngrams=2, attribute_field="attributes", auxiliary_field="fine", pooling="max"
    )
    records = make_records(60, seed=0)
    task = fit_task(config, records)
    model = task.build_model().eval()
    files = task.text_files()
    assert set(files) <= set(bundle_format.TEXT_FILES)
    again = ClassificationTask(config, ClassificationTask.load_text(config, files))
    assert again.text_files() == files
    other = again.build_model().eval()
    other.load_state_dict(model.state_dict())
    texts = again.golden_inputs(records)
    with torch.no_grad():
        assert again.golden_outputs(other, texts) == task.golden_outputs(model, texts)
    assert len(texts) == 3
    with pytest.raises(TypeError, match="must be texts"):
        task.golden_outputs(model, [3])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "features.json must be JSON"),
        (b'{"format": 2}', "must have format 1; found"),
        (b'{"format": 1, "multi_label": 1}', "valid 'multi_label'; found 1"),
    ],
)
def test_bad_files_are_reported(content: bytes, message: str) -> None:
    config = configure()
    files = fit_task(config, make_records(20, seed=0)).text_files()
    with pytest.raises(BundleError, match=message):
        ClassificationTask.load_text(config, {**files, "features.json": content})
    counts = files["features.json"].replace(b'"label_counts": [', b'"label_counts": [1, ')
    with pytest.raises(BundleError, match=r"must count the 2 labels.*found 3 counts"):
        ClassificationTask.load_text(config, {**files, "features.json": counts})


def test_bad_records_are_reported_with_their_line() -> None:
    records = make_records(20, seed=0)
    task = fit_task(configure(), records)
    wrong = Record(Path("dev.jsonl"), 7, {"text": "a", "label": "weather"})
    with pytest.raises(DataError, match=r"dev.jsonl line 7 must have a label.*found 'weather'"):
        task.encode([wrong])
    for names in ([], ["sport", "money"]):
        wrong = Record(Path("dev.jsonl"), 9, {"text": "a", "label": names})
        with pytest.raises(DataError, match=f"line 9 must have one label.*found {len(names)}"):
            task.encode([wrong])
    off = fit_task(configure(multi_label="off"), records)
    wrong = Record(Path("dev.jsonl"), 8, {"text": "a", "label": ["sport", "money"]})
    with pytest.raises(DataError, match=r"line 8 must have one label.*found 2 labels"):
        off.encode([wrong])
    with pytest.raises(DataError, match="at least 2 labels; found 1 in 2 examples"):
        fit_task(configure(), records_of(*({"text": "a", "label": 1} for _ in range(2))))
    with pytest.raises(DataError, match="must have attributes; found none in the field 'facts'"):
        fit_task(configure(attribute_field="facts", pooling="max"), records)


def test_texts_without_words_are_an_error() -> None:
    with pytest.raises(DataError, match="must have words; found none in 2 examples"):
        fit_task(configure(), records_of({"text": " ", "label": 1}, {"text": "", "label": 0}))


def test_an_empty_label_is_learned_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    records = records_of({"text": "a", "label": ""}, {"text": "b", "label": "x"})
    assert fit_task(configure(), records).text.labels.names == ("", "x")
    assert "1 of 2 training examples have an empty label" in caplog.text


def test_labels_that_differ_in_white_space_only_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = [{"text": "a", "label": "x"}, {"text": "b", "label": " x"}]
    fit_task(configure(), records_of(*records, {"text": "c", "label": "very good"}))
    assert "labels that differ in white space only are learned as" in caplog.text
    assert "different ones: ' x' and 'x'; write them alike" in caplog.text


def test_many_labels_have_fewer_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most frequent: each has a weight for every label."""
    monkeypatch.setattr(classification_preprocessor, "MAX_NGRAM_WEIGHTS", 12)
    records = records_of(*({"text": f"a b c {at} d{at}", "label": str(at)} for at in range(4)))
    task = fit_task(configure(ngrams=1, ngram_min_count=1), records)
    assert task.text.ngrams is not None
    assert len(task.text.ngrams) - 1 == 3
    assert len(task.text.ngrams.count(["a", "b", "c"]).ids) == 3


def test_subwords_are_rejected() -> None:
    config = configure().replace(text={"tokenizer": "bpe"})
    with pytest.raises(ConfigError, match=r"words, characters or bytes.*found bpe"):
        fit_task(config, make_records(20, seed=0))


@pytest.mark.parametrize("tokenizer", ["characters", "bytes"])
def test_characters_and_bytes_are_tokens_too(tokenizer: str) -> None:
    config = configure().replace(text={"tokenizer": tokenizer, "lowercase": False})
    records = records_of({"text": "好 书", "label": 1}, {"text": "坏书", "label": 0})
    task = fit_task(config, records)
    store = task.encode(records)
    length = 3 if tokenizer == "characters" else 7
    assert store.lengths("words")[0] == length - (tokenizer == "characters")
    assert 3 not in store.sequence("words", 0)  # <unk>
    assert task.text.labels.names == ("0", "1")


def test_word_vectors_start_the_embeddings(tmp_path: Path) -> None:
    tuned, frozen = tmp_path / "tuned.txt", tmp_path / "frozen.txt"
    tuned.write_text("goal 1 2 3\nbank 4 5 6\n")
    frozen.write_text("goal 7 8\n")
    config = configure(vectors=(str(tuned),), frozen_vectors=(str(frozen),))
    task = fit_task(config, make_records(60, seed=0))
    model = task.build_model()
    assert model.embedding is not None
    goal = task.text.vocabulary.id("goal")
    assert model.embedding.tables[0][goal].tolist() == [1, 2, 3]
    assert model.embedding.frozen_tables[0][goal].tolist() == [7, 8]
    assert len(model.embedding.tables) == 1
    with_own = configure(vectors=(str(tuned),)).replace(model={"embedding_width": 5})
    model = fit_task(with_own, make_records(60, seed=0)).build_model()
    assert model.embedding is not None
    assert [table.size(1) for table in model.embedding.tables] == [5, 3]
    # A loaded model needs no file.
    tuned.unlink()
    files = task.text_files()
    loaded = ClassificationTask(config, ClassificationTask.load_text(config, files))
    loaded.build_model().load_state_dict(task.build_model().state_dict())
    assert "2 words with vectors, 1 words with vectors" in task.describe()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("classify", [{}, {"pooling": "labels"}, {"pooling": "none", "ngrams": 1}])
def test_a_new_model_predicts_the_frequencies_of_the_labels(
    classify: dict[str, Any], several: bool
) -> None:
    names = [["a"], ["a", "b"], ["a"], []] if several else ["a", "a", "a", "b"]
    records = records_of(*({"text": f"w{n}", "label": name} for n, name in enumerate(names)))
    task = fit_task(configure(**classify), records)
    model = task.build_model()
    for layer in (model.output, model.label_output):
        if layer is not None:
            torch.nn.init.zeros_(layer.weight)
    with torch.no_grad():
        batch = task.collate(task.encode(records), np.arange(4))
        found = task.probabilities(task.forward(model, batch).logits.numpy())[0]
    # (n + 1/2) / (N + 1): three and one of four examples
    np.testing.assert_allclose(found, [3.5 / 5, 1.5 / 5], rtol=1e-5)


def test_label_attention_finds_the_words_of_label_names() -> None:
    lines = [
        {"text": "Palm oil and copra rose", "label": ["palm-oil", "copra"]},
        {"text": "copra fell", "label": ["copra"]},
        {"text": "crude oil fell", "label": ["crude_xy"]},
    ]
    records = records_of(*lines)
    task = fit_task(configure(pooling="labels", label_names=True), records)
    assert task.text.labels.names == ("copra", "crude_xy", "palm-oil")
    model = task.build_model()
    batch = task.collate(task.encode(records), np.arange(3))
    whole = model.names(batch.words).whole
    # No text has the word "xy", so the name crude_xy is never found.
    assert whole.tolist() == [[True, False, True], [True, False, False], [False, False, False]]
    model.eval()
    with torch.no_grad():
        before = task.forward(model, batch).logits
        model.label_output.name_weights[0] += 1.0
        change = task.forward(model, batch).logits - before
    torch.testing.assert_close(change, whole.float())


def test_labels_of_held_out_examples_are_known(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    lines = [{"text": f"w{n}", "label": "rare" if n == 9 else "ab"[n % 2]} for n in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = configure().replace(data={"train": str(path)})
    every = list(read_records([path]))
    task = fit_task(config, [record for n, record in enumerate(every, 1) if n % 10])
    assert task.text.labels.names == ("a", "b", "rare")
    assert task.text.label_counts == (10, 8, 0)
    assert task.text.examples == 18
    assert len(task.encode([every[9]])) == 1
    given = config.replace(data={"valid": str(path)})
    assert fit_task(given, every[:4]).text.labels.names == ("a", "b")


def test_an_unknown_word_of_a_text_is_not_the_unknown_word_of_a_label_name() -> None:
    lines = [
        {"text": "crude oil fell", "label": ["crude_xy"]},
        {"text": "copra fell", "label": ["copra"]},
    ]
    task = fit_task(configure(pooling="labels", label_names=True), records_of(*lines))
    model = task.build_model()
    unseen = records_of({"text": "crude zzz fell", "label": ["crude_xy"]})
    batch = task.collate(task.encode(unseen), np.arange(1))
    assert UNK in batch.words
    assert model.names(batch.words).whole.tolist() == [[False, False]]


def test_a_label_of_all_examples_keeps_a_weight() -> None:
    labels = (["every", "some"], ["every"], ["every"], ["every"])
    records = records_of(*({"text": "w", "label": names} for names in labels))
    weights = fit_task(configure(class_weights="balanced"), records)._class_weights
    assert weights is not None
    assert weights.tolist() == pytest.approx([1 / 4, 3.0])


def test_branches_have_losses_of_their_own_in_training_only() -> None:
    records = make_records(20, seed=0)
    losses = []
    for weight in (0.5, 0.0):
        task = fit_task(configure(ngrams=1, branch_loss=weight, pooling="max"), records)
        torch.manual_seed(0)
        model = task.build_model()
        batch = task.collate(task.encode(records), np.arange(6))
        losses.append(
            [float(task.loss(each(), batch).total.detach()) for each in (model.train, model.eval)]
        )
    assert losses[0][0] > losses[1][0]
    assert losses[0][1] == pytest.approx(losses[1][1])


def test_class_weights_follow_the_model_to_another_device() -> None:
    task = fit_task(configure(class_weights="balanced"), make_records(20, seed=0))
    on_cpu = task._weights_on(torch.device("cpu"))
    assert on_cpu is not None
    assert task._weights_on(torch.device("cpu")) is on_cpu
    moved = task._weights_on(torch.device("meta"))
    assert moved is not None
    assert moved.device.type == "meta"


def test_a_probability_equal_to_its_threshold_is_chosen() -> None:
    task = fit_task(configure(), make_records(20, seed=0, several=True))
    count = len(task.text.labels)
    probabilities = np.full((1, count), 0.5, np.float32)
    thresholds = np.full(count, 0.5, np.float32)
    thresholds[0] = np.nextafter(np.float32(0.5), np.float32(1))
    assert task.decide(probabilities, thresholds).tolist() == [[False, *[True] * (count - 1)]]


def test_golden_texts_are_cut_to_the_limit_of_a_bundle() -> None:
    record = Record(Path("x.jsonl"), 1, {"text": "word " * 100_000, "label": "a"})
    task = fit_task(configure(), make_records(20, seed=0))
    [text] = task.golden_inputs([record])
    assert 0 < len(text) <= MAX_GOLDEN_CHARACTERS
    assert text == ("word " * 100_000)[: len(text)]
