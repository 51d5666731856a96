"""The training log: complete lines, and no step logged twice after a resume."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from sync_kit import SyncRecorder

from dragoman.checkpoint.training_log import TrainingLog
from dragoman.errors import DiskError


def write(log: TrainingLog, *updates: int) -> None:
    for update in updates:
        log.append({"step": update, "loss": 1 / update})


def test_lines_come_back_in_order(tmp_path):
    log = TrainingLog(tmp_path)
    write(log, 1, 2, 3)
    log.sync()
    assert [record["step"] for record in log.records()] == [1, 2, 3]
    assert log.path.read_text().splitlines()[1] == '{"step": 2, "loss": 0.5}'
    log.close()


def test_a_resumed_run_counts_no_step_twice(tmp_path):
    """Repeated steps are not logged twice (joeynmt#172 restarts its count)."""
    log = TrainingLog(tmp_path)
    write(log, 1, 2, 3, 4, 5)
    assert log.truncate(3) == 2
    write(log, 4, 5, 6)
    log.close()
    assert [record["step"] for record in log.records()] == [1, 2, 3, 4, 5, 6]
    assert [json.loads(line)["step"] for line in log.discarded.read_text().splitlines()] == [4, 5]


def test_lines_are_durable_after_a_sync_and_kept_before_they_are_taken_back(tmp_path, monkeypatch):
    log, recorder = TrainingLog(tmp_path), SyncRecorder(monkeypatch)
    write(log, 1, 2, 3)
    assert not recorder.events
    log.sync()
    assert recorder.synced(log.path) == [0]
    log.truncate(1)
    assert recorder.synced(log.discarded) == [1]
    assert recorder.synced(log.path) == [2]  # cut only when the lines are safe elsewhere


def test_incomplete_last_line_is_removed(tmp_path):
    log = TrainingLog(tmp_path)
    write(log, 1, 2)
    log.close()
    with log.path.open("ab") as file:
        file.write(b'{"update": 3, "lo')
    assert [record["step"] for record in log.records()] == [1, 2]
    assert log.truncate(2) == 1
    assert log.path.read_bytes().endswith(b'"loss": 0.5}\n')
    assert log.discarded.read_bytes() == b'{"update": 3, "lo\n'


def test_truncating_an_absent_log_does_nothing(tmp_path):
    log = TrainingLog(tmp_path)
    assert log.truncate(0) == 0
    write(log, 1)
    assert log.truncate(1) == 0
    assert not log.discarded.exists()


def test_numbers_that_are_not_finite_stay_readable(tmp_path):
    log = TrainingLog(tmp_path)
    log.append({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    log.close()
    assert list(log.records()) == [{"step": 1, "loss": "nan", "grad_norm": "inf"}]


def failing(monkeypatch, number: int) -> None:
    def write(descriptor: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", write)


def test_full_disk_buffers_log_lines(tmp_path, monkeypatch):
    log = TrainingLog(tmp_path)
    write(log, 1)
    with monkeypatch.context() as patch:
        failing(patch, errno.ENOSPC)
        write(log, 2, 3)
        with pytest.raises(DiskError, match="No space left on device"):
            log.sync()
    assert [record["step"] for record in log.records()] == [1]
    write(log, 4)
    log.close()
    assert [record["step"] for record in log.records()] == [1, 2, 3, 4]


def test_buffered_lines_are_limited(tmp_path, monkeypatch):
    log = TrainingLog(tmp_path)
    failing(monkeypatch, errno.ENOSPC)
    with pytest.raises(DiskError, match="No space left"):
        log.append({"step": 1, "text": "x" * (1 << 20)})


def test_other_disk_errors_are_raised(tmp_path, monkeypatch):
    log = TrainingLog(tmp_path)
    failing(monkeypatch, errno.EIO)
    with pytest.raises(DiskError, match="Input/output error"):
        write(log, 1)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": null}',
        '{"step": [1]}',
        '{"step": 1e999}',
        '{"step": true}',
        "[" * 100_000,
        "[1]",
    ],
)
def test_invalid_line_is_discarded(tmp_path: Path, line: str) -> None:
    log = TrainingLog(tmp_path)
    log.append({"step": 1})
    log.close()
    with log.path.open("a") as file:
        file.write(line + "\n")
    assert log.truncate(5) == 1
    assert log.path.read_text() == '{"step": 1}\n'
    assert log.discarded.read_text() == line + "\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_half_a_mebibyte_of_lines_is_buffered(tmp_path, monkeypatch, number):
    log = TrainingLog(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, number)
        log.append({"step": 1, "text": "x" * (1 << 19)})
    write(log, 2)
    log.close()
    assert [record["step"] for record in log.records()] == [1, 2]


def test_buffered_lines_of_discarded_steps_are_not_written(tmp_path, monkeypatch):
    log = TrainingLog(tmp_path)
    write(log, 1)
    with monkeypatch.context() as patch:
        failing(patch, errno.ENOSPC)
        write(log, 2, 3)
    log.truncate(1)
    write(log, 2)
    log.close()
    assert [record["step"] for record in log.records()] == [1, 2]


def test_lines_without_a_step_are_kept_and_every_resume_adds_to_the_discarded(tmp_path):
    log = TrainingLog(tmp_path)
    log.append({"event": "start", "text": "größer"})
    write(log, 1, 2)
    assert log.truncate(1) == 1
    write(log, 2, 3)
    assert log.truncate(1) == 2
    assert [record.get("step") for record in log.records()] == [None, 1]
    assert "größer" in log.path.read_text(encoding="utf-8")
    discarded = log.discarded.read_text().splitlines()
    assert [json.loads(line)["step"] for line in discarded] == [2, 2, 3]
