"""Checkpoint retention: which checkpoints are kept, and which are removed or quarantined.

`prune_checkpoints` keeps the newest ones after each save, `BestCheckpoint` the best, `prune_oldest`
frees space on a full disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from dragoman.checkpoint.checkpoint_io import (
    Checkpoint,
    list_steps,
    open_checkpoint,
    step_directory_name,
)
from dragoman.errors import CorruptError
from dragoman.storage import fault_injection, manifest
from dragoman.storage.atomic_and_safe_file_io import (
    Bytes,
    open_regular,
    publish_directory,
    remove_flat_directory,
    replace_file,
    sync_directory,
    temporary_name,
    write_file,
)
from dragoman.storage.disk_space_and_errors import free_disk_bytes

logger = logging.getLogger(__name__)

_CHUNK = 1 << 22
_LEFTOVER_NAME = re.compile(r"\.(tmp|del)-.+-\d+-[0-9a-f]{8}")


def remove_leftovers(run: Path) -> None:
    """Remove temporary files that a killed process of this run left; other files stay."""
    for name in sorted(os.listdir(run)):
        if not _LEFTOVER_NAME.fullmatch(name):
            continue
        path = run / name
        if not path.is_dir() or path.is_symlink():
            path.unlink()
        elif not remove_flat_directory(path):
            logger.warning(
                "%s was left by an earlier process and holds unknown files; delete it by hand", path
            )


def quarantine_checkpoint(path: Path, error: CorruptError) -> Path:
    """Rename a damaged checkpoint to `bad-step-…`, with the reason in WHY.txt.

    It is never deleted.
    """
    bad = path.with_name(f"bad-{path.name}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}")
    os.rename(path, bad)
    if bad.is_dir() and not bad.is_symlink():
        replace_file(bad / "WHY.txt", f"{error}\n".encode("utf-8", "backslashreplace"))
    sync_directory(path.parent)
    return bad


def count_quarantined(run: Path) -> int:
    """Return the number of quarantined checkpoints."""
    return (
        len([name for name in os.listdir(run) if name.startswith("bad-step-")])
        if run.is_dir()
        else 0
    )


def remove_checkpoint(checkpoint: Checkpoint, run: Path) -> None:
    """Remove a checkpoint of this run.

    Renamed first, so that a partly removed one is never loaded.
    """
    hidden = run / f".del-{checkpoint.step:08d}-{os.getpid()}-{secrets.token_hex(4)}"
    fault_injection.point("prune.rename")
    os.rename(checkpoint.path, hidden)
    sync_directory(checkpoint.path.parent)
    manifest.remove_listed_files(hidden, checkpoint.manifest)


class BestCheckpoint:
    """The directory `keep` of a run: the best checkpoint, as hard links where possible."""

    def __init__(self, run: Path) -> None:
        self.run, self.path = run, run / "keep"

    def steps(self) -> list[int]:
        """Return the kept steps, unverified: one, or two during a replacement."""
        return [] if self.path.is_symlink() else list_steps(self.path)

    def open(self) -> Checkpoint | None:
        """Return the newest kept checkpoint that verifies."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CorruptError):
                return open_checkpoint(self.path / step_directory_name(step))
        return None

    def replace(self, checkpoint: Checkpoint) -> None:
        """Keep a verified checkpoint; the earlier one is removed once this one is on disk."""
        if self.path.is_symlink():
            raise manifest.corrupt_file_error(self.path, "a symbolic link")
        if not self.path.is_dir():
            os.mkdir(self.path)
            sync_directory(self.run)
        if not self._is_kept(checkpoint):
            self._add(checkpoint)
        for step in self.steps():
            if step != checkpoint.step:
                with contextlib.suppress(CorruptError):  # a damaged one is never deleted
                    remove_checkpoint(
                        open_checkpoint(self.path / step_directory_name(step), sizes_only=True),
                        self.run,
                    )

    def _is_kept(self, checkpoint: Checkpoint) -> bool:
        """Whether this checkpoint is kept.

        Another one of the same step is quarantined or removed.
        """
        path = self.path / step_directory_name(checkpoint.step)
        if not path.exists():
            return False
        try:
            kept = open_checkpoint(path)
        except CorruptError as error:
            quarantine_checkpoint(path, error)
            return False
        if kept.manifest["files"] == checkpoint.manifest["files"]:
            return True
        remove_checkpoint(kept, self.run)
        return False

    def _add(self, checkpoint: Checkpoint) -> None:
        temporary = self.run / temporary_name(f"keep-{checkpoint.step:08d}")
        try:
            os.mkdir(temporary)
            for name in [*checkpoint.manifest["files"], manifest.MANIFEST_NAME]:
                fault_injection.point("keep.link")
                _link_or_copy(checkpoint.path / name, temporary / name)
            publish_directory(
                temporary, self.path / step_directory_name(checkpoint.step), point="keep"
            )
        except BaseException:
            remove_flat_directory(temporary)
            raise


def list_prunable(run: Path, run_id: str) -> list[Checkpoint]:
    """Return the checkpoints that may be removed, oldest first.

    Never the newest, the last that is not suspect, or one of another run.
    """
    known = []
    for step in list_steps(run):
        with contextlib.suppress(CorruptError):
            known.append(open_checkpoint(run / step_directory_name(step), sizes_only=True))
    protected = {checkpoint.step for checkpoint in known[-1:]}
    protected |= {
        checkpoint.step
        for checkpoint in [each for each in known if not each.manifest.get("suspect")][-1:]
    }
    return [
        each
        for each in known
        if each.step not in protected and each.manifest.get("run_id") == run_id
    ]


def prune_checkpoints(run: Path, run_id: str, *, keep: int) -> list[int]:
    """Remove all but the `keep` newest checkpoints; return the removed steps.

    Never removed are the newest, the last that is not suspect, and those of another run.
    """
    newest = list_steps(run)[-max(1, keep) :]
    pruned = []
    for checkpoint in list_prunable(run, run_id):
        if checkpoint.step not in newest:
            remove_checkpoint(checkpoint, run)
            pruned.append(checkpoint.step)
    return pruned


def prune_oldest(run: Path, run_id: str, needed: int) -> str | None:
    """Remove one old checkpoint to free disk space and return its name.

    None where that cannot help.
    """
    candidates = list_prunable(run, run_id)
    free = free_disk_bytes(run)
    if free < needed and free + sum(map(_freed_bytes, candidates)) < needed:
        return None
    for candidate in candidates:
        with contextlib.suppress(CorruptError):
            remove_checkpoint(open_checkpoint(candidate.path), run)
            return candidate.path.name
    return None


def _freed_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes that removing a checkpoint frees; files with another hard link free none."""
    found = [(checkpoint.path / name).stat() for name in checkpoint.manifest["files"]]
    return sum(each.st_size for each in found if each.st_nlink == 1)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except (NotImplementedError, OSError):
        write_file(target, _read_blocks(source))


def _read_blocks(path: Path) -> Iterator[Bytes]:
    with open_regular(path) as descriptor:
        while block := os.read(descriptor, _CHUNK):
            yield block
