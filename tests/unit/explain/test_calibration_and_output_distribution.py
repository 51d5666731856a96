"""Statistics against sacreBLEU, plain loops over the model's numbers, and the evaluation."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from sacrebleu.metrics.bleu import BLEU

from dragoman.config import ModelConfig, read_config
from dragoman.data.labeled_records import Record
from dragoman.errors import DataError
from dragoman.evaluate.bleu_by_length import score_by_length
from dragoman.evaluate.classification_metrics import expected_calibration_error
from dragoman.explain import calibration_and_output_distribution
from dragoman.explain.calibration_and_output_distribution import (
    measure_documents,
    measure_pairs,
    measure_predictions,
    measure_text,
    reliability_bins,
    smoothed_target,
)
from dragoman.explain.evaluation_plots import Calibration
from dragoman.models.factory import build_model
from dragoman.models.language_model import LanguageDropout, build_language_model
from dragoman.ops.fused_linear_cross_entropy import linear_cross_entropy_reference
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.sentence_pair_classification import PairsTask
from dragoman.text.special_tokens import BOS, EOS
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import QuietProgress
from tests import classify_kit, language_kit, tagging_kit


def corpus(count: int = 200) -> tuple[list[str], list[str], list[str]]:
    draw = random.Random(0)
    words = [f"w{number}" for number in range(30)]
    sources = [" ".join(draw.choices(words, k=draw.randint(1, 25))) for _ in range(count)]
    references = [text.upper() for text in sources]
    hypotheses = [
        " ".join(word if draw.random() < 0.8 else "X" for word in text.split())
        for text in references
    ]
    return sources, hypotheses, references


def test_each_bucket_has_the_score_of_its_sentences() -> None:
    sources, hypotheses, references = corpus()
    found = score_by_length(sources, hypotheses, references, BLEU(), samples=50)
    assert found.unit == "words"
    assert sum(bucket.sentences for bucket in found.buckets) == len(sources)
    assert len(found.buckets) == 6
    for bucket, following in zip(found.buckets, found.buckets[1:], strict=False):
        assert bucket.longest < following.shortest
    for bucket in found.buckets:
        rows = [
            at
            for at, text in enumerate(sources)
            if bucket.shortest <= len(text.split()) <= bucket.longest
        ]
        assert bucket.sentences == len(rows)
        expected = sacrebleu.corpus_bleu(
            [hypotheses[at] for at in rows], [[references[at] for at in rows]]
        ).score
        assert bucket.bleu == pytest.approx(expected)
        assert bucket.low <= expected <= bucket.high


def test_scripts_without_spaces_count_characters() -> None:
    texts = ["年月日" * (1 + at % 9) for at in range(60)]
    found = score_by_length(texts, texts, texts, BLEU(tokenize="zh"), samples=10)
    assert found.unit == "characters"
    assert found.buckets[-1].longest == 27
    assert found.buckets[-1].bleu == pytest.approx(100.0)


def test_korean_has_spaces_and_counts_words() -> None:
    texts = [" ".join(["번역은"] * (1 + at % 9)) for at in range(60)]
    found = score_by_length(texts, texts, texts, BLEU(tokenize="char"), samples=10)
    assert found.unit == "words"
    assert found.buckets[-1].longest == 9


def test_few_sentences_are_one_bucket() -> None:
    [bucket] = score_by_length(["a b"], ["a b"], ["a b"], BLEU(), samples=10).buckets
    assert (bucket.shortest, bucket.longest, bucket.sentences) == (2, 2, 1)
    with pytest.raises(DataError, match="found 1 and 2"):
        score_by_length(["a", "b"], ["a"], ["a", "b"], BLEU())


PAIRS = [([5, 6, 7], [8, 9]), ([5], [10, 11, 12, 13]), ([9, 9], [7])]


def tiny_config(**changes) -> ModelConfig:
    sizes = {"width": 16, "heads": 2, "ffn_width": 32}
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = tiny_config(encoder=("transformer",), decoder=("transformer",))
    return build_model(config, src_vocab_size=20, tgt_vocab_size=20).eval()


@torch.no_grad()
def loop(model) -> list[tuple[torch.Tensor, int]]:
    """Return each position's distribution and reference, one sentence at a time."""
    found = []
    for src, tgt in PAIRS:
        logits = model(torch.tensor([[*src, EOS]]), torch.tensor([[BOS, *tgt]]))[0]
        found += list(zip(logits.double().softmax(-1), [*tgt, EOS], strict=True))
    return found


def test_every_token_is_measured_as_in_a_plain_loop(model) -> None:
    found = measure_pairs(model, PAIRS)
    expected = loop(model)
    assert len(found.right) == len(expected) == sum(len(tgt) + 1 for _, tgt in PAIRS)
    # Batches are sorted by length, so the values are compared as multisets.
    np.testing.assert_allclose(
        np.sort(found.confidence), np.sort([float(p.max()) for p, _ in expected]), atol=1e-6
    )
    np.testing.assert_allclose(
        np.sort(found.reference), np.sort([float(p[t]) for p, t in expected]), atol=1e-6
    )
    assert found.right.sum() == sum(int(p.argmax()) == t for p, t in expected)
    mean = torch.stack([p.sort(descending=True).values for p, _ in expected]).mean(0)
    np.testing.assert_allclose(found.sorted_mean, mean.numpy(), atol=1e-6)
    assert found.sorted_mean.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("most", [4, 5])
def test_the_number_of_tokens_is_bounded(model, monkeypatch, most: int) -> None:
    monkeypatch.setattr(calibration_and_output_distribution, "MAX_TOKENS", most)
    monkeypatch.setattr(calibration_and_output_distribution, "_MAX_LOGITS", 40)  # of two tokens
    assert len(measure_pairs(model, PAIRS * 9).right) == most


def test_tokens_are_measured_in_the_order_of_the_pairs(model, monkeypatch) -> None:
    short, long = [([5, 6], [8, 9]), ([7], [10, 11]), ([9, 9], [7, 7])], [([5] * 10, [6] * 10)]
    expected = measure_pairs(model, short)
    monkeypatch.setattr(calibration_and_output_distribution, "_BATCH_TOKENS", 12)
    monkeypatch.setattr(calibration_and_output_distribution, "MAX_TOKENS", 9)
    found = measure_pairs(model, [*short, *long])
    assert len(found.reference) == 9
    np.testing.assert_allclose(np.sort(found.reference), np.sort(expected.reference), atol=1e-6)


def test_language_models_read_segments(monkeypatch) -> None:
    torch.manual_seed(4)
    config = tiny_config(encoder=(), decoder=("transformer",))
    model = build_language_model(
        config, vocab_size=20, max_distance=0, dropout=LanguageDropout()
    ).eval()
    documents = [[5, 6, 7, 8, 9], [10, 11]]
    found = measure_documents(model, documents, segment=3)
    rows = [([BOS, 5, 6], [5, 6, 7]), ([7, 8], [8, 9]), ([BOS, 10], [10, 11])]
    with torch.no_grad():
        expected = [
            float(p[t])
            for inputs, targets in rows
            for p, t in zip(model(torch.tensor([inputs]))[0].softmax(-1), targets, strict=True)
        ]
    np.testing.assert_allclose(found.reference, expected, atol=1e-6)


def test_the_calibration_error_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(500)
    right = rng.random(500) < confidence**2
    total = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = [at for at in range(500) if low < confidence[at] <= high]
        if inside:
            accuracy = sum(bool(right[at]) for at in inside) / len(inside)
            mean = sum(float(confidence[at]) for at in inside) / len(inside)
            total += len(inside) / 500 * abs(accuracy - mean)
    run = Calibration("model", confidence, right, "tokens")
    assert run.error == pytest.approx(total)
    assert run.error == pytest.approx(expected_calibration_error(confidence, right))
    bins = reliability_bins(confidence, right)
    assert sum(each.predictions for each in bins) == 500
    assert sum(
        each.predictions / 500 * abs(each.accuracy - each.confidence) for each in bins
    ) == pytest.approx(total)


def test_the_smoothed_target_is_that_of_the_loss() -> None:
    """Cross-entropy against the target equals the loss that training minimizes."""
    target = smoothed_target(10, 0.1)
    assert target.sum() == pytest.approx(1.0)
    hidden, weight = torch.randn(1, 4), torch.randn(10, 4)
    loss = linear_cross_entropy_reference(
        hidden, weight, None, torch.tensor([3]), smoothing=0.1
    ).loss
    log_probs = (hidden @ weight.T).log_softmax(-1)[0]
    order = [3, *(at for at in range(10) if at != 3)]
    assert -sum(target[at] * float(log_probs[each]) for at, each in enumerate(order)) == (
        pytest.approx(float(loss), abs=1e-5)
    )
    assert smoothed_target(4, 0.0).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert math.isclose(smoothed_target(4, 0.3)[1], 0.1)


def evaluate(task, model, store) -> dict[str, float]:
    with torch.no_grad():
        return task.evaluate(
            model,
            store,
            device=torch.device("cpu"),
            precision=Precision(torch.float32, "test"),
            progress=QuietProgress(),
        )


def test_calibration_of_labels_equals_the_evaluation() -> None:
    records = classify_kit.make_records(60, seed=0)
    task = classify_kit.fit_task(read_config(recipe="zhou2016", scale=mini), records)
    torch.manual_seed(0)
    model, store = task.build_model().eval(), task.encode(records)
    found = measure_predictions(task, model, store)
    assert found is not None
    metrics = evaluate(task, model, store)
    assert found.what == "labels"
    assert found.right.mean() == pytest.approx(metrics["accuracy"])
    error = expected_calibration_error(found.confidence, found.right)
    assert error == pytest.approx(metrics["calibration_error"], abs=1e-6)
    assert measure_text(task, model, store) is None


def test_texts_and_pairs_without_words_are_no_predictions() -> None:
    records = classify_kit.make_records(20, seed=0)
    task = classify_kit.fit_task(read_config(recipe="zhou2016", scale=mini), records)
    empty = [each._replace(fields={**each.fields, "text": " "}) for each in records[:5]]
    found = measure_predictions(task, task.build_model().eval(), task.encode([*records, *empty]))
    assert found is not None
    assert len(found.right) == len(found.confidence) == 20
    pairs = [
        Record(Path("x.jsonl"), number, {"a": "one man", "b": second, "label": label})
        for number, (second, label) in enumerate([("one", "x"), ("two", "y"), (" ", "x")], 1)
    ]
    config = read_config(recipe="chen2017", scale=mini)
    pairs_task = PairsTask(config, PairsTask.fit_text(config, lambda: iter(pairs)))
    model = pairs_task.build_model().eval()
    found = measure_predictions(pairs_task, model, pairs_task.encode(pairs))
    assert found is not None
    assert len(found.right) == len(found.confidence) == 2


def test_each_label_of_a_text_is_a_prediction_that_it_applies_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [["money"], ["money", "sport"], []]
    records = [
        Record(Path("x.jsonl"), number, {"text": "goal", "label": each})
        for number, each in enumerate(names, 1)
    ]
    task = classify_kit.fit_task(read_config(recipe="zhou2016", scale=mini), records)
    assert task.text.labels.names == ("money", "sport")
    probabilities = np.array([[0.9, 0.2], [0.4, 0.5], [0.7, 0.1]])
    logits = np.log(probabilities / (1 - probabilities)).astype(np.float32)
    monkeypatch.setattr(task, "logits", lambda *args, **options: logits)
    found = measure_predictions(task, task.build_model(), task.encode(records))
    assert found is not None
    np.testing.assert_allclose(found.confidence, [0.9, 0.8, 0.6, 0.5, 0.7, 0.9], rtol=1e-6)
    assert found.right.tolist() == [True, True, False, True, False, True]


def test_a_bin_includes_its_upper_end() -> None:
    confidence = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    right = np.array([True, False, False, True, True])
    low, high = reliability_bins(confidence, right, bins=2)
    assert low == (0.0, 0.5, 3, 0.25, pytest.approx(1 / 3))
    assert high == (0.5, 1.0, 2, 0.875, 1.0)


def test_tag_accuracy_equals_the_evaluation() -> None:
    records = tagging_kit.make_records(40)
    task = tagging_kit.make_task(records)
    for each in records[:10]:  # with a tag that training did not have
        each.fields["tags"] = ["B-NEW"] * len(each.fields["tokens"])
    torch.manual_seed(0)
    model, store = task.build_model().eval(), task.encode(records)
    found = measure_predictions(task, model, store)
    assert found is not None
    assert found.what == "tags"
    assert len(found.right) == sum(len(each.fields["tokens"]) for each in records)
    assert found.right.mean() == pytest.approx(evaluate(task, model, store)["accuracy"])
    assert ((found.confidence > 0) & (found.confidence <= 1)).all()


def test_a_language_model_is_measured_token_by_token() -> None:
    lines = language_kit.lines_of(12)
    task = language_kit.task_of(language_kit.config_of("transformer_xl"), lines)
    torch.manual_seed(0)
    model = task.build_model().eval()
    store = task.encode(language_kit.records_of(lines))
    found = measure_text(task, model, store)
    assert found is not None
    assert len(found.right) == len(task.stream(store).targets)
    predictions = measure_predictions(task, model, store)
    assert predictions is not None
    assert predictions.what == "tokens"
    assert predictions.right.tolist() == found.right.tolist()
