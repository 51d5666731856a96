"""The base of predictors: order, batches, windows, memory that runs out, wrong models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dragoman
from dragoman.config import Config
from dragoman.errors import BundleError, ConfigError, DataError
from dragoman.inference import input_line_buffer
from dragoman.inference.predictors.base import Predictor


@dataclass(frozen=True)
class Count:
    """The number of characters of a text, and the batch it was in."""

    text: str
    value: float
    rows: int
    notes: tuple[str, ...] = ()

    def to_line(self, *, top: int = 1) -> str:
        return f"{self.value:.0f}\t{self.text}"

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value}


class Counter(Predictor[str, str, Count]):
    task_name = "classify"

    def __init__(self, model: nn.Module | None = None, *, fits: int | None = None) -> None:
        task = SimpleNamespace(config=Config(), build_model=lambda: nn.Linear(1, 1, bias=False))
        model = nn.Linear(1, 1, bias=False) if model is None else model
        nn.init.ones_(model.weight)
        super().__init__(model, task)  # type: ignore[arg-type]
        self.fits, self.models, self.encoded = fits, [], 0

    def read_record(self, record, *, text_field=""):
        return record.text("text")

    def encode(self, inputs):
        self.encoded += len(inputs)
        return inputs

    def length(self, encoded):
        return len(encoded)

    def predict_batch(self, model, encoded, device):
        self.models.append(model)
        if self.fits is not None and len(encoded) > self.fits and model is self.model:
            raise torch.OutOfMemoryError("CUDA out of memory")
        counts = torch.tensor([[float(len(text))] for text in encoded], device=device)
        assert not torch.is_grad_enabled()
        return [
            Count(text, value, len(encoded))
            for text, value in zip(encoded, model(counts).squeeze(1).tolist(), strict=True)
        ]


TEXTS = ["", "one", "a longer text", "x" * 300, "two", "three words here", "y"]


def test_predictions_are_in_order_for_any_batches():
    for batch_size in (None, 1, 2, 100):
        found = Counter().predict(TEXTS, batch_size=batch_size)
        assert [(each.text, each.value) for each in found] == [(t, len(t)) for t in TEXTS]
        assert batch_size is None or max(each.rows for each in found) <= batch_size


def test_a_stream_reads_no_further_than_its_window():
    predictor = Counter()
    read = 0

    def lines():
        nonlocal read
        for number in range(10_000):
            read += 1
            yield str(number)

    stream = predictor.stream(lines(), buffer_size=100)
    assert [next(stream).text for _ in range(3)] == ["0", "1", "2"]
    assert read == 32  # the first window is short, for a writer that waits for its answer
    assert sum(1 for _ in stream) == 10_000 - 3
    assert predictor.encoded == 10_000


def test_a_batch_has_at_most_16384_padded_characters():
    found = Counter().predict(["x" * 1024] * 17 + ["y" * 16_385])
    assert [each.rows for each in found] == [16] * 16 + [1, 1]


def test_a_buffer_holds_as_many_inputs_as_it_may():
    """All inputs of a list are available, so that every buffer is full."""
    for buffer_size, rows in ((3, [3, 3, 3, 3, 3, 3, 1]), (100, [7] * 7)):
        found = list(Counter().stream(["abc"] * 7, buffer_size=buffer_size))
        assert [each.rows for each in found] == rows


def test_large_inputs_make_smaller_buffers(monkeypatch):
    monkeypatch.setattr(input_line_buffer, "MAX_BUFFER_CHARS", 30)

    class Weighing(Counter):
        def size(self, example):
            return 10 * len(example)

    read = []
    stream = Weighing().stream(read.append(each) or each for each in ("a", "b", "c", "d"))
    next(stream)
    assert read == ["a", "b", "c"]
    assert [each.text for each in stream] == ["b", "c", "d"]


def test_a_model_predicts_in_evaluation_mode():
    model = nn.Linear(1, 1, bias=False).train()
    assert not Counter(model).model.training


def test_out_of_memory_halves_the_batch_with_equal_results(caplog):
    predictor = Counter(fits=3)
    texts = [f"{number:04d}" for number in range(64)]
    assert [each.value for each in predictor.predict(texts)] == [4.0] * 64
    assert [each.text for each in predictor.predict(texts)] == texts
    assert sum("in halves" in each.message for each in caplog.records) == 1


def test_single_example_that_does_not_fit_is_predicted_on_the_cpu(caplog, monkeypatch):
    predictor = Counter(fits=0)
    monkeypatch.setattr(Counter, "device", torch.device("cuda"))
    assert [each.value for each in predictor.predict(["four", "fourteen chars"])] == [4.0, 14.0]
    assert predictor.models[-1] is not predictor.model
    assert predictor.models[-1] is predictor.models[-2] or len(predictor.models) > 2
    assert sum("predicted on the CPU" in each.message for each in caplog.records) == 1


def test_on_the_cpu_full_memory_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        Counter(fits=0).predict(["a"])


def test_other_errors_are_not_hidden():
    class Failing(Counter):
        def predict_batch(self, model, encoded, device):
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        Failing().predict(["a"])


def test_one_text_is_no_list_of_texts():
    with pytest.raises(DataError, match=r"found one text, 'abc'; put it in brackets"):
        Counter().predict("abc")


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("buffer_size", 0), ("buffer_size", -1), ("buffer_size", "ten")],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an integer from 1; found {value!r}"):
        list(Counter().stream(["a"], **{name: value}))


def test_task_without_explanations_raises_an_error():
    Counter.task_name = "tag"
    try:
        with pytest.raises(
            ConfigError,
            match="are for models of the tasks classify and pairs; found one of tag",
        ):
            Counter().explain_words("a")
    finally:
        Counter.task_name = "classify"


def write_model_of(path, task):
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    (path / "config.json").write_text(json.dumps({"task": task} if task else {}))
    return path


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        (5, ConfigError, r"the path of a directory, or several in a list; found 5 \(int\)"),
        (["one", "two"], BundleError, "found nothing at one"),
        ([], ConfigError, "needs at least one model; found none"),
    ],
)
def test_load_takes_a_path_or_several(path, error, words):
    with pytest.raises(error, match=words):
        dragoman.load(path)


def test_load_needs_a_model_and_a_known_task(tmp_path):
    with pytest.raises(BundleError, match="found nothing at"):
        dragoman.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no predictor named 'dance'"):
        dragoman.load(write_model_of(tmp_path / "model", "dance"))
