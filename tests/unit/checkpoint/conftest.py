"""Fixtures of the checkpoint tests: a run directory, and no faults or signal handlers after one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.runtime import signals
from dragoman.storage import fault_injection


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    yield
    fault_injection.arm_faults("")
    signals.uninstall_handlers()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path / "training", keep_checkpoints=2) as directory:
        yield directory
