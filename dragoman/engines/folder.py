"""Engines inside a bundle: `engines/NAME/`, each with a manifest of its own, whole or absent.

An engine is made from a model and belongs to it: its manifest names the model's files by their hashes, so that an engine which a
newer training left behind is not used. Like all of a bundle it may be anybody's: the list of files is closed, links are
not followed, and every byte is hashed before another program's code reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman._version import __version__
from dragoman.bundle import Bundle
from dragoman.bundle import format as layout
from dragoman.errors import BundleError, CorruptError
from dragoman.files import manifest
from dragoman.files.atomic import FileRecord, open_regular, publish_directory, read_record, sync_directory, temporary_name
from dragoman.files.disk import explaining, require_writable
from dragoman.files.processes import is_alive

FOLDER = "engines"
KIND = "dragoman engine"
_LABEL = "engine"
# The most bytes that each file of an engine may have; no other is opened.
CAPS = {
    "model.bin": 40 << 30,
    "config.json": 1 << 20,
    "shared_vocabulary.json": 64 << 20,
    "source_vocabulary.json": 64 << 20,
    "target_vocabulary.json": 64 << 20,
}


def engine_names(bundle: Path) -> list[str]:
    """Name the engines that a model's directory holds, whatever their state."""
    folder = bundle / FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def model_digest(bundle: Bundle) -> str:
    """Hash what an engine is made from: the bundle's settings, weights and tokenizers, as its manifest lists them."""
    files: dict[str, dict[str, Any]] = bundle.manifest["files"]
    made_from = {name: record["sha256"] for name, record in files.items() if name not in (layout.CARD, layout.GOLDEN)}
    return hashlib.sha256(manifest.canonical_json(made_from)).hexdigest()


@contextlib.contextmanager
def publish_folder(final: Path, fields: Mapping[str, Any], *, replace: bool = False) -> Iterator[Path]:
    """Give a folder to be filled; afterwards its files are synced, listed in a manifest and moved to `final` by one rename.

    Whatever goes wrong on the way leaves nothing behind. `fields` are read when the block ends, so that it may add to them.
    """
    require_writable(final.parent)
    with explaining(final.parent):
        _remove_leftovers(final.parent)
        temporary = final.parent / temporary_name(_LABEL)
        os.mkdir(temporary)
        try:
            yield temporary
            manifest.write_manifest(temporary, _synced(temporary), {**fields, "created_by": f"dragoman {__version__}"})
            if replace and final.exists():
                shutil.rmtree(final)
            publish_directory(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def read_folder(folder: Path, bundle: Bundle) -> dict[str, Any]:
    """Verify an engine of a bundle, byte by byte, and return its manifest."""
    for place in (folder.parent, folder):
        if place.is_symlink():
            raise BundleError(f"{place} must be a folder of the bundle itself", found="a symbolic link", fix="export the engine again")
    content = manifest.read_manifest(folder)
    if content.get("kind") != KIND:
        raise BundleError(f"{folder} must hold an engine", found=f"kind {content.get('kind')!r:.80}", fix="export the engine again")
    unknown = set(content["files"]) - CAPS.keys()
    if unknown or not {"model.bin", "config.json"} <= set(content["files"]):
        found = f"{min(unknown)!r:.120}" if unknown else "no model.bin or no config.json"
        raise BundleError(f"{folder} must list an engine's files and no others", found=found, fix="export the engine again")
    for name in content["files"]:
        _check_size(folder / name, CAPS[name])
    for check in manifest.check_files(folder):
        if not check.ok:
            raise CorruptError(f"{folder / check.name} must be as it was written", found=check.problem, fix="export the engine again")
    if content.get("model_sha256") != model_digest(bundle):
        raise BundleError(f"{folder} must be made from this model", found="one made from other weights", fix="export the engine again")
    return content


def _check_size(path: Path, most: int) -> None:
    """Refuse a file that is none, or too large, before it is read."""
    try:
        with open_regular(path) as descriptor:
            size = os.fstat(descriptor).st_size
    except OSError as error:
        raise CorruptError(f"{path} must be a plain file", found=error.strerror or str(error), fix="export the engine again") from error
    if size > most:
        raise BundleError(f"{path} must have at most {most} bytes", found=str(size), fix="export the engine again")


def _synced(folder: Path) -> dict[str, FileRecord]:
    """Make every file below a folder durable, and record it."""
    records = {}
    mode = os.stat(folder).st_mode & 0o666  # what the umask leaves: some libraries write for their owner alone
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        os.chmod(path, mode)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        records[path.relative_to(folder).as_posix()] = read_record(path)
    for each in folder.rglob("*"):
        if each.is_dir():
            sync_directory(each)
    return records


def _remove_leftovers(folder: Path) -> None:
    """Remove what an export of ours left that was killed: the process that its name tells is gone."""
    for each in folder.glob(f".tmp-{_LABEL}-*"):
        pid = each.name.split("-")[2]
        if pid.isdigit() and not is_alive(int(pid)) and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)
