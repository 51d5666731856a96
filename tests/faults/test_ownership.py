"""One trainer per directory; a read-only directory is rejected before any work."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from fault_processes import fingerprint, loop, newest_step, show, wait_for_step

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.checkpoint.training_log import TrainingLog
from dragoman.errors import BundleError, LockedError
from dragoman.explain.training_plots import draw_curves
from dragoman.storage.lock import DirectoryLock

NOBODY = 65534


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_second_trainer_is_rejected_and_writes_nothing(fork_server, reference, run_path):
    want, _ = reference(40, 40)
    first = loop(fork_server, run_path, steps=40, every=40, fault="step.before:20:sleep")
    wait_for_step(run_path, 19, first)
    before = snapshot(run_path)
    assert loop(fork_server, run_path, steps=40, every=40).wait() == 73
    assert snapshot(run_path) == before
    assert f"process {first.pid} on" in run_path.with_name("run.output").read_text()
    assert first.wait() == 0
    assert fingerprint(run_path) == want
    show("ownership", {"second_trainer_exit": 73, "bytes_written": 0})


@pytest.mark.parametrize("removal", ["deleted", "replaced", "a link"])
def test_deleted_lock_file_of_a_live_run_admits_no_second_trainer(
    fork_server, reference, run_path, removal
):
    want, _ = reference(40, 10)
    first = loop(fork_server, run_path, steps=40, every=10, fault="step.before:15:sleep")
    wait_for_step(run_path, 14, first)
    (run_path / "lock").unlink()
    if removal == "replaced":
        (run_path / "lock").write_text("mine\n")
    elif removal == "a link":
        (run_path / "lock").symlink_to(run_path / "elsewhere")
    assert loop(fork_server, run_path, steps=40, every=10).wait() == 73
    assert not (run_path / "elsewhere").exists()
    if removal == "a link":
        (run_path / "lock").unlink()
    assert first.wait() == 0
    assert fingerprint(run_path) == want
    assert f'"pid": {first.pid},' in (run_path / "lock").read_text(), (
        "it was made anew at the next checkpoint"
    )


def test_without_locks_on_directories_a_deleted_lock_file_still_stops_one_of_two(
    tmp_path, monkeypatch, caplog
):
    """As on NFS: the first process notices at its next checkpoint, before it writes anything."""
    monkeypatch.setattr(DirectoryLock, "_lock_directory", lambda self: None)
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        second.acquire()
    first.path.unlink()
    first.check()
    assert "is created again" in caplog.text
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        second.acquire()
    first.path.unlink()
    second.acquire()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_run_whose_lock_was_taken_writes_no_status(tmp_path, monkeypatch):
    monkeypatch.setattr(DirectoryLock, "_lock_directory", lambda self: None)
    with RunDirectory(tmp_path) as first:
        first.status(state="training")
        (tmp_path / "lock").unlink()
        with RunDirectory(tmp_path) as second:
            second.status(state="training", update=7)
            with pytest.raises(LockedError):
                first.status(state="failed")
            with pytest.raises(LockedError):
                first.save_checkpoint(1, {}, {})
        assert (
            '"update": 7' in (tmp_path / "status.json").read_text()
            or '"update":7' in (tmp_path / "status.json").read_text()
        )


ODD = {
    "link": lambda path, target: path.symlink_to(target),
    "dangling link": lambda path, target: path.symlink_to(target.with_name("nowhere")),
    "pipe": lambda path, target: os.mkfifo(path),
    "directory": lambda path, target: path.mkdir(),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["lock", "log.jsonl"])
def test_files_of_a_run_are_not_written_through_links_or_pipes(tmp_path, name, odd):
    run, target = tmp_path / "run", tmp_path / "mine.txt"
    run.mkdir()
    target.write_text("my text\n")
    ODD[odd](run / name, target)
    with (
        pytest.raises(
            BundleError, match=f"{name} must be a plain file of the run itself; found a "
        ),
        RunDirectory(run) as directory,
    ):
        directory.training_log.append({"step": 1})
    assert target.read_text() == "my text\n"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["status.json", "run.json", "curves.png"])
def test_files_that_are_replaced_replace_a_link_too(tmp_path, name):
    run, target = tmp_path / "run", tmp_path / "mine.txt"
    run.mkdir()
    target.write_text("my text\n")
    with RunDirectory(run) as directory:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
        for update in (1, 2, 3):
            record = {
                "step": update,
                "nll": 1.0,
                "lr": 0.1,
                "grad_norm": 1.0,
                "tokens": 3,
                "padding": 0.0,
                "seconds": 0.1,
            }
            directory.training_log.append(record)
        directory.status(state="training")
        assert draw_curves(run / "log.jsonl", run / "curves.png")
    assert target.read_text() == "my text\n"


@pytest.mark.parametrize("odd", ODD)
def test_discarded_lines_are_not_written_through_links(tmp_path, odd):
    run, target = tmp_path / "run", tmp_path / "mine.txt"
    run.mkdir()
    target.write_text("my text\n")
    log = TrainingLog(run)
    log.append({"step": 1})
    log.append({"step": 2})
    ODD[odd](log.discarded, target)
    with pytest.raises(
        BundleError, match=r"log\.discarded\.jsonl must be a plain file of the run itself"
    ):
        log.truncate(1)
    assert target.read_text() == "my text\n"
    assert len(log.path.read_text().splitlines()) == 2


def test_after_a_kill_the_next_start_succeeds(fork_server, reference, run_path):
    want, _ = reference(40, 10)
    first = loop(fork_server, run_path, steps=40, every=10, pause=0.005)
    wait_for_step(run_path, 15, first)
    first.send()
    assert first.wait() == -9
    assert loop(fork_server, run_path, steps=40, every=10).wait() == 0
    assert fingerprint(run_path) == want


def test_a_copied_run_is_not_locked(fork_server, reference, run_path):
    want, _ = reference(40, 10)
    first = loop(fork_server, run_path, steps=40, every=10, fault="step.before:15:sleep")
    wait_for_step(run_path, 14, first)
    copied = run_path.with_name("copied")
    shutil.copytree(run_path, copied)
    assert loop(fork_server, copied, steps=40, every=10).wait() == 0
    assert fingerprint(copied) == want
    assert first.wait() == 0


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can switch to a user without write permission"
)
def test_a_directory_without_permission_is_exit_77(fork_server):
    """Saving must not succeed without a file (Lightning-AI/pytorch-lightning#21800)."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        run = Path(folder) / "run"
        run.mkdir(mode=0o555)
        assert loop(fork_server, run, user=NOBODY).wait() == 77
        assert os.listdir(run) == []
        assert str(run) in (Path(folder) / "run.output").read_text()
    show("ownership", {"no_permission_exit": 77})


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_exit_77_for_the_user(fork_server, tmp_path):
    run = tmp_path / "run"
    run.mkdir(mode=0o555)
    assert loop(fork_server, run).wait() == 77
    assert os.listdir(run) == []


def test_numbers_that_are_not_finite_are_not_published(fork_server, run_path):
    """Storage with a loss that is not finite: exit 70, and the last finite step is intact."""
    assert loop(fork_server, run_path, nan_at=8).wait() == 70
    assert newest_step(run_path) == 4
    assert "inner.bias" in run_path.with_name("run.output").read_text()
    show("non-finite", {"exit": 70, "published_not_finite": 0})
