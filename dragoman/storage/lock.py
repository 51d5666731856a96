"""Locks of directories and outputs: flock, for directories a lease file where it is ignored."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dragoman.errors import LockedError
from dragoman.storage.atomic_and_safe_file_io import is_process_alive, open_run_file, read_regular
from dragoman.storage.disk_space_and_errors import os_errors_converted

LEASE_HEARTBEAT_SECONDS = 10.0  # seconds between heartbeats
LEASE_STALE_SECONDS = 120.0  # seconds without a heartbeat after which the owner counts as dead


class Lease:
    """Ownership by an exclusively created file that a thread keeps fresh."""

    def __init__(
        self,
        path: Path,
        *,
        beat: float = LEASE_HEARTBEAT_SECONDS,
        stale: float = LEASE_STALE_SECONDS,
    ) -> None:
        self.path, self._beat, self._stale = path, beat, stale
        self._token = secrets.token_hex(8)
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Create the file, or raise LockedError with its owner; a dead owner's is moved away."""
        with os_errors_converted(self.path):
            while not self._create():
                owner = _read_owner(self.path)
                if owner is not None and self._is_owner_alive(owner):
                    raise LockedError(
                        f"only one process may train in {self.path.parent}",
                        found=f"process {owner.get('pid')} on {owner.get('host')}, whose lease "
                        f"{self.path.name} is fresh",
                        fix=f"stop it, or wait {self._stale:.0f} seconds after its end",
                    )
                with contextlib.suppress(FileNotFoundError):
                    os.rename(
                        self.path,
                        self.path.with_name(f".del-lease-{os.getpid()}-{secrets.token_hex(4)}"),
                    )
        self._thread = threading.Thread(target=self._refresh, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is still ours."""
        self._released.set()
        if self._thread is not None:
            self._thread.join()
        owner = _read_owner(self.path)
        if owner is not None and owner.get("token") == self._token:
            os.unlink(self.path)

    def _create(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        content = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "token": self._token,
        }
        try:
            os.write(descriptor, json.dumps(content).encode())
        finally:
            os.close(descriptor)
        return True

    def _is_owner_alive(self, owner: dict[str, Any]) -> bool:
        """Whether the owner is alive: by its process id on this machine, else by the file's age."""
        pid = owner.get("pid")
        here = (
            _boot_id()
            and owner.get("boot") == _boot_id()
            and owner.get("host") == socket.gethostname()
        )
        if here and isinstance(pid, int) and pid > 0:
            # a boot id means Linux, where signal 0 only tests
            return is_process_alive(pid)
        # Touching our own file gives the file server's time, so that two machines' clocks need not
        # agree.
        probe = self.path.with_name(f".tmp-lease-{os.getpid()}-{secrets.token_hex(4)}")
        probe.touch(exist_ok=False)
        try:
            return probe.stat().st_mtime - self.path.stat().st_mtime < self._stale
        finally:
            probe.unlink()

    def _refresh(self) -> None:
        while not self._released.wait(self._beat):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _read_owner(path: Path) -> dict[str, Any] | None:
    """Return the owner; None if the file is gone, an empty one if it cannot be read."""
    try:
        content = json.loads(read_regular(path, 10_000))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):  # a link, a pipe, or not our format: no owner
        return {}
    return content if isinstance(content, dict) else {}


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


try:
    import fcntl
except ImportError:  # a system without flock uses the lease
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# Strong references, so that an unreferenced lock is still closed in a forked child.
_held_locks: set[DirectoryLock] = set()


class DirectoryLock:
    """Ownership of a directory by `flock` on it and on its file `lock`; otherwise by a lease.

    The directory's lock cannot be deleted while it is held. The file's lock is for file systems
    that cannot lock directories, and names the holder; a deleted file is created again by `check`.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "lock"
        self._rule = f"only one process may train in {directory}"
        self._descriptor = -1
        self._directory = -1
        self._lease: Lease | None = None

    @property
    def held(self) -> bool:
        """Whether we own the directory."""
        return self._descriptor >= 0 or self._lease is not None

    def acquire(self) -> None:
        """Lock the directory, or raise LockedError with the owner; nothing is written then."""
        if self.held:
            return
        self._lock_directory()
        try:
            descriptor = _lock_file(self.path, self._rule)
            if not self._are_locks_honored():
                os.close(descriptor)
                logger.warning(
                    "%s ignores file locks: using a lease file instead; a local disk would be "
                    "safer",
                    self.path.parent,
                )
                lease = Lease(self.path.with_name("lease"))
                lease.acquire()
                self._lease = lease
                return
        except BaseException:
            self._close_directory()
            raise
        self._descriptor = descriptor
        _held_locks.add(self)
        _write_holder(self._descriptor, self.path)

    def check(self) -> None:
        """Create a deleted lock file again; raise LockedError if another process has taken it."""
        if self._descriptor < 0 or _is_file_at(self._descriptor, self.path):
            return
        logger.warning(
            "%s was deleted or replaced under a running training, and is created again", self.path
        )
        descriptor = _lock_file(self.path, self._rule)
        os.close(self._descriptor)
        self._descriptor = descriptor
        _write_holder(self._descriptor, self.path)

    def require_unlocked(self) -> None:
        """Raise LockedError if another process owns the directory; nothing is written."""
        if self.held or not self.path.parent.is_dir():
            return
        self._lock_directory()
        self._close_directory()
        try:
            descriptor = os.open(
                self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
            )
        except OSError:  # it was never locked, or `acquire` would reject it
            return
        try:
            if not _try_flock(descriptor):
                raise _locked_error(self._rule, os.pread(descriptor, 1000, 0))
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Release the directory."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close our descriptors; a forked child does so, or it would hold the lock after its
        parent.
        """
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held_locks.discard(self)
        self._close_directory()

    def _lock_directory(self) -> None:
        """Lock the directory itself, where the file system supports it."""
        if not hasattr(os, "O_DIRECTORY"):
            return
        with os_errors_converted(self.path):
            self._directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not _try_flock(self._directory):
            self._close_directory()
            raise _locked_error(self._rule, _read_holder(self.path))

    def _close_directory(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _are_locks_honored(self) -> bool:
        """Whether the file system honours locks: a second lock on a locked file must fail."""
        descriptor = open_run_file(self.path, os.O_RDWR)
        try:
            return not _try_flock(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def lock_output(path: Path) -> Iterator[None]:
    """Own an output file for a while, by `flock` on a file beside it, which is deleted at the end.

    Raise LockedError with the owner if another process owns it.
    """
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _lock_file(lock, f"only one process may write {path}")
    try:
        _write_holder(descriptor, lock)
        yield
    finally:
        # Deleted while it is locked: who has opened it meanwhile sees that it is not there.
        with contextlib.suppress(OSError):
            os.unlink(lock)
        os.close(descriptor)


def _lock_file(path: Path, rule: str) -> int:
    """Lock the file that has this name, not a deleted one; return its descriptor."""
    while True:
        with os_errors_converted(path):
            descriptor = open_run_file(path, os.O_RDWR | os.O_CREAT)
        if not _try_flock(descriptor):
            holder = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            raise _locked_error(rule, holder)
        if _is_file_at(descriptor, path):
            return descriptor
        os.close(descriptor)


def _write_holder(descriptor: int, path: Path) -> None:
    """Write the holder into the lock file, for people."""
    text = json.dumps(
        {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
    )
    with os_errors_converted(path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode() + b"\n", 0)


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    ours = os.fstat(descriptor)
    return (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino)


def _read_holder(path: Path) -> bytes:
    """Return the text of a lock that another process holds; for people only."""
    try:
        return read_regular(path, 1000)
    except OSError:
        return b""


def _try_flock(descriptor: int) -> bool:
    """Try to lock; return True where the system has no locks."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, EOPNOTSUPP: found by _are_locks_honored
        return True
    return True


def _locked_error(rule: str, holder: bytes) -> LockedError:
    return LockedError(
        rule,
        found=_describe_holder(holder),
        fix="wait for it to end, stop it, or write elsewhere",
    )


def _describe_holder(holder: bytes) -> str:
    """Return a description of the holder, for people; the text is not trusted."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        content = json.loads(holder)
        return (
            f"process {int(content['pid'])} on {str(content['host'])[:80]} running since "
            f"{str(content['start'])[:40]}"
        )
    return "another running process"


def _close_all_in_child() -> None:
    for lock in list(_held_locks):
        lock.close_descriptors()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_in_child)
