"""Untrusted directories and settings: a one-line error in bounded time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("hostile_driver.py")


def run_cases(folder: Path, kind: str, count: int, seed: int) -> None:
    """Run generated cases in a process of their own and report every case that has a problem."""
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(folder), kind, str(count), str(seed)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == count
    bad = [case for case in cases if case["problems"]]
    assert not bad, f"{len(bad)} of {count} cases have problems: {json.dumps(bad, indent=1)[:5000]}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, because runs sync every checkpoint, open to an unprivileged user."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="dragoman-hostile-", dir=memory if os.access(memory, os.W_OK) else None
    ) as name:
        Path(name).chmod(0o755)
        yield Path(name)


TASKS = ("kim2014", "lample2016", "radford2018", "merity2018", "chen2017", "lee2019")


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *(("model", 12), ("run", 5), ("import", 6), ("settings", 40), ("directions", 8)),
        *(("lample2016", 4), ("lee2019", 4)),
    ],
)
def test_hostile_input_gives_a_one_line_error(
    kind: str, count: int, folder: Path, fault_seed: int
) -> None:
    run_cases(folder, kind, count, fault_seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        *(("model", 200), ("run", 200), ("import", 150), ("settings", 500), ("directions", 200)),
        *((recipe, 100) for recipe in TASKS),
    ],
)
def test_much_hostile_input_gives_one_line_errors(
    kind: str, count: int, folder: Path, fault_seed: int
) -> None:
    run_cases(folder, kind, count, fault_seed + 100)
