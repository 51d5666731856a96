"""Asking whether a process lives: our own does, one that ended does not, and in doubt it does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dragoman.runtime.processes import is_process_alive


def test_this_process_lives_and_one_that_ended_does_not() -> None:
    assert is_process_alive(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not is_process_alive(ended.pid)


def test_somebody_elses_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int, signal: int) -> None:
        assert signal == 0, "nobody is to be ended"
        raise PermissionError(pid)

    monkeypatch.setattr(os, "kill", refused)
    assert is_process_alive(1)


def test_where_asking_would_end_it_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    monkeypatch.setattr(os, "name", "nt")
    try:
        assert is_process_alive(1)
    finally:
        monkeypatch.undo()  # before pytest looks for paths
