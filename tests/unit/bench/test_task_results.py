"""The commands of the rows of bench/task_results.py, and what is kept of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.task_results import ROWS, TaskRun, main, print_table, run_one


def test_every_row_lists_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["task_results.py", "--data", "DATA", "--list", "--budget", "3m"]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [row.name for row in ROWS]
    assert not any("{" in line for line in lines)
    timed = [line for line in lines if "--budget" in line]
    assert len(timed) == 4
    assert all("--budget 3m " in line for line in timed)


def test_a_row_is_tested_in_each_of_its_variants(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[3:])
        score = 1.4 + len(commands) / 100
        out = json.dumps({"scores": {"bits_per_byte": {"score": score}}})
        return subprocess.CompletedProcess(command, 0, out, "")

    monkeypatch.setattr(subprocess, "run", run)
    [row] = [row for row in ROWS if row.name == "books_xl"]
    result = run_one(TaskRun(row, 1), "DATA", tmp_path, [], "5m")
    assert commands[0][:3] == ["train", "--task", "language"]
    assert "5m" in commands[0]
    assert [command[-2:-1] for command in commands[2:]] == [
        ["language.eval_memory=512"],
        ["language.eval_memory=1024"],
    ]
    assert result["metrics"]["scores"]["bits_per_byte"]["score"] == pytest.approx(1.42)
    print_table({"books_xl/1": result})
    assert "eval_memory=1024 1.4400" in capsys.readouterr().out
