"""The best step, kept past any pruning: hard links where the file system has them, copies where not."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from dragoman.errors import CorruptError
from dragoman.files import faults
from dragoman.files import manifest as manifests
from dragoman.files.atomic import Bytes, open_regular, publish_directory, remove_flat, sync_directory, temporary_name, write_file
from dragoman.training.stored import Checkpoint, open_checkpoint

_CHUNK = 1 << 22


class Kept:
    """The folder `keep` of a run directory."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / "keep"

    def open(self) -> Checkpoint | None:
        """Open the newest kept step that verifies."""
        for place in reversed(self._places()):
            try:
                return open_checkpoint(place)
            except CorruptError:
                continue
        return None

    def replace(self, checkpoint: Checkpoint) -> None:
        """Keep a verified step; the earlier one is removed only when this one is durable."""
        final = self.path / checkpoint.path.name
        if not self.path.is_dir():
            os.mkdir(self.path)
            sync_directory(self.run)
        if final not in self._places():
            temporary = self.run / temporary_name(f"keep-{checkpoint.step:08d}")
            try:
                os.mkdir(temporary)
                for name in [*checkpoint.manifest["files"], manifests.NAME]:
                    faults.point("keep.link")
                    _link_or_copy(checkpoint.path / name, temporary / name)
                publish_directory(temporary, final, point="keep")
            except BaseException:
                remove_flat(temporary)
                raise
        for place in self._places():
            if place != final:
                self._remove(place)

    def _places(self) -> list[Path]:
        return sorted(place for place in self.path.glob("step-*") if place.is_dir()) if self.path.is_dir() else []

    def _remove(self, place: Path) -> None:
        content = manifests.read_manifest(place)
        hidden = self.run / f".del-{place.name}-{os.getpid()}-{secrets.token_hex(4)}"
        os.rename(place, hidden)
        sync_directory(self.path)
        manifests.remove_listed(hidden, content)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (PermissionError, NotImplementedError, OSError):
        write_file(target, _blocks(source))


def _blocks(path: Path) -> Iterator[Bytes]:
    with open_regular(path) as descriptor:
        while block := os.read(descriptor, _CHUNK):
            yield block
