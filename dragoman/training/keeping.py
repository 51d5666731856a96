"""Which steps stay: the best is kept past any pruning, and old ones of ours go, the newest never."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dragoman.errors import CorruptError
from dragoman.files import faults
from dragoman.files import manifest as manifests
from dragoman.files.atomic import Bytes, open_regular, publish_directory, remove_flat, sync_directory, temporary_name, write_file
from dragoman.files.disk import free_bytes
from dragoman.training.housekeeping import quarantine, remove
from dragoman.training.stored import Checkpoint, list_steps, open_checkpoint, step_name

_CHUNK = 1 << 22


class Kept:
    """The folder `keep` of a run directory: the best step, by hard links where the file system has them."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / "keep"

    def steps(self) -> list[int]:
        """List the kept steps, unverified: one, but for a moment."""
        return [] if self.path.is_symlink() else list_steps(self.path)

    def open(self) -> Checkpoint | None:
        """Open the newest kept step that verifies."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CorruptError):
                return open_checkpoint(self.path / step_name(step))
        return None

    def replace(self, checkpoint: Checkpoint) -> None:
        """Keep a verified step; the earlier one is removed only when this one is durable."""
        if self.path.is_symlink():
            raise manifests.corrupt(self.path, "a symbolic link")
        if not self.path.is_dir():
            os.mkdir(self.path)
            sync_directory(self.run)
        if not self._holds(checkpoint):
            self._add(checkpoint)
        for step in self.steps():
            if step != checkpoint.step:
                with contextlib.suppress(CorruptError):  # what does not verify is not ours to delete
                    remove(open_checkpoint(self.path / step_name(step), sizes_only=True), self.run)

    def _holds(self, checkpoint: Checkpoint) -> bool:
        """Say whether this very step is kept; another under its name, damaged or of another history, is put away."""
        place = self.path / step_name(checkpoint.step)
        if not place.exists():
            return False
        try:
            kept = open_checkpoint(place)
        except CorruptError as error:
            quarantine(place, error)
            return False
        if kept.manifest["files"] == checkpoint.manifest["files"]:
            return True
        remove(kept, self.run)
        return False

    def _add(self, checkpoint: Checkpoint) -> None:
        temporary = self.run / temporary_name(f"keep-{checkpoint.step:08d}")
        try:
            os.mkdir(temporary)
            for name in [*checkpoint.manifest["files"], manifests.NAME]:
                faults.point("keep.link")
                _link_or_copy(checkpoint.path / name, temporary / name)
            publish_directory(temporary, self.path / step_name(checkpoint.step), point="keep")
        except BaseException:
            remove_flat(temporary)
            raise


def prunable(run: Path, run_id: str) -> list[Checkpoint]:
    """List the steps that may be removed, oldest first: written by this run, not the newest, not the last before a spike."""
    known = []
    for step in list_steps(run):
        with contextlib.suppress(CorruptError):
            known.append(open_checkpoint(run / step_name(step), sizes_only=True))
    protected = {checkpoint.step for checkpoint in known[-1:]}
    protected |= {checkpoint.step for checkpoint in [each for each in known if not each.manifest.get("suspect")][-1:]}
    return [each for each in known if each.step not in protected and each.manifest.get("run_id") == run_id]


def prune_oldest(run: Path, run_id: str, needed: int) -> str | None:
    """Remove one old step to make room, verified in full first, and name it; None where that cannot help."""
    candidates = prunable(run, run_id)
    free = free_bytes(run)
    if free < needed and free + sum(map(_own_bytes, candidates)) < needed:
        return None
    for candidate in candidates:
        with contextlib.suppress(CorruptError):
            remove(open_checkpoint(candidate.path), run)
            return candidate.path.name
    return None


def _own_bytes(checkpoint: Checkpoint) -> int:
    """Count what removing a step gives back: files that keep/ links to as well give nothing."""
    found = [(checkpoint.path / name).stat() for name in checkpoint.manifest["files"]]
    return sum(each.st_size for each in found if each.st_nlink == 1)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (NotImplementedError, OSError):
        write_file(target, _blocks(source))


def _blocks(path: Path) -> Iterator[Bytes]:
    with open_regular(path) as descriptor:
        while block := os.read(descriptor, _CHUNK):
            yield block
