"""Checks of models of other tasks: they pass on a sound model and notice a broken one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tagging_kit import make_config, make_records

from dragoman.bundle import write_task_bundle
from dragoman.doctor import non_translation_model_checks
from dragoman.doctor.non_translation_model_checks import (
    TASK_CHECKS,
    TaskModelUnderTest,
    run_task_checks,
)
from dragoman.tasks.tagging import TaggingTask


@pytest.fixture
def subject(tmp_path):
    """Return a tiny tagger under test."""
    config, records = make_config(), make_records(40)
    task = TaggingTask(config, TaggingTask.fit_text(config, lambda: iter(records)))
    torch.manual_seed(0)
    write_task_bundle(
        tmp_path / "tagger",
        task=task,
        weights=task.build_model().state_dict(),
        golden=task.golden_inputs(records),
    )
    return TaskModelUnderTest(tmp_path / "tagger", device="cpu")


def verdicts(subject):
    return {each.name: each.verdict for each in run_task_checks(subject)}


def test_a_sound_model_passes_every_check(subject):
    assert verdicts(subject) == dict.fromkeys(TASK_CHECKS, "PASS")


def test_weights_that_are_not_finite_fail(subject):
    with torch.no_grad():
        next(subject.model.parameters()).flatten()[0] = float("nan")
    assert verdicts(subject)["finite weights"] == "FAIL"


def test_other_weights_fail_the_golden_vectors(subject):
    with torch.no_grad():
        for weight in subject.model.parameters():
            weight.add_(0.5)
    assert verdicts(subject)["golden vectors"] == "FAIL"


def test_a_model_that_mixes_batch_rows_fails(subject):
    def mix(module, inputs, output):
        return output + output.mean(dim=0, keepdim=True) if output.size(0) > 1 else output

    subject.model.register_forward_hook(mix)
    found = verdicts(subject)
    assert found["golden vectors"] == "PASS"
    assert found["batch independence"] == "FAIL"


def test_a_model_with_state_between_calls_fails(subject):
    calls = []

    def drift(module, inputs, output):
        calls.append(1)
        return output + 0.3 * len(calls) * torch.arange(output.size(-1))

    subject.model.register_forward_hook(drift)
    assert verdicts(subject)["repeatable"] == "FAIL"


def test_a_model_without_golden_inputs_skips(subject):
    subject.inputs = []
    subject.bundle.golden["cases"] = []
    found = verdicts(subject)
    assert found["golden vectors"] == found["batch independence"] == "SKIP"


def test_tolerances_are_those_of_the_documentation(subject):
    assert {each.name: each.tolerance for each in run_task_checks(subject)} == {
        "finite weights": 0,
        "vocabularies and labels": 0,
        "golden vectors": 1e-3,
        "batch independence": 1e-3,
        "repeatable": 0.0,
        "bfloat16": 0.1,
    }


def test_text_files_that_change_when_they_are_written_again_fail(subject, monkeypatch):
    written = []
    original = non_translation_model_checks.task_text_files

    def changing(task):
        written.append(task)
        return original(task) | ({"words.json": b"[]"} if len(written) > 1 else {})

    monkeypatch.setattr(non_translation_model_checks, "task_text_files", changing)
    [found] = [each for each in run_task_checks(subject) if each.name == "vocabularies and labels"]
    assert (found.verdict, found.error, found.note) == ("FAIL", 1, "words.json")


def test_the_log_probability_of_a_text_is_rounded_in_proportion():
    alone, half = ([{"log_prob": value, "tokens": 40}] for value in (-118.0, -118.2))
    subject = SimpleNamespace(
        device=torch.device("cpu"), inputs=["a"], single_outputs=alone, outputs=lambda inputs: half
    )
    found = non_translation_model_checks.check_bfloat16(subject)
    assert found.error == pytest.approx(0.2 / 118)
