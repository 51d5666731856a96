"""The set task: statistics of the records, bad records, losses and metrics."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributions

from dragoman.config import Config, ModelConfig, TrainConfig, apply_overrides
from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.data.batch_plan import Cursor
from dragoman.data.labeled_records import Record
from dragoman.errors import BundleError, ConfigError, DataError
from dragoman.tasks.unordered_set_input_task import SetsTask, SetsText
from dragoman.tasks.unordered_set_objectives import (
    Clustering,
    Counting,
    Regression,
    SetClassification,
)
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import QuietProgress

MODEL = ModelConfig(width=16, heads=2, ffn_width=16, dropout=0.0, positions="none")
CPU = torch.device("cpu")


def config_of(**sets) -> Config:
    return Config(task="sets", model=MODEL, sets=SetsConfig(**sets), train=TrainConfig(seed=3))


def record_of(number: int = 1, **fields) -> Record:
    return Record(Path("sets.jsonl"), number, fields)


def task_of(*records: Record, **sets) -> SetsTask:
    config = config_of(**sets)
    return SetsTask(config, SetsTask.fit_text(config, lambda: iter(records)))


def evaluate(task, model, store):
    with torch.no_grad():
        return task.evaluate(
            model.eval(),
            store,
            device=CPU,
            precision=Precision(torch.float32, ""),
            progress=QuietProgress(),
        )


def test_numbers_are_regression_with_their_statistics():
    records = [record_of(set=[1, 3], target=10), record_of(set=[5], target=20)]
    task = task_of(*records)
    assert task.text.problem == "regression"
    assert task.text.shift == (3.0,)
    assert task.text.scale[0] == pytest.approx(np.std([1, 3, 5]))
    assert (task.text.target_shift, task.text.target_scale) == (15.0, 5.0)
    batch = task.collate(task.encode(records), np.arange(2))
    assert batch.elements[0, :, 0].tolist() == pytest.approx([-2 / task.text.scale[0], 0.0])
    assert batch.mask.tolist() == [[True, True], [True, False]]
    assert (batch.tokens, batch.padded_tokens, len(batch)) == (3, 4, 2)


def test_texts_are_labels_and_so_are_numbers_if_asked():
    records = [record_of(set=[[1, 2]], target="odd"), record_of(set=[[3, 4]], target="even")]
    task = task_of(*records)
    assert task.text.labels.names == ("even", "odd")
    assert task.text.features == 2
    assert task.encode(records).values["target"].tolist() == [1.0, 0.0]
    forced = task_of(
        record_of(set=[1], target=7), record_of(set=[2], target=8), problem="classification"
    )
    assert forced.text.labels.names == ("7", "8")
    assert "2 labels" in forced.describe()


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"set": [], "target": 1}, "an empty list"),
        ({"set": "abc", "target": 1}, "'abc'"),
        ({"set": [[1, 2], [3]], "target": 1}, "[[1, 2], [3]]"),
        ({"set": [1, float("nan")], "target": 1}, "nan"),
        ({"set": [[1, 2]], "target": 1}, "2 numbers"),
        ({"set": [1] * 9, "target": 1}, "9"),
        ({"set": [1], "target": "many"}, "'many'"),
        ({"set": [1], "target": True}, "True"),
        ({"set": [1], "target": 1e300}, "1e+300"),
        ({"set": [1], "target": 10**400}, "1000"),
        ({"set": [1]}, "set"),
        ({"sets": [1], "target": 1}, "sets, target"),
    ],
)
def test_a_bad_record_is_named_with_its_line(fields, found):
    good = record_of(set=[1, 2], target=3.5)
    with pytest.raises(DataError, match=r"sets\.jsonl line 7 ") as caught:
        task_of(good, record_of(7, **fields), max_size=8)
    assert f"found {found}" in str(caught.value) or found in caught.value.found


def test_an_unknown_label_and_too_few_are_errors():
    records = [record_of(set=[1], target="a"), record_of(set=[2], target="b")]
    task = task_of(*records)
    with pytest.raises(DataError, match="found c; use one of a, b"):
        task.encode([record_of(4, set=[1], target="c")])
    with pytest.raises(DataError, match="at least two labels; found a"):
        task_of(records[0])
    with pytest.raises(DataError, match="at least one set"):
        task_of()


def test_settings_that_contradict_each_other_are_errors():
    assert "sets.seeds above 1 needs" in " ".join(SetsConfig(pooling="max", seeds=2).problems())
    problem = "sets.seeds must be 1 or sets.components"
    assert problem in " ".join(SetsConfig(problem="clustering", seeds=3).problems())
    assert "must differ" in " ".join(SetsConfig(set_field="x", target_field="x").problems())


def test_text_files_read_back_and_bad_ones_are_errors():
    records = [record_of(set=[[1, 2]], target="odd"), record_of(set=[[3, 4]], target="even")]
    for task in (task_of(*records), task_of(problem="maximum")):
        read = SetsTask.load_text(task.config, task.text_files())
        assert read._replace(labels=None) == task.text._replace(labels=None)
        assert (read.labels is None) == (task.text.labels is None)
    files = task_of(problem="maximum").text_files()
    values = json.loads(files["features.json"])
    for change in (
        {"shift": []},
        {"problem": "none"},
        {"scale": ["x"]},
        {"target_scale": math.inf},
        {"features": math.inf},
        {"shift": [10**400]},
    ):
        bad = json.dumps({**values, **change}).encode()
        with pytest.raises(BundleError, match=r"features\.json must describe"):
            SetsTask.load_text(config_of(), {"features.json": bad})


@pytest.mark.parametrize("problem", ["maximum", "unique", "clustering"])
def test_loss_is_a_sum_over_sets_and_evaluation_its_mean(problem):
    task = task_of(problem=problem, validation_sets=12, seeds=4 if problem == "clustering" else 1)
    store = task.generate("valid")
    torch.manual_seed(0)
    model = task.build_model().eval()
    with torch.no_grad():
        whole = task.loss(model, task.collate(store, np.arange(12)))
        parts = [task.loss(model, task.collate(store, np.arange(4) + i)) for i in (0, 4, 8)]
    assert float(whole.count) == 12
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    found = evaluate(task, model, store)
    assert found["loss"] == pytest.approx(float(whole.total) / 12, rel=1e-4)
    names = {
        "maximum": {"mae", "mse"},
        "unique": {"accuracy", "mae"},
        "clustering": {
            "log_likelihood",
            "log_likelihood_em",
            "log_likelihood_oracle",
            "log_likelihood_gap",
        },
    }
    assert set(found) == {"loss", *names[problem]}
    assert evaluate(task, model, store.select(range(12))) == pytest.approx(found, rel=1e-4)
    assert {score.name for score in task.scores(found)} == names[problem]


def test_the_plan_of_generated_sets_resumes_exactly():
    task = task_of(problem="maximum", epoch_sets=100)
    store = task.generate("train")
    plan = task.plan(store, batch_tokens=160, seed=1)
    first = task.collate(store, plan.batch(Cursor(5, 3)))
    again = task.collate(
        task.generate("train"),
        task.plan(store, batch_tokens=160, seed=1).batch(Cursor(5, 3)),
    )
    assert len(first) == 16
    torch.testing.assert_close(first.elements, again.elements)
    assert first.examples.min() >= 500


def test_counting_is_poisson_regression():
    outputs, targets = torch.randn(6, 1), torch.arange(1.0, 7.0)
    objective = Counting()
    expected = -distributions.Poisson(objective.rates(outputs)).log_prob(targets)
    torch.testing.assert_close(objective.losses(outputs, targets, outputs, outputs), expected)


def test_regression_is_scaled_back():
    objective = Regression(squared=True, shift=10.0, scale=2.0)
    outputs, targets = torch.tensor([[1.0]]), torch.tensor([14.0])
    assert objective.values(outputs).tolist() == [12.0]
    assert objective.losses(outputs, targets, outputs, outputs).tolist() == [1.0]
    assert objective.metrics(outputs, targets, outputs, outputs)["mae"].tolist() == [2.0]


def test_golden_outputs_are_those_of_the_model():
    for problem in ("maximum", "unique", "clustering"):
        task = task_of(problem=problem, seeds=4 if problem == "clustering" else 1)
        model = task.build_model().eval()
        inputs = task.golden_inputs(iter(()))
        assert len(inputs) == 3
        assert json.loads(json.dumps(inputs)) == inputs
        outputs = task.golden_outputs(model, inputs)
        store = task.generate("valid")
        batch = task.collate(store, np.arange(3))
        with torch.no_grad():
            expected = model(task.elements(batch), batch.mask)
        torch.testing.assert_close(torch.tensor(outputs), expected, atol=1e-3, rtol=1e-3)
        with pytest.raises(ValueError, match="list of numbers"):
            task.golden_outputs(model, ["x"])


def test_a_model_learns_the_maximum_in_a_few_steps():
    task = task_of(problem="maximum", encoder="mlp", pooling="max", layers=1, validation_sets=200)
    store = task.generate("train")
    torch.manual_seed(0)
    model = task.build_model().train()
    before = evaluate(task, model, task.generate("valid"))["mae"]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(60):
        loss = task.loss(model.train(), task.collate(store, np.arange(64) + 64 * step))
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    assert evaluate(task, model, task.generate("valid"))["mae"] < before / 4


def test_labels_and_problem_must_agree_in_a_bundle():
    text = SetsText("classification", 1, (0.0,), (1.0,))
    files = SetsTask(config_of(), text._replace(problem="regression")).text_files()
    values = json.loads(files["features.json"])
    bad = json.dumps({**values, "problem": "classification"}).encode()
    with pytest.raises(BundleError):
        SetsTask.load_text(config_of(), {"features.json": bad})


def test_a_wrong_problem_is_an_error():
    with pytest.raises(ConfigError, match=r"sets\.problem"):
        apply_overrides(config_of(), ["sets.problem=maximun"])


def test_labels_are_scored_by_accuracy_and_cross_entropy() -> None:
    objective = SetClassification(("odd", "even", "zero"))
    outputs = torch.tensor([[2.0, 0.0, 1.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0]])
    targets = torch.tensor([0.0, 1.0, 1.0])
    elements, mask = torch.zeros(3, 1, 1), torch.ones(3, 1, dtype=torch.bool)
    found = objective.metrics(outputs, targets, elements, mask)["accuracy"]
    assert found.tolist() == [1.0, 0.0, 1.0]
    expected = -outputs.log_softmax(dim=1)[range(3), targets.long()]
    assert torch.allclose(objective.losses(outputs, targets, elements, mask), expected)
    labels = [each["label"] for each in objective.predictions(outputs, elements, mask)]
    assert labels == ["odd", "zero", "even"]


@pytest.mark.parametrize(
    ("problem", "train", "generated"),
    [
        ("maximum", "", True),
        ("maximum", "sets.jsonl", False),
        ("regression", "", False),
        ("regression", "sets.jsonl", False),
    ],
)
def test_sets_are_generated_unless_a_file_replaces_them(
    problem: str, train: str, generated: bool
) -> None:
    config = config_of(problem=problem).replace(data={"train": train})
    assert SetsTask.is_generated(config) is generated


@pytest.mark.parametrize(("rate", "count"), [(4.8, 5), (4.4, 4), (0.2, 0)])
def test_the_count_is_the_integer_nearest_to_the_rate(rate: float, count: int) -> None:
    objective, mask = Counting(), torch.ones(1, 1, dtype=torch.bool)
    outputs = torch.tensor([[math.log(math.expm1(rate))]])
    [found] = objective.predictions(outputs, torch.zeros(1, 1, 1), mask)
    assert found["count"] == count
    assert found["rate"] == pytest.approx(rate, abs=1e-4)
    for target in (count, count + 1):
        metrics = objective.metrics(outputs, torch.tensor([float(target)]), outputs, mask)
        assert metrics["accuracy"].item() == (target == count)
        assert metrics["mae"].item() == pytest.approx(abs(rate - target), abs=1e-4)


def test_the_gap_is_the_difference_from_the_oracle() -> None:
    objective = Clustering(components=2, features=2)
    points = torch.randn(1, 6, 2, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[True, True, True, True, False, False]])
    targets = torch.tensor([[[math.log(0.5), 0.0, 0.0, 1.0, 1.0]] * 2])
    outputs = torch.tensor([[[0.0, 5.0, 5.0, 0.0, 0.0], [0.0, -5.0, 5.0, 0.0, 0.0]]])
    found = {
        name: value.item()
        for name, value in objective.metrics(outputs, targets, points, mask).items()
    }
    assert found["log_likelihood_oracle"] > found["log_likelihood"]
    assert found["log_likelihood_gap"] == pytest.approx(
        found["log_likelihood_oracle"] - found["log_likelihood"], rel=1e-5
    )
    assert found["log_likelihood_em"] > found["log_likelihood"]
    [predicted] = objective.predictions(outputs, points, mask)
    assert len(predicted["clusters"]) == 4, "padding is in no cluster"


def test_small_deviations_are_scaled_and_constants_are_not() -> None:
    records = [record_of(set=[[0.1, 7], [0.3, 7]], target=2), record_of(set=[[0.2, 7]], target=2.5)]
    text = task_of(*records).text
    assert text.scale == pytest.approx((np.std([0.1, 0.3, 0.2]), 1.0))
    assert text.target_scale == pytest.approx(0.25)


def test_as_many_sets_are_generated_as_each_part_needs() -> None:
    task = task_of(problem="maximum", epoch_sets=50, validation_sets=7)
    assert [len(task.generate(part)) for part in ("train", "valid", "test")] == [50, 7, 7]


def test_a_set_may_have_as_many_elements_as_are_allowed() -> None:
    task = task_of(record_of(set=[1, 2], target=1), record_of(set=[3], target=2), max_size=3)
    assert len(task.encode_set([1, 2, 3])) == 3
    with pytest.raises(DataError, match="must have at most 3 elements"):
        task.encode_set([1, 2, 3, 4])


@pytest.mark.parametrize(("loss", "expected"), [("l1", 3.0), ("l2", 9.0)])
def test_errors_are_absolute_or_squared_as_configured(loss: str, expected: float) -> None:
    records = [record_of(set=[1], target=-1), record_of(set=[3], target=1)]
    objective = task_of(*records, loss=loss).objective
    outputs, targets = torch.tensor([[3.0]]), torch.tensor([0.0])
    mask = torch.ones(1, 1, dtype=torch.bool)
    assert objective.losses(outputs, targets, outputs, mask).tolist() == pytest.approx([expected])
