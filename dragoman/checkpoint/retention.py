"""Which checkpoints are kept: pruning, the best checkpoint, quarantine of damaged ones, leftovers of killed processes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dragoman._version import __version__
from dragoman.checkpoint.checkpoint import (
    Checkpoint,
    list_steps,
    open_checkpoint,
    step_directory_name,
)
from dragoman.errors import CorruptError
from dragoman.storage import fault_injection, manifest
from dragoman.storage import manifest as manifests
from dragoman.storage.atomic import (
    Bytes,
    open_regular,
    publish_directory,
    remove_flat_directory,
    replace_file,
    sync_directory,
    temporary_name,
    write_file,
)
from dragoman.storage.disk import free_disk_bytes

logger = logging.getLogger(__name__)

_LEFTOVER_NAME = re.compile(r"\.(tmp|del)-.+-\d+-[0-9a-f]{8}")
_STATUS_SECONDS = 60.0


def create_or_read_run_id(run: Path, config_digest: str) -> str:
    """Return the run's id, written once into run.json; a step with another id is not ours to prune."""
    path = run / "run.json"
    if path.exists():
        return str(manifest.read_json(path).get("run_id", ""))
    run_id = secrets.token_hex(8)
    began = {
        "format": 1,
        "run_id": run_id,
        "created": _timestamp(),
        "created_by": f"dragoman {__version__}",
    }
    replace_file(path, manifest.canonical_json(began | {"config_sha256": config_digest}))
    return run_id


def remove_leftovers(run: Path) -> None:
    """Remove what a killed process of ours left half-made or half-removed; anybody else's files stay."""
    for name in sorted(os.listdir(run)):
        if not _LEFTOVER_NAME.fullmatch(name):
            continue
        place = run / name
        if not place.is_dir() or place.is_symlink():
            place.unlink()
        elif not remove_flat_directory(place):
            logger.warning(
                "%s was left by an earlier run and holds what is not ours; look and delete it by hand",
                place,
            )


def quarantine_checkpoint(place: Path, error: CorruptError) -> Path:
    """Set a step aside that did not verify, with the reason beside it; it is never deleted."""
    bad = place.with_name(
        f"bad-{place.name}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
    )
    os.rename(place, bad)
    if bad.is_dir() and not bad.is_symlink():
        replace_file(bad / "WHY.txt", f"{error}\n".encode("utf-8", "backslashreplace"))
    sync_directory(place.parent)
    return bad


def count_quarantined(run: Path) -> int:
    """Count the steps that were set aside."""
    return (
        len([name for name in os.listdir(run) if name.startswith("bad-step-")])
        if run.is_dir()
        else 0
    )


def remove_checkpoint(checkpoint: Checkpoint, run: Path) -> None:
    """Remove a step of ours: hidden by a rename first, so that a half-removed one is never taken for a step."""
    hidden = run / f".del-{checkpoint.step:08d}-{os.getpid()}-{secrets.token_hex(4)}"
    fault_injection.point("prune.rename")
    os.rename(checkpoint.path, hidden)
    sync_directory(checkpoint.path.parent)
    manifest.remove_listed_files(hidden, checkpoint.manifest)


class StatusFile:
    """`status.json`: where the run stands, for people and launchers that lose the exit code."""

    def __init__(self, run: Path) -> None:
        self.path = run / "status.json"
        self._fields: dict[str, Any] = {}
        self._next_write = 0.0

    def replace(self, fields: dict[str, Any], *, now: bool) -> None:
        """Replace the file; unless `now`, at most once a minute. A full disk does not end a run here."""
        self._fields |= fields
        if not now and time.monotonic() < self._next_write:
            return
        self._next_write = time.monotonic() + _STATUS_SECONDS
        people = {"pid": os.getpid(), "host": socket.gethostname(), "time": _timestamp()}
        try:
            replace_file(self.path, manifest.canonical_json(self._fields | people))
        except OSError as error:
            logger.warning("status.json was not replaced: %s", error)


def _timestamp() -> str:
    """Write the time for people; nothing is ever decided by it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


_CHUNK = 1 << 22


class BestCheckpoint:
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
                return open_checkpoint(self.path / step_directory_name(step))
        return None

    def replace(self, checkpoint: Checkpoint) -> None:
        """Keep a verified step; the earlier one is removed only when this one is durable."""
        if self.path.is_symlink():
            raise manifests.corrupt_file_error(self.path, "a symbolic link")
        if not self.path.is_dir():
            os.mkdir(self.path)
            sync_directory(self.run)
        if not self._is_kept(checkpoint):
            self._add(checkpoint)
        for step in self.steps():
            if step != checkpoint.step:
                with contextlib.suppress(
                    CorruptError
                ):  # what does not verify is not ours to delete
                    remove_checkpoint(
                        open_checkpoint(self.path / step_directory_name(step), sizes_only=True),
                        self.run,
                    )

    def _is_kept(self, checkpoint: Checkpoint) -> bool:
        """Say whether this very step is kept; another under its name, damaged or of another history, is put away."""
        place = self.path / step_directory_name(checkpoint.step)
        if not place.exists():
            return False
        try:
            kept = open_checkpoint(place)
        except CorruptError as error:
            quarantine_checkpoint(place, error)
            return False
        if kept.manifest["files"] == checkpoint.manifest["files"]:
            return True
        remove_checkpoint(kept, self.run)
        return False

    def _add(self, checkpoint: Checkpoint) -> None:
        temporary = self.run / temporary_name(f"keep-{checkpoint.step:08d}")
        try:
            os.mkdir(temporary)
            for name in [*checkpoint.manifest["files"], manifests.MANIFEST_NAME]:
                fault_injection.point("keep.link")
                _link_or_copy(checkpoint.path / name, temporary / name)
            publish_directory(
                temporary, self.path / step_directory_name(checkpoint.step), point="keep"
            )
        except BaseException:
            remove_flat_directory(temporary)
            raise


def list_prunable(run: Path, run_id: str) -> list[Checkpoint]:
    """List the steps that may be removed, oldest first: written by this run, not the newest, not the last before a spike."""
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


def prune_oldest(run: Path, run_id: str, needed: int) -> str | None:
    """Remove one old step to make room, verified in full first, and name it; None where that cannot help."""
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
    """Count what removing a step gives back: files that keep/ links to as well give nothing."""
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
