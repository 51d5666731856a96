"""Bundles of tasks other than translation: round trip, golden vectors, damage, and loading with the
wrong class.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from tagging_kit import make_config, make_records

from dragoman.bundle import Bundle, TaskBundle, write_task_bundle
from dragoman.bundle.non_translation_bundle_loader import (
    check_task_golden,
    largest_difference,
    load_task_text,
    make_task_golden,
    task_text_files,
)
from dragoman.errors import BundleError, CorruptError
from dragoman.tasks.tagging import TaggingTask


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Write the bundle of a tiny tagger with random weights."""
    config, records = make_config(), make_records(40)
    task = TaggingTask(config, TaggingTask.fit_text(config, lambda: iter(records)))
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("bundle") / "tagger"
    write_task_bundle(
        path, task=task, weights=task.build_model().state_dict(), golden=task.golden_inputs(records)
    )
    return path


def test_a_bundle_loads_with_its_task_and_golden_vectors(bundle):
    loaded = TaskBundle.load(bundle)
    assert loaded.task.name == "tag"
    assert loaded.parameters == sum(each.numel() for each in loaded.model.parameters())
    assert len(loaded.golden_inputs()) == 3
    assert "task tag" in repr(loaded)
    assert (bundle / "card.md").read_text().startswith("---\nlibrary_name: dragoman")
    assert "manifest_sha256" not in loaded.manifest_fields()


def test_another_task_is_rejected_with_its_command(bundle):
    with pytest.raises(BundleError, match="must be a translation model; found a model of task tag"):
        Bundle.load(bundle)
    with pytest.raises(BundleError, match="must be a model of task classify; found"):
        TaskBundle.load(bundle, task="classify")


def test_changed_weights_are_noticed_by_the_golden_vectors(bundle):
    loaded = TaskBundle.load(bundle)
    model = loaded.model
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5)
    with pytest.raises(CorruptError, match="must have its recorded output; found"):
        check_task_golden(loaded.task, model, loaded.golden, "golden.json")


@pytest.mark.parametrize(
    ("golden", "found"),
    [
        ({"format": 9, "task": "tag", "cases": []}, "format 9"),
        ({"format": 1, "task": "sets", "cases": []}, "task 'sets'"),
        ({"format": 1, "task": "tag", "cases": [3]}, "format 1"),
        ({"format": 1, "task": "tag", "cases": [{"input": 5, "output": 1}]}, "found"),
    ],
)
def test_invalid_golden_files_are_rejected(bundle, golden, found):
    loaded = TaskBundle.load(bundle, check_golden=False)
    with pytest.raises(BundleError) as error:
        check_task_golden(loaded.task, loaded.model, golden, "golden.json")
    assert found in str(error.value)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"text.json": b"{"}, "text/text.json must be a JSON object"),
        ({"text.json": b'{"task": "sets"}'}, "must be of task tag; found 'sets'"),
        ({"words.json": None}, "must have words.json; found characters.json"),
    ],
)
def test_damaged_text_folders_are_rejected(bundle, change, found):
    task = TaskBundle.load(bundle).task
    files = {**task_text_files(task), **change}
    with pytest.raises(BundleError) as error:
        load_task_text(
            TaggingTask, task.config, {name: data for name, data in files.items() if data}
        )
    assert found in str(error.value)


def test_a_flipped_byte_is_noticed(bundle, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in bundle.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(bundle)).parent.mkdir(exist_ok=True)
            (copy / path.relative_to(bundle)).write_bytes(path.read_bytes())
    labels = copy / "text" / "labels.json"
    labels.write_bytes(labels.read_bytes().replace(b"PER", b"PEX"))
    with pytest.raises(CorruptError, match=r"labels\.json"):
        TaskBundle.load(copy)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ({"a": [1.0, 2.0]}, {"a": [1.0, 2.5]}, 0.25),
        ({"a": 1.0}, {"b": 1.0}, math.inf),
        (1000.0, 1001.0, 0.001),
        (-4, -5.0, 0.25),
        (0.5, 0.25, 0.25),
        (0.0, 0.5, 0.5),
        (1, True, 0.0),
        ([[1.0], {"a": 3.0}], [[1.5], {"a": 3.0}], 0.5),
        ([1.0], [1.0, 2.0], math.inf),
        ("x", "y", math.inf),
        (True, True, 0.0),
        (1.0, math.nan, math.inf),
        ([], [], 0.0),
    ],
)
def test_largest_difference_of_values(one, other, difference):
    assert largest_difference(one, other) == pytest.approx(difference)


def test_the_configuration_has_only_its_task_section(bundle):
    written = json.loads((bundle / "config.json").read_text())
    assert written["task"] == "tag"
    assert "tag" in written
    assert "classify" not in written


def test_outputs_may_differ_by_a_thousandth(bundle):
    loaded = TaskBundle.load(bundle)
    assert not loaded.model.training
    numbers = [0.25, 0.5]
    golden = {"format": 1, "task": "tag", "cases": [{"input": "a", "output": numbers}]}

    class Fixed:
        name = "tag"
        output = numbers

        def golden_outputs(self, model, inputs):
            return [self.output for _ in inputs]

    task = Fixed()
    for off, kept in ((0.0, True), (9e-4, True), (1.1e-3, False)):
        task.output = [0.25, 0.5 + off]
        if kept:
            check_task_golden(task, loaded.model, golden, "golden.json")
        else:
            with pytest.raises(CorruptError, match=r"case 1 .*found one 0\.0011 off"):
                check_task_golden(task, loaded.model, golden, "golden.json")
    task.output = [0.12345678, 0.5]
    made = make_task_golden(task, loaded.model, ["a"] * 20)
    assert [case["output"] for case in made["cases"]] == [[0.123457, 0.5]] * 16
    check_task_golden(task, loaded.model, made, "golden.json")
    made["cases"].append(made["cases"][0])
    with pytest.raises(BundleError, match="at most 16 cases"):
        check_task_golden(task, loaded.model, made, "golden.json")
