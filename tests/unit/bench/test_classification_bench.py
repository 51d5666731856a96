"""The bench of classifiers runs at its smallest size, and compares models of one size."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dragoman.config import read_config
from dragoman.models.factory import count_parameters

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.classification")


def test_it_runs_and_prints_json_for_scripts(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--size", "tiny", "--steps", "2", "--device", "cpu", "--no-compile", "--only", "han"]
    monkeypatch.setattr(sys, "argv", ["bench/classification.py", *options])
    bench.main()
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["system"] for row in found["rows"]] == [
        "han: ours, eager",
        "han: plain, shuffled",
        "han: plain, our batches",
    ]
    assert all(row["tokens_s"] > 0 for row in found["rows"])


@pytest.mark.parametrize("member", ["han", "transformer"])
def test_both_models_are_of_one_size(bench: ModuleType, member: str) -> None:
    config = read_config(recipe=bench.MEMBERS[member])
    task, _ = bench.build_task(config, argparse.Namespace(texts=20, size="tiny"))
    plain = bench.PlainHAN(task) if member == "han" else bench.PlainTransformer(task)
    embeddings = len(task.text.vocabulary) * config.model.width
    positions = sum(each.numel() for name, each in plain.named_parameters() if "position" in name)
    ours = count_parameters(task.build_model()) - embeddings
    assert count_parameters(plain) - embeddings - positions == pytest.approx(ours, rel=0.02)
