"""The bench of sentence pairs runs at its smallest size, and compares equal models."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from dragoman.models.factory import count_parameters

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.sentence_pairs")


def test_it_runs_and_prints_json_for_scripts(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--size", "tiny", "--steps", "2", "--device", "cpu", "--only", "esim"]
    monkeypatch.setattr(sys, "argv", ["bench/sentence_pairs.py", *options])
    bench.main()
    *lines, last = capsys.readouterr().out.strip().splitlines()
    found = json.loads(last)
    assert [row["system"] for row in found["rows"]] == [
        "esim: ours, eager",
        "esim: plain, shuffled",
        "esim: plain, our batches",
    ]
    assert all(row["tokens_s"] > 0 for row in found["rows"])
    assert found["precision"] == "float32"
    assert "esim: ours, eager against esim: plain, our batches" in lines[-1]


@pytest.mark.parametrize("member", ["esim", "infersent"])
def test_the_plain_model_has_the_same_outputs_and_loss(bench: ModuleType, member: str) -> None:
    """Packed sequences, co-attention by matmul and softmax, against ours with the same weights."""
    options = argparse.Namespace(size="recipe", pairs=30, precision="float32")
    task, store = bench.build_task(bench.MEMBERS[member], options)
    torch.manual_seed(0)
    ours = task.build_model().eval()
    torch.manual_seed(0)
    plain_training = bench.plain_training(member, task)
    plain = plain_training.build().eval()
    batch = task.collate(store, np.arange(30))
    inputs = plain_training.inputs(batch, CPU)
    expected = ours(batch.token_ids, batch.flags, batch.lengths)
    for part, other in zip(plain(*inputs[:4]), expected, strict=True):
        torch.testing.assert_close(part, other, atol=1e-4, rtol=1e-4)
    loss = task.loss(ours, batch)
    torch.testing.assert_close(plain_training.loss(plain, *inputs), loss.total / loss.count)
    assert count_parameters(plain) == count_parameters(ours)


def test_generated_pairs_are_as_long_as_those_of_sick(bench: ModuleType) -> None:
    records = bench.generate_pairs(2000)
    lengths = np.array([[len(record.text(side).split()) for side in "ab"] for record in records])
    assert lengths.mean() == pytest.approx(9.62, rel=0.02)
    assert lengths.std() == pytest.approx(3.67, rel=0.05)
    assert np.corrcoef(lengths.T)[0, 1] == pytest.approx(0.66, abs=0.05)
