"""A run directory's upkeep: its beginning, leftovers of a killed process, steps that did not verify, its status."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from dragoman._version import __version__
from dragoman.errors import CorruptError
from dragoman.files import faults, manifest
from dragoman.files.atomic import remove_flat, replace_file, sync_directory
from dragoman.training.stored import Checkpoint

log = logging.getLogger(__name__)

_OURS = re.compile(r"\.(tmp|del)-.+-\d+-[0-9a-f]{8}")
_STATUS_SECONDS = 60.0


def begin(run: Path, config_digest: str) -> str:
    """Return the run's id, written once into run.json; a step with another id is not ours to prune."""
    path = run / "run.json"
    if path.exists():
        return str(manifest.read_json(path).get("run_id", ""))
    run_id = secrets.token_hex(8)
    began = {"format": 1, "run_id": run_id, "created": _now(), "created_by": f"dragoman {__version__}"}
    replace_file(path, manifest.canonical_json(began | {"config_sha256": config_digest}))
    return run_id


def sweep(run: Path) -> None:
    """Remove what a killed process of ours left half-made or half-removed; anybody else's files stay."""
    for name in sorted(os.listdir(run)):
        if not _OURS.fullmatch(name):
            continue
        place = run / name
        if not place.is_dir() or place.is_symlink():
            place.unlink()
        elif not remove_flat(place):
            log.warning("%s was left by an earlier run and holds what is not ours; look and delete it by hand", place)


def quarantine(place: Path, error: CorruptError) -> Path:
    """Set a step aside that did not verify, with the reason beside it; it is never deleted."""
    bad = place.with_name(f"bad-{place.name}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}")
    os.rename(place, bad)
    if bad.is_dir() and not bad.is_symlink():
        replace_file(bad / "WHY.txt", f"{error}\n".encode("utf-8", "backslashreplace"))
    sync_directory(place.parent)
    return bad


def count_bad(run: Path) -> int:
    """Count the steps that were set aside."""
    return len([name for name in os.listdir(run) if name.startswith("bad-step-")]) if run.is_dir() else 0


def remove(checkpoint: Checkpoint, run: Path) -> None:
    """Remove a step of ours: hidden by a rename first, so that a half-removed one is never taken for a step."""
    hidden = run / f".del-{checkpoint.step:08d}-{os.getpid()}-{secrets.token_hex(4)}"
    faults.point("prune.rename")
    os.rename(checkpoint.path, hidden)
    sync_directory(checkpoint.path.parent)
    manifest.remove_listed(hidden, checkpoint.manifest)


class Status:
    """`status.json`: where the run stands, for people and launchers that lose the exit code."""

    def __init__(self, run: Path) -> None:
        self.path = run / "status.json"
        self._fields: dict[str, Any] = {}
        self._due = 0.0

    def replace(self, fields: dict[str, Any], *, now: bool) -> None:
        """Replace the file; unless `now`, at most once a minute. A full disk does not end a run here."""
        self._fields |= fields
        if not now and time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _STATUS_SECONDS
        people = {"pid": os.getpid(), "host": socket.gethostname(), "time": _now()}
        try:
            replace_file(self.path, manifest.canonical_json(self._fields | people))
        except OSError as error:
            log.warning("status.json was not replaced: %s", error)


def _now() -> str:
    """Write the time for people; nothing is ever decided by it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
