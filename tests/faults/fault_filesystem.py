"""A simulated file system that yields every state a power loss may leave behind.

The model is POSIX at its meanest. A file's bytes are safe after its fsync and a directory's entries
after the directory's. Until then bytes may be missing, zero or cut off, and of the changed entries
none, all or any first few may have arrived.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Operation = tuple[Any, ...]

# What may have become of bytes that were not synced, given those that were.
LOSSES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "absent": lambda safe, now: safe,
    "zeros": lambda safe, now: safe + bytes(max(0, len(now) - len(safe))),
    "half": lambda safe, now: safe + now[len(safe) : len(safe) + (len(now) - len(safe)) // 2],
}


class Recorder:
    """Wraps `os` and records every call that changes a directory."""

    def __init__(self, root: Path, monkeypatch: Any) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._paths: dict[int, str] = {}
        for name in (
            "open",
            "close",
            "write",
            "fsync",
            "mkdir",
            "rename",
            "unlink",
            "rmdir",
            "link",
        ):
            monkeypatch.setattr(
                os, name, self._before(getattr(os, name), getattr(self, f"_on_{name}"))
            )

    def report(self, step: int) -> None:
        """Record that the run reported a step as published."""
        self.operations.append(("report", step))

    def _before(self, real: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            note(result, *args)
            return result

        return call

    def _inside(self, path: Any) -> str | None:
        try:
            return Path(path).relative_to(self.root).as_posix()
        except (TypeError, ValueError):
            return None

    def _on_open(self, descriptor: int, path: Any, flags: int, *rest: Any) -> None:
        inside = self._inside(path)
        if inside is not None:
            self._paths[descriptor] = inside
            if flags & os.O_CREAT:
                self.operations.append(("create", inside))

    def _on_close(self, result: None, descriptor: int) -> None:
        self._paths.pop(descriptor, None)

    def _on_write(self, written: int, descriptor: int, data: Any) -> None:
        if descriptor in self._paths:
            self.operations.append(("write", self._paths[descriptor], bytes(data)[:written]))

    def _on_fsync(self, result: None, descriptor: int) -> None:
        if descriptor in self._paths:
            self.operations.append(("fsync", self._paths[descriptor]))

    def _on_mkdir(self, result: None, path: Any, *rest: Any) -> None:
        self._note("mkdir", path)

    def _on_rename(self, result: None, source: Any, target: Any) -> None:
        self._note("rename", source, target)

    def _on_link(self, result: None, source: Any, target: Any) -> None:
        self._note("link", source, target)

    def _on_unlink(self, result: None, path: Any) -> None:
        self._note("remove", path)

    def _on_rmdir(self, result: None, path: Any) -> None:
        self._note("remove", path)

    def _note(self, name: str, *paths: Any) -> None:
        inside = [self._inside(path) for path in paths]
        if None not in inside:
            self.operations.append((name, *inside))


@dataclass(eq=False)
class Node:
    """A file or directory: as programs see it, and as it certainly is on the disk."""

    is_directory: bool
    now: bytes = b""
    safe: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    safe_entries: dict[str, Node] = field(default_factory=dict)


class Disk:
    """Replays operations and lists what a power loss would leave."""

    def __init__(self, root: Path) -> None:
        self.root = self._read(root)
        self._journal: list[
            tuple[Node, str, Node | None]
        ] = []  # (directory, name, what it names from then on)

    def apply(self, operation: Operation) -> None:
        """Do what a program did."""
        name, path, *rest = operation
        if name == "create":
            parent, last = self._parent(path)
            if last not in parent.entries:
                self._enter(parent, last, Node(is_directory=False))
        elif name == "mkdir":
            self._enter(*self._parent(path), Node(is_directory=True))
        elif name == "write":
            self._node(path).now += rest[0]
        elif name == "remove":
            self._enter(*self._parent(path), None)
        elif name in ("rename", "link"):
            node = self._node(path)
            if name == "rename":
                self._enter(*self._parent(path), None)
            self._enter(*self._parent(rest[0]), node)
        elif name == "fsync":
            self._sync(self._node(path))

    def crashes(self) -> Iterator[dict[str, bytes | None]]:
        """Yield every state after a power loss, as paths with their bytes, None for a directory."""
        for arrived in range(len(self._journal) + 1):
            changes: dict[Node, dict[str, Node | None]] = {}
            for directory, name, node in self._journal[:arrived]:
                changes.setdefault(directory, {})[name] = node
            for loss in LOSSES.values():
                yield dict(self._walk(self.root, "", changes, loss))

    def _walk(
        self,
        node: Node,
        path: str,
        changes: dict[Node, dict[str, Node | None]],
        loss: Callable[[bytes, bytes], bytes],
    ) -> Iterator[tuple[str, bytes | None]]:
        if not node.is_directory:
            yield path, node.now if node.now == node.safe else loss(node.safe, node.now)
            return
        yield path, None
        for name, child in sorted({**node.safe_entries, **changes.get(node, {})}.items()):
            if child is not None:
                yield from self._walk(child, f"{path}/{name}" if path else name, changes, loss)

    def _enter(self, directory: Node, name: str, node: Node | None) -> None:
        if node is None:
            del directory.entries[name]
        else:
            directory.entries[name] = node
        self._journal.append((directory, name, node))

    def _sync(self, node: Node) -> None:
        node.safe = node.now
        node.safe_entries = dict(node.entries)
        self._journal = [change for change in self._journal if change[0] is not node]

    def _node(self, path: str) -> Node:
        node = self.root
        for part in Path(path).parts:
            node = node.entries[part]
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        return self._node(Path(path).parent.as_posix()), Path(path).name

    def _read(self, path: Path) -> Node:
        if not path.is_dir():
            return Node(is_directory=False, now=path.read_bytes(), safe=path.read_bytes())
        entries = {each.name: self._read(each) for each in path.iterdir()}
        return Node(is_directory=True, entries=dict(entries), safe_entries=dict(entries))


def materialise(state: dict[str, bytes | None], target_dir: Path) -> Path:
    """Write a state into an empty directory."""
    for path, data in state.items():  # directories come before what is in them
        if data is None:
            (target_dir / path).mkdir(parents=True, exist_ok=True)
        else:
            (target_dir / path).write_bytes(data)
    return target_dir
