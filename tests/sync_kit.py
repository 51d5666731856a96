"""A recorder of fsync and rename, to check the order in which files become durable and visible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple


class Synced(NamedTuple):
    """A call of fsync: which file or directory, and how large a file was then."""

    inode: int
    size: int


class Moved(NamedTuple):
    """A rename, with the inode that was moved."""

    inode: int
    target: Path


class Removed(NamedTuple):
    """A removed file."""

    inode: int


class SyncRecorder:
    """Records every fsync, rename and removal of a file by this process, in order."""

    def __init__(self, monkeypatch: Any) -> None:
        self.events: list[Synced | Moved | Removed] = []
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self._moving(getattr(os, name)))
        sync, unlink = os.fsync, os.unlink

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            found = os.fstat(descriptor)
            self.events.append(Synced(found.st_ino, found.st_size))

        def remove(path: Any, **options: Any) -> None:
            inode = os.lstat(path, **options).st_ino
            unlink(path, **options)
            self.events.append(Removed(inode))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "unlink", remove)

    def _moving(self, move: Any) -> Any:
        def call(source: Any, target: Any, **options: Any) -> None:
            inode = os.lstat(source).st_ino
            move(source, target, **options)
            self.events.append(Moved(inode, Path(target)))

        return call

    def moved(self, path: Path) -> int:
        """Return the number of the event that gave a path its present contents."""
        return max(
            at for at, event in enumerate(self.events) if event == Moved(path.stat().st_ino, path)
        )

    def removed(self, inode: int) -> int:
        """Return the number of the event that removed a file."""
        return self.events.index(Removed(inode))

    def synced(self, path: Path) -> list[int]:
        """Return the events that synced a file in its present size, or a directory."""
        found = path.stat()
        same = [
            at
            for at, event in enumerate(self.events)
            if isinstance(event, Synced) and event.inode == found.st_ino
        ]
        return (
            same if path.is_dir() else [at for at in same if self.events[at].size == found.st_size]
        )  # type: ignore[union-attr]

    def check_published(self, directory: Path) -> None:
        """Assert that a directory was synced before its final rename, and its parent after it."""
        moved = self.moved(directory)
        for path in (directory, *directory.rglob("*")):
            assert min(self.synced(path), default=moved) < moved, (
                f"{path} was published before it was synced"
            )
        assert max(self.synced(directory.parent), default=-1) > moved, (
            f"the name {directory.name} is not durable"
        )
