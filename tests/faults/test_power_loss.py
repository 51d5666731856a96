"""After a power loss at any moment there is a verified step as new as the last reported one."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from fault_filesystem import Disk, Recorder, materialise
from fault_processes import leftovers, show

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import CorruptError


def save_checkpoint(run: RunDirectory, step: int) -> None:
    weight = torch.full((2, 3), float(step))
    run.training_log.append({"step": step})
    run.save_checkpoint(
        step,
        {"weights": {"w": weight}, "optimizer": {"w.exp_avg": weight}, "ema": None},
        {"step": step},
    )


def survivors(operations, before: Path, run_path: Path, reported: int) -> int:
    """Check every state after every operation; returns how many different ones there were."""
    disk, seen = Disk(before), set()
    for operation in [("report", reported), *operations]:
        if operation[0] == "report":
            reported = operation[1]
        else:
            disk.apply(operation)
        for state in disk.crashes():
            key = (reported, hashlib.sha256(repr(sorted(state.items())).encode()).digest())
            if key in seen:
                continue
            seen.add(key)
            with RunDirectory(materialise(state, run_path / "crash")) as run:
                newest = run.latest()
                assert newest is not None, operation
                assert newest.step >= reported, (operation, sorted(state))
                assert run.best() is not None or reported < 2, operation
                assert leftovers(run.path) == []
            shutil.rmtree(run_path / "crash")
    return len(seen)


def record(run_path: Path, monkeypatch, actions) -> tuple[list, Path]:
    """Publish twice, then do something while its calls are written down."""
    root, before = run_path / "run", run_path / "before"
    with RunDirectory(root, keep_checkpoints=1) as run:
        save_checkpoint(run, 1)
        save_checkpoint(run, 2)
        run.keep_best(2)
        shutil.copytree(root, before)
        with monkeypatch.context() as patch:
            recorder = Recorder(root, patch)
            actions(run, recorder)
    return recorder.operations, before


def test_power_loss_during_save_and_prune(memory, monkeypatch):
    run_path = memory / "power"
    run_path.mkdir()

    def actions(run: RunDirectory, recorder: Recorder) -> None:
        save_checkpoint(run, 3)
        recorder.report(3)
        run.keep_best(3)
        assert run.prune() == [1, 2]
        save_checkpoint(run, 4)
        recorder.report(4)

    operations, before = record(run_path, monkeypatch, actions)
    names = {operation[0] for operation in operations}
    assert {"create", "write", "fsync", "mkdir", "rename", "link", "remove"} <= names
    states = survivors(operations, before, run_path, reported=2)
    shutil.rmtree(run_path)
    show("power-loss", {"power_loss_operations": len(operations), "power_loss_states": states})
    assert states > 60


def test_simulated_power_loss_detects_a_missing_fsync(memory, monkeypatch):
    """Checks the check: without fsync, some state has no valid newest checkpoint."""
    run_path = memory / "careless"
    run_path.mkdir()

    def actions(run: RunDirectory, recorder: Recorder) -> None:
        save_checkpoint(run, 3)
        recorder.report(3)

    operations, before = record(run_path, monkeypatch, actions)
    careless = [
        operation
        for operation in operations
        if operation[0] != "fsync" or not operation[1].endswith(".safetensors")
    ]
    with pytest.raises((AssertionError, CorruptError)):
        survivors(careless, before, run_path, reported=2)
    shutil.rmtree(run_path / "crash")
    no_directory = [operation for operation in operations if operation != ("fsync", ".")]
    with pytest.raises((AssertionError, CorruptError)):
        survivors(no_directory, before, run_path, reported=2)
    shutil.rmtree(run_path)
