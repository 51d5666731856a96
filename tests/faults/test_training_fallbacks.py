"""Training falls back, with one warning and the same losses, where something is missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fault_machines import (
    NO_GPU,
    OLD,
    ON_CPU,
    SMALL,
    Case,
    a_gpu,
    failing_compiler,
    forget,
    narrow_gpu,
    narrow_training,
    no_gpu,
    write_text,
)

from dragoman.cli.app import main
from dragoman.training.bf16_mixed_precision import choose_precision


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("fallbacks"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget(monkeypatch, tmp_path)


class Trained(NamedTuple):
    losses: list[float]
    lines: list[str]


def train(folder: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Trained:
    """Train for three steps."""
    settings = [
        *SMALL,
        "train.steps=3",
        "train.batch_tokens=120",
        "train.precision=float32",
        "train.checkpoint_every=100",
    ]
    words = [f"--set={each}" for each in settings]
    code = main(
        [
            "train",
            f"--src={folder}/text.de",
            f"--tgt={folder}/text.en",
            "--recipe=tiny",
            f"--out={out}",
            *words,
            *more,
        ]
    )
    err = capsys.readouterr().err
    assert code == 0, err
    from dragoman.checkpoint.run_directory import RunDirectory

    with RunDirectory(out / "training") as directory:
        losses = [record["loss"] for record in directory.records() if "nll" in record]
    return Trained(losses, err.splitlines())


TRAININGS = {
    "without a GPU": Case("--device=cuda", no_gpu, NO_GPU),
    "with a GPU that is too old": Case(
        "", OLD, rf"GeForce .* is too old for this torch.*: {ON_CPU}"
    ),
    "with a GPU that is too small": Case(
        "", narrow_gpu, rf"the model does not fit into the memory of cuda:0: {ON_CPU}"
    ),
    "in little memory": Case(
        "",
        narrow_training,
        r"out of memory with \d+ padded tokens of shape \d+x\d+: .*; lower train.batch_tokens .*",
    ),
    "without a compiler": Case(
        "--set=train.compile=on",
        failing_compiler(),
        r"torch.compile failed \(RuntimeError: Cannot find a working triton installation.\); .*",
    ),
    "with a compiler that fails in the backward pass": Case(
        "--set=train.compile=on",
        failing_compiler(late=True),
        r"torch.compile failed \(RuntimeError: C\+\+ compile error\); .* set train.compile=off .*",
    ),
}


@pytest.fixture(scope="module")
def usual(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[pytest.CaptureFixture[str]], Trained]:
    """Train on a machine in order, once."""
    known: list[Trained] = []

    def trained(capsys: pytest.CaptureFixture[str]) -> Trained:
        known[:] = known or [train(folder, tmp_path_factory.mktemp("usual") / "run", capsys)]
        return known[0]

    return trained


@pytest.mark.parametrize("name", TRAININGS)
def test_training_falls_back_with_one_warning(  # type: ignore[no-untyped-def]
    name: str,
    folder: Path,
    tmp_path: Path,
    usual,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, expected = TRAININGS[name], usual(capsys)
    with monkeypatch.context() as patch:
        case.inject(patch)
        found = train(folder, tmp_path / "run", capsys, *case.command.split())
    assert found.losses == pytest.approx(
        expected.losses, rel=0.0 if case.inject is not narrow_training else 1e-5
    )
    [line] = [
        line for line in found.lines if "warning" in line and "pairs" not in line
    ]  # the corpus is small
    assert re.fullmatch(rf"dragoman: warning: {case.line}", line)


def test_a_gpu_without_bfloat16_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    for wanted in ("auto", "bfloat16"):
        assert choose_precision(wanted, torch.device("cuda")) == (
            torch.float32,
            "GeForce GTX 1080 does not support bfloat16",
        )
