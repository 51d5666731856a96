"""Invalid settings end `dragoman train` in one line each, before the corpus is read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from dragoman.cli.app import main

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("setting", "reason", "remedy"),
    [
        (
            "model.decoder=[transformer(attention=monotonic)]",
            "computes all positions in parallel",
            "use lstm(attention=monotonic)",
        ),
        (
            "model.encoder=[lstm(window=5)]",
            "no window over its own sequence",
            "use transformer(window=5)",
        ),
        (
            "model.decoder=[lstm(attention=dot, alignment=location_sensitive)]",
            "found attention=dot",
            "use attention=additive",
        ),
        ("model.heads=7", "must divide model.width; found 7 and 256", "try model.heads=4 or 8"),
        ("model.decoder=[bilstm]", "must be causal; found bilstm", "use lstm"),
    ],
)
def test_dry_run_rejects_invalid_settings_before_it_reads_the_text(
    setting: str, reason: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["--src", "nowhere.de", "--tgt", "nowhere.en"]  # never read
    assert (
        main(
            [
                "train",
                "--recipe",
                "tiny",
                "--out",
                "never",
                *text,
                "--set",
                "model.width=256",
                "--set",
                setting,
                "--dry-run",
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dragoman: error: ")
    assert reason in line
    assert remedy in line


def test_subprocess_reports_several_problems_together(dragoman: Run) -> None:
    done = dragoman(
        "train",
        "--out=never",
        "--src=no.de",
        "--tgt=no.en",
        "--set",
        "model.encoder=[bilstm(window=2)*3, trasnformer]",
        "--dry-run",
    )
    assert done.returncode == 2
    assert "did you mean transformer?" in done.stderr
    assert "Traceback" not in done.stderr
