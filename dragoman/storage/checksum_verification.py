"""Verification of model and run directories against the SHA-256 in their manifests.

manifest.py compares the hashes of one directory, also when a bundle or a checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dragoman.errors import BundleError, CorruptError
from dragoman.storage.manifest import MANIFEST_NAME, FileCheck, check_files, read_manifest


def verify_directory(path: Path) -> list[FileCheck]:
    """Compare every file below a directory with its manifest; names are relative to it."""
    checks = [
        check._replace(name=(directory.relative_to(path) / check.name).as_posix())
        for directory in _directories_with_manifest(path)
        for check in check_files(directory, ignore=_unlisted_entries(directory))
    ]
    if not checks:
        found = (
            f"no {MANIFEST_NAME} in it"
            if path.is_dir()
            else "a file"
            if path.exists()
            else "nothing there"
        )
        raise BundleError(
            f"{path} must be a model or a run",
            found=found,
            fix="pass the directory that train wrote",
        )
    return checks


def list_unlisted_files(path: Path) -> list[str]:
    """Return entries of a model's directory that are not part of it; directories end in /."""
    if not (path / MANIFEST_NAME).exists():
        return []
    own, listed = {MANIFEST_NAME, "training", "engines"}, set[str]()
    with contextlib.suppress(CorruptError, BundleError):
        listed = set(read_manifest(path)["files"])
        own |= {name.split("/")[0] for name in listed}
    found = [
        name
        for name in sorted(os.listdir(path))
        # A link in place of a listed file is damage, which the check of that file reports.
        if name not in own or ((path / name).is_symlink() and name not in listed)
    ]
    if _is_real_directory(path / "engines"):
        found += [
            f"engines/{name}"
            for name in sorted(os.listdir(path / "engines"))
            if not _is_real_directory(path / "engines" / name)
        ]
    return [f"{name}/" if _is_real_directory(path / name) else name for name in found]


def _is_real_directory(path: Path) -> bool:
    """Whether a path is a directory and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _directories_with_manifest(path: Path) -> Iterator[Path]:
    """Yield the directories that need a manifest: the model, its engines and its checkpoints."""
    runs = [run for run in (path, path / "training") if run == path or _is_real_directory(run)]
    folders = [
        folder
        for run in runs
        for folder in (run, run / "keep")
        if folder == run or _is_real_directory(folder)
    ]
    steps = [directory for folder in folders for directory in sorted(folder.glob("step-*"))]
    engines = (
        sorted(filter(_is_real_directory, path.glob("engines/[!.]*")))
        if _is_real_directory(path / "engines")
        else []
    )
    # A model without its manifest still has weights: that is damage.
    if (path / MANIFEST_NAME).exists() or (path / "weights.safetensors").exists():
        yield path
    yield from engines
    yield from steps


def _unlisted_entries(directory: Path) -> set[str]:
    """Return entries beside a model that are not part of it: runs, engines and the user's own
    files.

    A checkpoint directory must contain nothing else.
    """
    if directory.name.startswith("step-"):
        return set()
    with contextlib.suppress(CorruptError, BundleError):
        listed = {name.split("/")[0] for name in read_manifest(directory)["files"]}
        return {name for name in os.listdir(directory) if name not in listed}
    return set()
