"""SetModel: inputs, batches and predictions of every problem."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dragoman.config import Config, ModelConfig
from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.data.labeled_records import Record
from dragoman.errors import DataError
from dragoman.inference.predictors.unordered_set_predictor import SetModel, SetPrediction
from dragoman.tasks.unordered_set_input_task import SetsTask


def model_of(*records: Record, **sets) -> SetModel:
    config = Config(
        task="sets",
        model=ModelConfig(width=16, heads=2, ffn_width=16, dropout=0.0, positions="none"),
        sets=SetsConfig(**sets),
    )
    task = SetsTask(config, SetsTask.fit_text(config, lambda: iter(records)))
    torch.manual_seed(0)
    return SetModel(task.build_model(), task)


def record_of(**fields) -> Record:
    return Record(Path("in.txt"), 3, fields)


def test_batches_and_order_change_nothing():
    model = model_of(problem="maximum")
    sets = [[3.5, 80, 2], [7], [1] * 40]
    together = [each.value for each in model.predict(sets)]
    alone = [model.predict([each])[0].value for each in sets]
    assert together == pytest.approx(alone, rel=1e-4)
    assert model.predict([[2, 80, 3.5]])[0].value == pytest.approx(together[0], rel=1e-5)
    assert model.predict([np.array([3.5, 80, 2])])[0].value == pytest.approx(together[0], rel=1e-5)
    assert model.predict([]) == []


def test_predictions_have_the_fields_of_their_problem():
    (number,) = model_of(problem="maximum").predict([[1, 2]])
    assert number.to_dict() == {"value": number.value}
    assert float(number.to_line()) == pytest.approx(number.value, rel=1e-4)
    records = [record_of(set=[1], target="a\n"), record_of(set=[2], target="b\n")]
    (label,) = model_of(*records).predict([[1, 2]])
    assert sum(label.probabilities.values()) == pytest.approx(1.0)
    assert label.to_line() == f"{label.label[0]}\\n\t{label.probabilities[label.label]:.4f}"
    assert label.to_line(top=2).count("\t") == 3
    (count,) = model_of(problem="unique").predict([[[0.0] * 784] * 3])
    assert count.count == round(count.rate)
    assert count.to_line() == str(count.count)
    clusters = model_of(problem="clustering", seeds=4).predict([[[0, 1]] * 5, [[1, 2]]])
    assert [len(each.clusters) for each in clusters] == [5, 1]
    assert sum(part["weight"] for part in clusters[0].components) == pytest.approx(1.0)
    assert len(clusters[0].to_line().split()) == 5
    assert not clusters[0].notes


def test_an_empty_line_keeps_its_position():
    model = model_of(problem="maximum")
    lines = [model.read_record(record_of(text=text)) for text in ("[1, 2]", " ", "[3]")]
    first, empty, last = model.predict(lines)
    assert (empty.to_line(), empty.notes) == ("", ("the line is empty: there is no set",))
    assert empty.to_dict() == {"notes": ["the line is empty: there is no set"]}
    assert [first.value, last.value] == [each.value for each in model.predict([[1, 2], [3]])]
    assert model.predict(lines[1:2]) == [empty]
    with pytest.raises(DataError, match="must have elements; found an empty line"):
        model.explain(lines[1])


def test_labels_come_most_probable_first():
    found = SetPrediction(label="b", probabilities={"a": 0.2, "b": 0.7, "c": 0.1})
    assert found.to_line() == "b\t0.7000"
    assert found.to_line(top=2) == "b\t0.7000\ta\t0.2000"
    assert SetPrediction(count=0, rate=0.2).to_line() == "0"


def test_images_may_be_rows_of_pixels():
    model = model_of(problem="unique")
    image = np.zeros((28, 28)).tolist()
    flat = model.predict([[[0.0] * 784]])[0].rate
    assert model.predict([[image]])[0].rate == pytest.approx(flat)


def test_a_line_is_a_json_list_and_a_record_has_a_field():
    model = model_of(problem="maximum")
    assert model.read_record(record_of(text="[1, 2.5]")) == [1, 2.5]
    assert model.read_record(record_of(set=[4])) == [4]
    assert model.read_record(record_of(numbers=[4]), text_field="numbers") == [4]
    for fields, found in (
        ({"text": "hello"}, "'hello'"),
        ({"text": "[]"}, "an empty list"),
        ({"set": [[1, 2]]}, "2 numbers"),
        ({"other": 1}, "other"),
    ):
        with pytest.raises(DataError, match=r"in\.txt line 3") as caught:
            model.read_record(record_of(**fields))
        assert caught.value.found == found


def test_an_input_that_is_not_a_set_is_an_error():
    model = model_of(problem="maximum")
    with pytest.raises(DataError, match=r"list of sets; found '\[1\]'"):
        model.predict("[1]")
    with pytest.raises(DataError, match=r"a set must have a list of numbers.*found 3"):
        model.predict([3])
    with pytest.raises(DataError, match=r"a set must have a list of numbers.*found None"):
        model.predict([[1], None, [2]])
    for written in (["3"], [1, "3"], [True]):
        with pytest.raises(DataError, match=r"a set must have a list of numbers.*without quotes"):
            model.predict([written])


@pytest.mark.parametrize(
    ("numbers", "fix"),
    [
        ([1e300], "up to 3.4e+38"),
        ([1.0, -1e39], "up to 3.4e+38"),
        ([10**400], "up to 3.4e+38"),
        ([float("inf")], "up to 3.4e+38"),
        ([True, None], "replace null and NaN by numbers"),
    ],
)
def test_numbers_that_float32_does_not_have_are_an_error(numbers, fix):
    with pytest.raises(DataError, match=r"must have finite numbers \(float32\)") as caught:
        model_of(problem="maximum").predict([numbers])
    assert fix in caught.value.fix
    assert caught.value.found == repr(numbers)[:120]


def test_outputs_that_are_not_finite_are_an_error():
    with pytest.raises(DataError, match=r"outputs are finite; found nan for 3\.\d+e\+38"):
        model_of(problem="maximum").predict([[1, 2], [3e38]])


@pytest.mark.parametrize("value", [None, np.int64(3), "[1]"])
def test_no_other_value_is_a_set(value):
    with pytest.raises(DataError, match="a set must have a list of numbers"):
        model_of(problem="maximum").predict([value])
