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
from dragoman.files.disk import explaining
from dragoman.files.lease import Lease

try:
    import fcntl
except ImportError:  # a system without flock takes the lease
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_held: set[Lock] = set()  # strong, so that a lock nobody refers to any more is still closed in a forked child


class Lock:
    """Ownership of a directory through `flock` on its file `lock`; where the file system ignores locks, a lease."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "lock"
        self._descriptor = -1
        self._lease: Lease | None = None

    @property
    def held(self) -> bool:
        """Say whether we own the directory."""
        return self._descriptor >= 0 or self._lease is not None

    def acquire(self) -> None:
        """Take the directory, or raise LockedError naming the process that has it; nothing is written then."""
        if self.held:
            return
        with explaining(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        if not _flock(descriptor):
            holder = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            raise _locked(self.path, holder)
        if not self._works():
            os.close(descriptor)
            log.warning("%s ignores file locks: using a lease file instead; a local disk would be safer", self.path.parent)
            self._lease = Lease(self.path.with_name("lease"))
            self._lease.acquire()
            return
        self._descriptor = descriptor
        _held.add(self)
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "start": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        with explaining(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode() + b"\n", 0)

    def require_free(self) -> None:
        """Raise LockedError if another process has the directory; nothing is written."""
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
        """Close our descriptor; a forked child does so at birth, or it would hold the lock after its parent's death."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held.discard(self)

    def _works(self) -> bool:
        """Try to lock what we hold a second time: success means that this file system ignores locks."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            return not _flock(descriptor)
        finally:
            os.close(descriptor)


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
