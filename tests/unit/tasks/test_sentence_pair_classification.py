"""The sentence-pair task: fields, flags, one sequence, losses and metrics."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.config import Config, DataConfig, ModelConfig, TextConfig, TrainConfig
from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.data.labeled_records import Record
from dragoman.errors import BundleError, ConfigError, DataError
from dragoman.models.sentence_pair_classifier import (
    EXACT_MATCH,
    SECOND_SENTENCE,
    STEM_MATCH,
    PairOutput,
)
from dragoman.ops import IGNORE_INDEX
from dragoman.tasks.sentence_pair_classification import (
    PairsTask,
    _ranks,
    correlation,
    expected_score,
    score_divergence,
)
from dragoman.text.special_tokens import EOS
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import QuietProgress

ROWS = (
    ("A man plays", "A man is playing", "entailment", 4.6),
    ("A dog sleeps", "The dog runs", "contradiction", 2.5),
    ("Two kids", "A woman", "neutral", 1),
)


def config_of(**pairs) -> Config:
    return Config(
        task="pairs",
        text=TextConfig(tokenizer="words", lowercase=True),
        data=DataConfig(max_length=20),
        model=ModelConfig(
            encoder=("bilstm",), width=8, heads=2, ffn_width=8, dropout=0.0, positions="none"
        ),
        pairs=PairsConfig(**{"classifier_width": 6, "match_features": True, **pairs}),
        train=TrainConfig(label_smoothing=0.0),
    )


def record_of(number: int = 1, **fields) -> Record:
    return Record(Path("pairs.jsonl"), number, fields)


def records() -> list[Record]:
    return [
        record_of(number, a=a, b=b, label=label, relatedness=score)
        for number, (a, b, label, score) in enumerate(ROWS, 1)
    ]


def task_of(*rows: Record, **pairs) -> PairsTask:
    config = config_of(**pairs)
    return PairsTask(config, PairsTask.fit_text(config, lambda: iter(rows or records())))


def evaluate(task, model, store):
    with torch.no_grad():
        return task.evaluate(
            model.eval(),
            store,
            device=torch.device("cpu"),
            precision=Precision(torch.float32, ""),
            progress=QuietProgress(),
        )


def test_words_labels_and_scores_are_found():
    task = task_of()
    assert task.text.labels.names == ("contradiction", "entailment", "neutral")
    assert task.text.has_scores
    assert "playing" in task.text.words
    assert task.describe() == "16 words, 3 labels, scores from 1 to 5"
    store = task.encode(records())
    assert store.values["label"].tolist() == [1, 0, 2]
    assert store.values["score"].tolist() == pytest.approx([4.6, 2.5, 1.0])


def test_fields_have_usual_names_or_those_of_the_settings():
    rows = [
        record_of(premise="one", hypothesis="two", gold_label="x", extra=1),
        record_of(premise="one", hypothesis="two", gold_label="y", extra=2),
    ]
    task = task_of(*rows)
    assert not task.text.has_scores
    assert np.isnan(task.encode(rows).values["score"]).all()
    task = task_of(*rows, first_field="hypothesis", second_field="1", score_field="extra")
    assert task.encode(rows).values["score"].tolist() == [1.0, 2.0]


def test_labels_may_be_booleans():
    task = task_of(record_of(a="x", b="y", label=True), record_of(a="x", b="z", label=False))
    assert task.text.labels.names == ("false", "true")


def test_a_named_field_that_no_training_pair_has_is_an_error():
    with pytest.raises(DataError, match=r"line 3 must have the field 'lable' of pairs.label_field"):
        task_of(label_field="lable")
    with pytest.raises(
        DataError, match=r"of pairs.score_field.* found a, b, label, rel.*; did you mean relatedne"
    ):
        task_of(score_field="relatednes")


@pytest.mark.parametrize("field", ["label", "relatedness"])
@pytest.mark.parametrize("without", [1, 2])
def test_a_pair_without_the_target_of_others_is_an_error(field, without):
    rows = records()
    rows[without - 1] = rows[without - 1]._replace(
        fields={name: value for name, value in rows[without - 1].fields.items() if name != field}
    )
    message = rf"pairs\.jsonl line {without} must have a field '{field}'.*; found a, b, "
    with pytest.raises(DataError, match=message):
        task_of(*rows).encode(rows)
    with pytest.raises(DataError, match=message):
        task_of().encode(rows)


def test_files_may_have_different_targets():
    rows = [
        *records(),
        *(Record(Path("other.jsonl"), 1, {"a": "x", "b": "y", "score": score}) for score in (1, 2)),
    ]
    store = task_of(*rows).encode(rows)
    assert store.values["label"].tolist() == [1, 0, 2, IGNORE_INDEX, IGNORE_INDEX]


def test_flags_mark_words_of_the_other_sentence():
    task = task_of()
    pair = task.encode_pair("A man plays", "A man is playing")
    both = EXACT_MATCH | STEM_MATCH
    assert pair.flags == ([both, both, STEM_MATCH], [both, both, 0, STEM_MATCH])
    assert task_of(match_features=False).encode_pair("A man", "A").flags == ([0, 0], [0])
    assert task.encode_pair("", " ").tokens == ([EOS], [EOS])


def test_one_sequence_has_the_first_sentence_an_end_and_the_second():
    task = task_of(interaction="sequence", swap=True)
    store = task.encode(records())
    batch = task.collate(store, np.array([2, 0]))
    ids = task.text.words.ids
    kids, man = ids(["two", "kids"]), ids(["a", "man", "plays"])
    assert batch.token_ids.shape == (2, 1, 8)
    assert batch.token_ids[0, 0].tolist() == [*kids, EOS, *ids(["a", "woman"]), 0, 0, 0]
    assert batch.token_ids[1, 0, :4].tolist() == [*man, EOS]
    assert batch.flags[0, 0].tolist() == [0, 0, 0, SECOND_SENTENCE, SECOND_SENTENCE, 0, 0, 0]
    assert batch.lengths.tolist() == [[5], [8]]
    assert (batch.tokens, batch.padded_tokens) == (13, 16)


def test_swapped_copies_have_scores_and_no_labels():
    task = task_of(interaction="sequence", swap=True)
    store = task.encode(records())
    batch = task.collate(store, np.array([0, 1]), training=True)
    assert batch.labels.tolist() == [1, 0, IGNORE_INDEX, IGNORE_INDEX]
    assert batch.scores.tolist() == pytest.approx([4.6, 2.5] * 2)
    first, second = (task.text.words.ids(ROWS[0][side].lower().split()) for side in (0, 1))
    assert batch.token_ids[2, 0, : len(first) + len(second) + 1].tolist() == [*second, EOS, *first]
    loss = task.loss(task.build_model(), batch)
    assert float(loss.count) == 2
    assert len(task.collate(store, np.array([0, 1]))) == 2


def test_the_score_of_a_pair_is_the_mean_over_both_orders():
    task = task_of(interaction="sequence", swap=True, score_weight=3.0)
    batch = task.collate(task.encode(records()), np.array([0, 1]), training=True)
    torch.manual_seed(0)
    model = task.build_model()
    output = model(batch.token_ids, batch.flags, batch.lengths)
    scores = score_divergence(output.score, batch.scores, 1).view(2, 2)
    assert not torch.allclose(scores[0], scores[1])
    labels = torch.nn.functional.cross_entropy(output.labels[:2], batch.labels[:2], reduction="sum")
    loss = task.loss(model, batch)
    torch.testing.assert_close(loss.nll, labels.detach())
    torch.testing.assert_close(loss.total, labels + 3.0 * scores.mean(dim=0).sum())


def test_score_splits_its_probability_between_adjacent_integers():
    logits = torch.randn(3, 5)
    scores = torch.tensor([4.6, 1.0, math.nan])
    log_probs = logits.log_softmax(1)
    first = 0.4 * (math.log(0.4) - log_probs[0, 3]) + 0.6 * (math.log(0.6) - log_probs[0, 4])
    found = score_divergence(logits, scores, 1)
    torch.testing.assert_close(found, torch.stack([first, -log_probs[1, 0], torch.tensor(0.0)]))
    expected = sum((index + 1) * log_probs[0, index].exp() for index in range(5))
    torch.testing.assert_close(expected_score(logits, 1)[0], expected)


def test_correlations_are_those_of_numpy():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=50), generator.integers(0, 5, 50).astype(float)
    assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert correlation(x, np.ones(50)) == 0.0
    assert _ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]


@pytest.mark.parametrize("interaction", ["co_attention", "decomposable", "none", "sequence"])
def test_loss_is_a_sum_and_evaluation_a_mean_over_pairs(interaction):
    task = task_of(interaction=interaction)
    store = task.encode(records())
    torch.manual_seed(0)
    model = task.build_model().eval()
    with torch.no_grad():
        whole = task.loss(model, task.collate(store, np.arange(3)))
        parts = [task.loss(model, task.collate(store, np.array([row]))) for row in range(3)]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    torch.testing.assert_close(sum(part.nll for part in parts), whole.nll)
    found = evaluate(task, model, store)
    assert found["loss"] == pytest.approx(float(whole.total) / 3, rel=1e-4)
    assert set(found) == {"loss", "accuracy", "pearson", "spearman", "mse"}
    assert [score.name for score in task.scores(found)] == [
        "accuracy",
        "pearson",
        "spearman",
        "mse",
    ]


def test_the_error_of_scores_is_in_their_range():
    """Equal logits of the bins 1 to 5 predict 3, for the scores 4.6, 2.5 and 1."""
    task = task_of()
    model = task.build_model()
    model.forward = lambda ids, *_: PairOutput(torch.zeros(len(ids), 3), torch.zeros(len(ids), 5))
    found = evaluate(task, model, task.encode(records()))
    assert found["mse"] == pytest.approx((1.6**2 + 0.5**2 + 2.0**2) / 3, rel=1e-5)


@pytest.mark.parametrize("interaction", ["co_attention", "sequence"])
@pytest.mark.parametrize("pair", [("A man", " "), ("", "A man")])
def test_a_pair_without_words_has_no_label_and_no_score_in_an_evaluation(interaction, pair):
    task = task_of(interaction=interaction)
    torch.manual_seed(0)
    model = task.build_model().eval()
    guess = torch.tensor(task.golden_outputs(model, [pair])[0][0]).argmax()
    fields = {"label": task.text.labels.names[guess], "relatedness": 5}
    empty = [record_of(number, a=pair[0], b=pair[1], **fields) for number in (4, 5, 6)]
    plain = evaluate(task, model, task.encode(records()))
    found = evaluate(task, model, task.encode([*records(), *empty]))
    assert found["accuracy"] == pytest.approx(plain["accuracy"] / 2)
    for name in ("pearson", "spearman", "mse"):
        assert found[name] == pytest.approx(plain[name], rel=1e-3)
    alone = evaluate(task, model, task.encode(empty))
    assert set(alone) == {"loss", "accuracy"}
    assert alone["accuracy"] == 0.0


def test_labels_or_scores_may_be_missing():
    only_scores = [record_of(a="x", b="y", relatedness=2), record_of(a="z", b="y", relatedness=4)]
    task = task_of(*only_scores)
    model = task.build_model()
    loss = task.loss(model, task.collate(task.encode(only_scores), np.arange(2)))
    loss.total.backward()
    assert set(evaluate(task, model, task.encode(only_scores))) == {
        "loss",
        "pearson",
        "spearman",
        "mse",
    }
    full = task_of()
    assert set(evaluate(full, full.build_model(), full.encode([record_of(a="x", b="y")]))) == {
        "loss"
    }


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"a": "x", "b": "y", "label": "other", "relatedness": 2}, "other"),
        ({"a": "x", "b": "y", "label": "neutral", "relatedness": 9}, "9"),
        ({"a": "x", "b": "y", "label": "neutral", "relatedness": "high"}, "'high'"),
        ({"a": ["x"], "b": "y", "label": "neutral", "relatedness": 2}, '["x"]'),
    ],
)
def test_a_bad_record_is_named_with_its_line(fields, found):
    with pytest.raises(DataError, match=r"pairs\.jsonl line 7 must have") as caught:
        task_of().encode([record_of(7, **fields)])
    assert caught.value.found == found


def test_records_without_targets_or_with_one_label_are_errors():
    with pytest.raises(DataError, match="found neither"):
        task_of(record_of(a="x", b="y"))
    with pytest.raises(DataError, match="found only the label 'n'"):
        task_of(record_of(a="x", b="y", label="n"))
    with pytest.raises(DataError, match="the fields of both sentences must be known"):
        task_of(record_of(a="x", label="n"))
    config = config_of()
    with pytest.raises(DataError, match="at least one sentence pair"):
        PairsTask.fit_text(config, lambda: iter(()))
    with pytest.raises(ConfigError, match=r"need text\.tokenizer=words; found bpe"):
        PairsTask.fit_text(config.replace(text={"tokenizer": "bpe"}), lambda: iter(records()))


def test_settings_that_contradict_each_other_are_errors():
    assert "found none; set pairs.swap=false" in " ".join(
        PairsConfig(swap=True, interaction="none").problems()
    )
    assert "found 5 and 5" in " ".join(PairsConfig(min_score=5).problems())
    assert "must differ" in " ".join(PairsConfig(first_field="x", second_field="x").problems())


def test_text_files_read_back_and_bad_ones_are_errors():
    task = task_of()
    read = PairsTask.load_text(task.config, task.text_files())
    assert read.words.tokens == task.text.words.tokens
    assert read.labels.names == task.text.labels.names
    assert read.has_scores
    files = {**task.text_files(), "features.json": b"[]"}
    with pytest.raises(BundleError, match="must have true or false in 'scores'"):
        PairsTask.load_text(task.config, files)


def test_golden_outputs_are_log_probabilities():
    task = task_of()
    model = task.build_model().eval()
    inputs = task.golden_inputs(records())
    assert inputs[0] == [ROWS[0][0], ROWS[0][1]]
    outputs = task.golden_outputs(model, inputs)
    assert json.loads(json.dumps(outputs)) == outputs
    assert all(math.exp(part[0]) < 1 and len(part) in (3, 5) for row in outputs for part in row)
    assert sum(map(math.exp, outputs[0][0])) == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(TypeError, match="two texts; found 1"):
        task.golden_outputs(model, [[1, "x"]])


def test_labels_are_smoothed_in_training_only():
    plain = task_of()
    smoothed = PairsTask(plain.config.replace(train={"label_smoothing": 0.3}), plain.text)
    torch.manual_seed(1)
    model, store = plain.build_model(), plain.encode(records())
    assert evaluate(smoothed, model, store) == evaluate(plain, model, store)
    batch = plain.collate(store, np.arange(len(store)))
    assert smoothed.loss(model, batch).total.item() != plain.loss(model, batch).total.item()


def test_lengths_of_one_sequence_count_the_end_between_its_sentences():
    task = task_of(interaction="sequence")
    store = task.encode(records())
    batch = task.collate(store, np.arange(len(store)))
    assert task.lengths(store).tolist() == batch.counts[:, 0].tolist()
    apart = task_of()
    both = apart.collate(apart.encode(records()), np.arange(len(store)))
    assert apart.lengths(apart.encode(records())).tolist() == both.counts.max(axis=1).tolist()
