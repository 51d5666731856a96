"""Checkpoints of the trainer: space for them, the log that belongs to them, and the best one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_kit import assert_same_run, log_of, tensors_of, tiny_trainer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.training.checkpointer import Checkpointer


def train(path: Path, *, resume: bool = False, **options: Any) -> None:
    with RunDirectory(path) as run:
        tiny_trainer(run, **options).fit(resume=resume)


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "sgd"])
def test_a_new_run_needs_space_for_all_tensors_of_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, ema_decay: float
) -> None:
    needed: dict[str, tuple[int, ...]] = {}

    def note(self: RunDirectory, tensors: Any, *, ranks: int) -> None:
        assert ranks == 1
        for part, values in tensors.items():
            needed.update({f"{part}/{name}": tuple(t.shape) for name, t in (values or {}).items()})

    monkeypatch.setattr(RunDirectory, "require_checkpoint_space", note)
    train(tmp_path, steps=1, optimizer=optimizer, ema_decay=ema_decay)
    assert needed == {name: tuple(tensor.shape) for name, tensor in tensors_of(tmp_path).items()}


def test_the_log_of_a_run_that_crashed_before_its_first_checkpoint_begins_anew(
    tmp_path: Path,
) -> None:
    def crash(record: Any) -> None:
        if record["step"] == 3:
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - raised above
        train(tmp_path / "crashed", parts={"on_record": crash})
    assert [record["step"] for record in log_of(tmp_path / "crashed")] == [1, 2, 3]
    train(tmp_path / "crashed", resume=True)
    train(tmp_path / "whole")
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


def test_resumed_run_keeps_the_best_checkpoint_that_a_crash_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"validate": lambda model: {"loss": 1.0}}
    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "keep_best", lambda self, step: None)
        train(tmp_path, steps=4, parts=parts)
    assert RunDirectory(tmp_path).best() is None
    train(tmp_path, steps=4, parts=parts, resume=True)
    best = RunDirectory(tmp_path).best()
    assert best is not None
    assert best.step == 4
