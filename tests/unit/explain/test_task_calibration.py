"""Predictions of labels and tags: their accuracy and calibration are those of the evaluation."""

from __future__ import annotations

import pytest
import torch

from dragoman.config import read_config
from dragoman.evaluate.classification import expected_calibration_error
from dragoman.explain.model_statistics import measure_predictions, measure_text
from dragoman.recipes.mini import mini
from dragoman.training.mixed_precision import Precision
from dragoman.training.progress import QuietProgress
from tests import classify_kit, language_kit, tagging_kit


def evaluate(task, model, store) -> dict[str, float]:
    with torch.no_grad():
        return task.evaluate(
            model,
            store,
            device=torch.device("cpu"),
            precision=Precision(torch.float32, "test"),
            progress=QuietProgress(),
        )


def test_labels_are_calibrated_as_the_evaluation_says() -> None:
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


def test_tags_are_as_accurate_as_the_evaluation_says() -> None:
    records = tagging_kit.make_records(40)
    task = tagging_kit.make_task(records)
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
