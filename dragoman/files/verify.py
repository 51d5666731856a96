"""Checking a directory that we wrote, byte by byte: a model with its checkpoints, a run, or one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dragoman.errors import BundleError, CorruptError
from dragoman.files.manifest import NAME, FileCheck, check_files, read_manifest


def verify_directory(path: Path) -> list[FileCheck]:
    """Compare every file below a directory with the SHA-256 written when it was made; names are relative to it."""
    checks = [
        check._replace(name=(place.relative_to(path) / check.name).as_posix())
        for place in _manifested(path)
        for check in check_files(place, ignore=_strangers(place))
    ]
    if not checks:
        found = f"no {NAME} in it" if path.is_dir() else "a file" if path.exists() else "nothing there"
        raise BundleError(f"{path} must be a model or a run", found=found, fix="give the directory that train wrote")
    return checks


def _manifested(path: Path) -> Iterator[Path]:
    """Find the directories that should have a manifest: the model, its engines, and the steps of its run."""
    steps = [place for run in (path, path / "training") for pattern in ("step-*", "keep/step-*") for place in sorted(run.glob(pattern))]
    engines = sorted(place for place in path.glob("engines/[!.]*") if place.is_dir())
    # A model that lost its manifest still has weights; that is damage, not another kind of directory.
    if (path / NAME).exists() or (path / "weights.safetensors").exists():
        yield path
    yield from engines
    yield from steps


def _strangers(place: Path) -> set[str]:
    """Name what lies beside a model without being part of it: its run and engines, and a person's own files.

    A step has no strangers: nobody has a reason to put anything there.
    """
    if place.name.startswith("step-"):
        return set()
    with contextlib.suppress(CorruptError):
        listed = {name.split("/")[0] for name in read_manifest(place)["files"]}
        return {name for name in os.listdir(place) if name not in listed}
    return set()
