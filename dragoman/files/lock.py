"""One owner a directory: a lock that the kernel releases even when its holder is killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from pathlib import Path

from dragoman.errors import LockedError
from dragoman.files.atomic import open_own, read_regular
from dragoman.files.disk import explaining
from dragoman.files.lease import Lease

try:
    import fcntl
except ImportError:  # a system without flock takes the lease
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_held: set[Lock] = set()  # strong, so that a lock nobody refers to any more is still closed in a forked child


class Lock:
    """Ownership of a directory through `flock`, on the directory itself and on its file `lock`; without locks, a lease.

    The directory's lock cannot be deleted from under its holder. The file's is for file systems that lock no directories, and
    tells people who the holder is; one that was deleted is made anew at the next `check`.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "lock"
        self._descriptor = -1
        self._directory = -1
        self._lease: Lease | None = None

    @property
    def held(self) -> bool:
        """Say whether we own the directory."""
        return self._descriptor >= 0 or self._lease is not None

    def acquire(self) -> None:
        """Take the directory, or raise LockedError naming the process that has it; nothing is written then."""
        if self.held:
            return
        self._lock_directory()
        try:
            descriptor = self._lock_file()
            if not self._works():
                os.close(descriptor)
                log.warning("%s ignores file locks: using a lease file instead; a local disk would be safer", self.path.parent)
                lease = Lease(self.path.with_name("lease"))
                lease.acquire()
                self._lease = lease
                return
        except BaseException:
            self._close_directory()
            raise
        self._descriptor = descriptor
        _held.add(self)
        self._sign()

    def check(self) -> None:
        """Make sure that we still own the directory: make a deleted lock file anew, or raise LockedError if another was quicker."""
        if self._descriptor < 0 or _is_at(self._descriptor, self.path):
            return
        log.warning("%s was deleted or replaced under a running training, and is made anew", self.path)
        descriptor = self._lock_file()
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._sign()

    def require_free(self) -> None:
        """Raise LockedError if another process has the directory; nothing is written."""
        if self.held or not self.path.parent.is_dir():
            return
        self._lock_directory()
        self._close_directory()
        try:
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError:  # nobody has ever held it, or it is none that `acquire` would take
            return
        try:
            if not _flock(descriptor):
                raise _locked(self.path, os.pread(descriptor, 1000, 0))
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """Give the directory back."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self.forget()

    def forget(self) -> None:
        """Close our descriptors; a forked child does so at birth, or it would hold the lock after its parent's death."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.discard(self)
        self._close_directory()

    def _lock_directory(self) -> None:
        """Lock the directory itself, where the file system can."""
        if not hasattr(os, "O_DIRECTORY"):
            return
        with explaining(self.path):
            self._directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if not _flock(self._directory):
            self._close_directory()
            raise _locked(self.path, _read_holder(self.path))

    def _lock_file(self) -> int:
        """Lock the file that has the lock's name, and not one that was deleted meanwhile; return its descriptor."""
        while True:
            with explaining(self.path):
                descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT)
            if not _flock(descriptor):
                holder = os.pread(descriptor, 1000, 0)
                os.close(descriptor)
                raise _locked(self.path, holder)
            if _is_at(descriptor, self.path):
                return descriptor
            os.close(descriptor)

    def _sign(self) -> None:
        """Write who holds the lock, for people."""
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "start": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        with explaining(self.path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text.encode() + b"\n", 0)

    def _close_directory(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _works(self) -> bool:
        """Try to lock what we hold a second time: success means that this file system ignores locks."""
        descriptor = open_own(self.path, os.O_RDWR)
        try:
            return not _flock(descriptor)
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that a path names."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    ours = os.fstat(descriptor)
    return (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino)


def _read_holder(path: Path) -> bytes:
    """Return the text of a lock that another process holds; it is for people only."""
    try:
        return read_regular(path, 1000)
    except OSError:
        return b""


def _flock(descriptor: int) -> bool:
    """Try to take the lock; a system that knows no locks seems to give it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, EOPNOTSUPP: the probe finds out
        return True
    return True


def _locked(path: Path, holder: bytes) -> LockedError:
    return LockedError(
        f"only one process may train in {path.parent}",
        found=_describe(holder),
        fix="wait for it to end, stop it, or choose another directory",
    )


def _describe(holder: bytes) -> str:
    """Read who holds the lock, for people only: the text is never trusted."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        content = json.loads(holder)
        return f"process {int(content['pid'])} on {str(content['host'])[:80]} at work since {str(content['start'])[:40]}"
    return "another process at work"


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
