"""The race of engines on a CPU runs at its smallest size, and gives all contenders the same work."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.decode_cpu")


def test_batches_hold_every_sentence_once_by_length(bench: Any) -> None:
    drawn = bench.sentences(50, 500)
    batches = bench.batched(drawn, 16)
    assert sorted(each for batch in batches for each in batch) == sorted(drawn)
    assert [len(each) for batch in batches for each in batch] == sorted(map(len, drawn), reverse=True)
    assert bench.sentences(50, 500) == drawn


def test_every_output_is_as_long_as_its_batch_says(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dragoman.engines import Native

    found = []
    generate = Native.generate
    monkeypatch.setattr(Native, "generate", lambda self, request: found.append(generate(self, request)) or found[-1])
    batch = bench.sentences(4, 500)
    bench.contender("native float32", "tiny", 2, 1, tmp_path)([batch])
    assert {len(best.tokens) for [best] in found[0]} == {bench.steps(batch)}


@pytest.mark.slow
def test_the_race_prints_a_table_and_a_line_of_json() -> None:
    command = [
        sys.executable,
        str(ROOT / "bench" / "decode_cpu.py"),
        "--size",
        "tiny",
        "--sentences",
        "16",
        "--rounds",
        "2",
        "--cores",
        "1",
    ]
    run = subprocess.run(
        [*command, "--only", "native"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert [row["contender"] for row in told["rows"]] == ["native float32", "native int8"]
    assert all(len(row["rounds"]) == 2 and row["peak_mib"] > 50 for row in told["rows"])
