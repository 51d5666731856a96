"""R7: one trainer a directory, and a directory that cannot be written is refused before any work."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from fault_victims import fingerprint, loop, newest_step, show, wait_for_update

NOBODY = 65534


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


def test_a_second_trainer_is_refused_and_writes_nothing(victims, reference, place):
    want, _ = reference(40, 40)
    first = loop(victims, place, updates=40, every=40, fault="update.before:20:sleep")
    wait_for_update(place, 19, first)
    before = snapshot(place)
    assert loop(victims, place, updates=40, every=40).wait() == 73
    assert snapshot(place) == before
    assert f"process {first.pid} on" in place.with_name("run.output").read_text()
    assert first.wait() == 0
    assert fingerprint(place) == want
    show("R7", {"second_trainer_exit": 73, "bytes_written": 0})


def test_after_a_kill_the_next_start_succeeds(victims, reference, place):
    want, _ = reference(40, 10)
    first = loop(victims, place, updates=40, every=10, pause=0.005)
    wait_for_update(place, 15, first)
    first.send()
    assert first.wait() == -9
    assert loop(victims, place, updates=40, every=10).wait() == 0
    assert fingerprint(place) == want


def test_a_copied_run_is_not_locked(victims, reference, place):
    want, _ = reference(40, 10)
    first = loop(victims, place, updates=40, every=10, fault="update.before:15:sleep")
    wait_for_update(place, 14, first)
    copied = place.with_name("copied")
    shutil.copytree(place, copied)
    assert loop(victims, copied, updates=40, every=10).wait() == 0
    assert fingerprint(copied) == want
    assert first.wait() == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody who may not write")
def test_a_directory_without_permission_is_exit_77(victims):
    """A read-only directory once made a save succeed without a file (Lightning-AI/pytorch-lightning#21800)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        run = Path(folder) / "run"
        run.mkdir(mode=0o555)
        assert loop(victims, run, user=NOBODY).wait() == 77
        assert os.listdir(run) == []
        assert str(run) in (Path(folder) / "run.output").read_text()
    show("R7", {"no_permission_exit": 77})


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_exit_77_for_the_user(victims, tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o555)
    assert loop(victims, run).wait() == 77
    assert os.listdir(run) == []


def test_numbers_that_are_not_finite_are_not_published(victims, place):
    """R8's storage: exit 70, and the last finite step is intact."""
    assert loop(victims, place, nan_at=8).wait() == 70
    assert newest_step(place) == 4
    assert "inner.bias" in place.with_name("run.output").read_text()
    show("R8", {"exit": 70, "published_not_finite": 0})
