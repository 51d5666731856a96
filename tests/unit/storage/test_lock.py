"""One owner per directory, by the kernel's lock, or by a lease where a file system has none."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from dragoman.errors import BundleError, LockedError
from dragoman.storage import lock as locks
from dragoman.storage.lock import DirectoryLock, Lease, lock_output

HOLD = """
import pathlib, sys, time
from dragoman.storage.lock import DirectoryLock
DirectoryLock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_second_owner_is_rejected_with_the_pid_of_the_first(tmp_path):
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    before = (tmp_path / "lock").read_bytes()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on") as caught:
        second.acquire()
    assert caught.value.exit_code == 73
    assert str(tmp_path) in str(caught.value)
    assert (tmp_path / "lock").read_bytes() == before
    first.release()
    second.acquire()
    assert second.held
    second.release()
    assert not second.held


def test_the_kernel_frees_the_lock_of_a_killed_owner(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(LockedError, match=f"process {holder.pid} on"):
        DirectoryLock(tmp_path).acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_forked_child_does_not_hold_the_lock(tmp_path):
    """A worker that outlives a killed trainer must not lock the run for ever."""
    program = (
        "import os, sys, time, pathlib\nfrom dragoman.storage.lock import DirectoryLock\n"
        "DirectoryLock(pathlib.Path(sys.argv[1])).acquire()\n"
        "if os.fork() == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(60)\nos._exit(0)\n"
    )
    done = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert done.stdout is not None
    child = int(done.stdout.readline())
    done.wait()
    done.stdout.close()
    try:
        lock = DirectoryLock(tmp_path)
        lock.acquire()
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_copied_lock_file_locks_nothing(tmp_path):
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "start": "long ago"}))
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_lock_s_text_is_not_trusted(tmp_path):
    first = DirectoryLock(tmp_path)
    first.acquire()
    (tmp_path / "lock").write_bytes(b"\xff{")
    with pytest.raises(LockedError, match="another running process"):
        DirectoryLock(tmp_path).acquire()
    first.release()


def test_acquiring_twice_is_acquiring_once(tmp_path):
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.acquire()
    lock.release()
    lock.release()


@pytest.mark.parametrize("answer", ["ignores", "refuses"])
def test_a_file_system_without_locks_takes_a_lease(tmp_path, monkeypatch, caplog, answer):
    def flock(descriptor: int, operation: int) -> None:
        if answer == "refuses":
            raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    with caplog.at_level(logging.WARNING):
        first.acquire()
    assert "ignores file locks" in caplog.text
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    assert not (tmp_path / "lease").exists()


def test_an_owner_is_found_where_directories_cannot_be_locked(tmp_path, monkeypatch):
    flock = locks.fcntl.flock

    def flock_files_only(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(locks.fcntl, "flock", flock_files_only)
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    second.require_unlocked()
    first.acquire()
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        second.require_unlocked()
    first.release()
    second.require_unlocked()


def owner(path, **changes) -> None:
    first = Lease(path)
    first._create()
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_lease_of_a_dead_process_here_is_taken(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner(tmp_path / "lease", pid=ended.pid)
    lease = Lease(tmp_path / "lease")
    lease.acquire()
    assert json.loads((tmp_path / "lease").read_text())["pid"] == os.getpid()
    lease.release()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"host": "elsewhere", "pid": 7}, "process 7 on elsewhere"),
        ({"boot": "before the reboot"}, f"process {os.getpid()} on"),  # its number is in use again
    ],
    ids=["another machine", "an earlier boot"],
)
def test_a_lease_from_elsewhere_counts_by_its_age(tmp_path, changes, found):
    path = tmp_path / "lease"
    owner(path, **changes)
    with pytest.raises(LockedError, match=found):
        Lease(path).acquire()
    long_ago = path.stat().st_mtime - 121
    os.utime(path, (long_ago, long_ago))
    lease = Lease(path)
    lease.acquire()
    lease.release()


def test_an_unreadable_lease_counts_by_its_age(tmp_path):
    path = tmp_path / "lease"
    path.write_bytes(b"{")
    with pytest.raises(LockedError, match="process None"):
        Lease(path).acquire()


def test_a_lease_s_heartbeat_keeps_it_fresh(tmp_path):
    path = tmp_path / "lease"
    lease = Lease(path, beat=0.01)
    lease.acquire()
    os.utime(path, (0, 0))
    for _ in range(1000):
        if path.stat().st_mtime > 0:
            break
        time.sleep(0.01)
    assert path.stat().st_mtime > 0
    lease.release()


def test_a_lease_that_was_taken_over_is_not_removed(tmp_path):
    path = tmp_path / "lease"
    lease = Lease(path)
    lease.acquire()
    path.write_text(json.dumps({"token": "another"}))
    lease.release()
    assert path.exists()


def test_a_lease_is_fresh_for_two_minutes_and_touched_every_ten_seconds(tmp_path, monkeypatch):
    path = tmp_path / "lease"
    owner(path, host="elsewhere")
    now = path.stat().st_mtime
    os.utime(path, (now - 110, now - 110))
    with pytest.raises(LockedError, match="wait 120 seconds after its end"):
        Lease(path).acquire()
    path.unlink()
    lease, waited = Lease(path), []
    monkeypatch.setattr(lease._released, "wait", lambda seconds: not waited.append(seconds))
    lease.acquire()
    lease.release()
    assert waited == [10.0]


def test_a_failed_acquisition_leaves_the_directory_unlocked(tmp_path):
    (tmp_path / "lock").mkdir()
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    with pytest.raises(BundleError, match="found a directory"):
        first.acquire()
    assert not first.held
    (tmp_path / "lock").rmdir()
    second.acquire()
    second.release()


def test_a_lock_names_its_holder_in_place_of_a_longer_text(tmp_path):
    (tmp_path / "lock").write_text("x" * 900)
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    lock.require_unlocked()  # by another process
    lock.release()


def test_output_has_one_owner_and_its_lock_file_is_deleted(tmp_path):
    output = tmp_path / "out.txt"
    with lock_output(output):
        with (
            pytest.raises(LockedError, match=rf"write .*out\.txt; found process {os.getpid()} on"),
            lock_output(output),
        ):
            pass
        with lock_output(tmp_path / "other.txt"):
            pass
    assert list(tmp_path.iterdir()) == []
    with lock_output(output):
        pass


def test_output_lock_that_was_deleted_meanwhile_is_made_anew(tmp_path, monkeypatch):
    """The owner before deletes its file after we opened it and before we lock it."""
    output, path = tmp_path / "out.txt", tmp_path / "out.txt.lock"
    found, flock = list[bool](), locks._try_flock

    def delete_once(descriptor):
        if not found:
            path.unlink()
        found.append(path.exists())
        return flock(descriptor)

    monkeypatch.setattr(locks, "_try_flock", delete_once)
    with lock_output(output):
        assert found == [False, True]
        assert path.exists()
