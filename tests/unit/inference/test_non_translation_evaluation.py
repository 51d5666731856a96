"""Evaluation of models of other tasks: what is scored, counted, changed and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman._version import __version__
from dragoman.bundle import write_task_bundle
from dragoman.errors import ConfigError, DataError
from dragoman.inference.non_translation_evaluation import (
    TaskEvaluation,
    evaluate_task,
    override_settings,
)
from dragoman.tasks.non_translation_task import TaskScore
from tests.classifier_kit import reviews, train_classifier, write_classifier
from tests.task_models_kit import subject_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("models") / "flat", steps=60)


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    return path


def review_fields(count: int) -> list[dict[str, str]]:
    return [dict(each.fields) for each in reviews(count, seed=5)]


def test_examples_are_those_that_were_scored(model: Path, tmp_path: Path) -> None:
    path = write_records(tmp_path / "test.jsonl", review_fields(20))
    found = evaluate_task(model, [path], device="cpu")
    assert (found.task, found.examples, found.skipped) == ("classify", 20, {})
    assert found.loss is not None
    assert found.loss > 0
    assert all(each.signature.endswith(f"dragoman:{__version__}") for each in found.scores)
    assert [each.name for each in found.scores] == list(found.to_dict()["scores"])


def test_lines_that_were_left_out_are_counted(model: Path, tmp_path: Path) -> None:
    path = write_records(tmp_path / "test.jsonl", review_fields(20))
    path.write_text(path.read_text() + "{\n")
    found = evaluate_task(model, [path], device="cpu", overrides=["data.on_bad_line=skip"])
    assert (found.examples, found.skipped) == (20, {"bad line (test.jsonl 21)": 1})


def test_settings_of_the_task_and_of_data_may_be_changed(model: Path, tmp_path: Path) -> None:
    path = write_records(tmp_path / "test.jsonl", review_fields(30))
    plain = evaluate_task(model, [path], device="cpu")
    short = evaluate_task(model, [path], device="cpu", overrides=["data.max_length=4"])
    assert short.loss != pytest.approx(plain.loss)
    same = evaluate_task(model, [path], device="cpu", overrides=["classify.dropout=0.1"])
    assert same.loss == pytest.approx(plain.loss)
    with pytest.raises(ConfigError, match="a setting of classify or data in an evaluation; found "):
        evaluate_task(model, [path], device="cpu", overrides=["train.steps=1"])


@pytest.mark.parametrize("setting", ["classify.pooling=max", "classify.ngrams=1"])
def test_settings_that_need_other_weights_are_an_error(
    model: Path, tmp_path: Path, setting: str
) -> None:
    path = write_records(tmp_path / "test.jsonl", review_fields(2))
    with pytest.raises(ConfigError, match=f"must keep the architecture .* found {setting}; leave"):
        evaluate_task(model, [path], device="cpu", overrides=[setting])


@pytest.mark.parametrize(
    ("recipe", "setting", "trained"),
    [
        ("lee2019_max", "sets.problem=unique", "maximum"),
        ("devlin2019", "language.objective=causal", "masked"),
        ("lample2016", "tag.scheme=plain", "auto"),
    ],
)
def test_what_the_model_learned_cannot_be_changed(recipe: str, setting: str, trained: str) -> None:
    task = subject_of(recipe).predictor.task
    name, _, value = setting.partition("=")
    found = f"{name} must be that of training .* found {value} instead of {trained}; leave it out"
    with pytest.raises(ConfigError, match=found):
        override_settings(task, [setting])
    assert override_settings(task, [f"{name}={trained}"]).config == task.config


def test_a_threshold_that_is_set_replaces_tuned_ones(tmp_path: Path) -> None:
    task, model = train_classifier(steps=40, multi_label=True, tune_threshold="labels")
    bundle = tmp_path / "model"
    tuned = torch.tensor([0.0, 1.0, 1.0, 1.0])  # only the first label is predicted
    write_task_bundle(
        bundle,
        task=task,
        weights={**model.state_dict(), "thresholds": tuned},
        golden=task.golden_inputs(reviews(3, seed=9)),
    )
    fields = [dict(each.fields) for each in reviews(40, seed=5, multi_label=True)]
    path = write_records(tmp_path / "test.jsonl", fields)

    def recalls(*overrides: str) -> tuple[list[float], str]:
        found = evaluate_task(bundle, [path], device="cpu", overrides=overrides)
        (threshold,) = {
            part
            for each in found.scores
            for part in each.signature.split("|")
            if part.startswith("threshold:")
        }
        return [row["recall"] for row in found.rows], threshold

    assert recalls() == ([1.0, 0.0, 0.0, 0.0], "threshold:labels")
    assert recalls("data.max_length=9") == recalls(), "tuned thresholds stay the default"
    assert recalls("classify.tune_threshold=labels") == recalls()
    assert recalls("classify.threshold=0") == ([1.0] * 4, "threshold:0")
    assert recalls("classify.threshold=1") == ([0.0] * 4, "threshold:1")
    found, threshold = recalls("classify.tune_threshold=off")
    assert threshold == "threshold:0.5"
    assert (found, threshold) == recalls("classify.threshold=0.5")
    assert sum(found[1:]) > 0
    with pytest.raises(ConfigError, match="found global in the evaluation of a model with labels"):
        recalls("classify.tune_threshold=global")


def test_a_test_set_must_be_named_and_hold_examples(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluated on labelled files; found none"):
        evaluate_task(model, [], device="cpu")
    with pytest.raises(DataError):
        evaluate_task(model, [write_records(tmp_path / "test.jsonl", [])], device="cpu")


def test_the_speed_is_in_examples_per_second() -> None:
    found = TaskEvaluation(
        task="classify",
        scores=[TaskScore("accuracy", 0.5, "x")],
        loss=1.0,
        examples=30,
        unit="examples",
        seconds=4.0,
        skipped={},
        rows=[],
    ).to_dict()
    assert found["speed"] == {"seconds": 4.0, "examples_per_second": 7.5}
    assert "table" not in found
