"""The tagging bench: the plain model is the same model, and the bench prints what scripts read."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from dragoman.tasks.tagging import TaggingTask
from tests.tagging_kit import make_records, make_task

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.tagging")


def test_the_plain_model_has_the_same_loss_and_gradients(bench: ModuleType) -> None:
    """Packed sequences, torch's bidirectional LSTM and a CRF by autograd, against ours."""
    torch.manual_seed(0)
    task: TaggingTask = make_task(encoder="bilstm(residual_connection=false)*2")
    ours = task.build_model()
    plain = bench.PlainTagger(ours, dropout=0.0)
    store = task.encode(make_records(12, seed=4))
    batch = task.collate(store, np.arange(12))
    loss = task.loss(ours, batch)
    expected = plain(*bench.plain_inputs(batch, torch.device("cpu")))
    torch.testing.assert_close(loss.total / loss.count, expected)
    assert ours.inputs.words is not None
    mine = torch.autograd.grad(
        loss.total / loss.count, [ours.inputs.words.weight, ours.tag_output.transitions]
    )
    theirs = torch.autograd.grad(expected, [plain.words.weight, plain.transitions])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_it_prints_a_line_of_json(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--precision", "float32", "--sentences", "6", "--width", "8"]
    options += ["--epochs", "1", "--systems", "ours", "plain"]
    monkeypatch.setattr(sys, "argv", ["bench/tagging.py", *options])
    bench.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["system"] for row in found["rows"]] == ["ours", "plain"]
    assert all(row["tokens_s"] > 0 for row in found["rows"])
