"""The lock's stand-in where a file system ignores locks: a file whose heartbeat says that its owner lives."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

from dragoman.errors import LockedError
from dragoman.files.atomic import read_regular
from dragoman.files.disk import explaining
from dragoman.files.processes import is_alive

BEAT = 10.0  # seconds between heartbeats
STALE = 120.0  # seconds without one after which the owner counts as dead


class Lease:
    """Ownership by a file that only one can create, kept fresh by a thread."""

    def __init__(self, path: Path, *, beat: float = BEAT, stale: float = STALE) -> None:
        self.path, self._beat, self._stale = path, beat, stale
        self._token = secrets.token_hex(8)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Create the file, or raise LockedError naming its living owner; a dead owner's file is set aside."""
        with explaining(self.path):
            while not self._create():
                owner = _read(self.path)
                if owner is not None and self._alive(owner):
                    raise LockedError(
                        f"only one process may train in {self.path.parent}",
                        found=f"process {owner.get('pid')} on {owner.get('host')}, whose lease {self.path.name} is fresh",
                        fix=f"stop it, or wait {self._stale:.0f} seconds after its end",
                    )
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.path, self.path.with_name(f".del-lease-{os.getpid()}-{secrets.token_hex(4)}"))
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is still ours."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        owner = _read(self.path)
        if owner is not None and owner.get("token") == self._token:
            os.unlink(self.path)

    def _create(self) -> bool:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        content = {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot_id(), "token": self._token}
        try:
            os.write(descriptor, json.dumps(content).encode())
        finally:
            os.close(descriptor)
        return True

    def _alive(self, owner: dict[str, Any]) -> bool:
        """Ask the system about a process of this machine; elsewhere, compare the file's age by the file server's clock."""
        pid = owner.get("pid")
        here = _boot_id() and owner.get("boot") == _boot_id() and owner.get("host") == socket.gethostname()
        if here and isinstance(pid, int) and pid > 0:  # a boot id means Linux, where signal 0 only asks
            return is_alive(pid)
        # Touching a file of our own asks the server for its time, so that two machines' clocks need not agree.
        probe = self.path.with_name(f".tmp-lease-{os.getpid()}-{secrets.token_hex(4)}")
        probe.touch(exist_ok=False)
        try:
            return probe.stat().st_mtime - self.path.stat().st_mtime < self._stale
        finally:
            probe.unlink()

    def _keep(self) -> None:
        while not self._ended.wait(self._beat):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _read(path: Path) -> dict[str, Any] | None:
    """Read an owner's lines; None when the file is gone, an empty one when it cannot be read."""
    try:
        content = json.loads(read_regular(path, 10_000))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):  # a link, a pipe, or not what we write: nobody's
        return {}
    return content if isinstance(content, dict) else {}


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
