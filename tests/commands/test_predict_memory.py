"""`dragoman predict` streams: ten times the lines need no more memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.classifier_kit import write_classifier

ROOT = Path(__file__).resolve().parents[2]
# Runs a command and prints the largest memory of its process, in KiB.
MEASURE = (
    "import resource, sys; from dragoman.cli.app import main; code = main(sys.argv[1:]); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
)


def peak_memory(model: Path, folder: Path, lines: int) -> int:
    text = folder / f"{lines}.txt"
    with open(text, "w") as file:
        file.writelines(f"film {number} was great and a story\n" for number in range(lines))
    out = folder / f"{lines}.out"
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "predict", "-m", model, "-i", text, "-o", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with open(out) as file:
        assert sum(1 for _ in file) == lines
    return int(done.stderr.splitlines()[-1]) // (1024 if sys.platform == "darwin" else 1)


@pytest.mark.slow
def test_two_hundred_thousand_lines_need_no_more_memory_than_twenty_thousand(tmp_path):
    model = write_classifier(tmp_path / "model", steps=1)
    few, many = (peak_memory(model, tmp_path, lines) for lines in (20_000, 200_000))
    # Measured: 3 MiB more; the predictions alone would be 60 MiB.
    assert many < few + 16 * 1024
