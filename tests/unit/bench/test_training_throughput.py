"""What the benches of training share: rounds, rows of failed systems, ratios."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.data.batch_plan import BatchPlan

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.training_throughput")


def test_rounds_begin_after_the_warm_up(bench: ModuleType) -> None:
    """Step n ends at n squared and has n tokens; the run began at -1."""
    steps = range(1, 10)
    times = bench.StepTimes(-1.0, {n: float(n * n) for n in steps}, {n: n for n in steps})
    assert times.rounds(warmup=2, steps=3, rounds=2) == ([21.0, 39.0], 5.0)
    assert times.round_tokens(warmup=2, steps=3, rounds=2) == [3 + 4 + 5, 6 + 7 + 8]


def test_a_failed_system_is_a_row_without_a_ratio(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no\ncompiler")

    def row(tokens_s: float, **more: Any) -> dict[str, Any]:
        return {"tokens_s": tokens_s, "slowest": 1.0, "warm_up_s": 1.0, "MiB": None, **more}

    systems = {
        "ours, eager": lambda: row(20.0, ours=True),
        "ours, cuda_graphs": lambda: row(30.0, ours=True),
        "plain": lambda: row(10.0),
        "plain, compiled": fail,
    }
    rows = bench.time_systems("han", systems, CPU, unit="words")
    assert rows[-1] == {"system": "han: plain, compiled", "error": "no compiler"}
    *_, failed, ratio = capsys.readouterr().out.splitlines()
    assert failed.split() == ["han:", "plain,", "compiled", "failed:", "no", "compiler"]
    assert ratio == "  han: ours, cuda_graphs against han: plain: 3.00 times"


def test_epochs_follow_each_other(bench: ModuleType) -> None:
    lengths = np.arange(1, 11)
    plan = BatchPlan(lengths, lengths, batch_tokens=20, seed=1)
    count = plan.batches(0)
    found = list(itertools.islice(bench.epochs_of(plan), count + 1))
    assert sorted(np.concatenate(found[:count])) == list(range(10))
    assert found[count].tolist() == plan.epoch(1)[0].tolist()
