"""Lets every test import what stands beside this file, such as the trainer in miniature."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    """Compile the CPU's kernels before the first test: whichever ran first would find a line about it on its stderr."""
    from dragoman.engines.cpu.building import kernels

    kernels()
