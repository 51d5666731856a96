"""Exported engines inside a bundle, `engines/NAME/`: atomic publication and verification.

The manifest of an engine has the hashes of the model's files that it was exported from, so that an
engine of older weights is not used. A bundle is untrusted input: only known file names are opened,
links are not followed, and every byte is hashed before another program reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman._version import __version__
from dragoman.bundle import Bundle
from dragoman.bundle import format as layout
from dragoman.errors import BundleError, CorruptError, DragomanError
from dragoman.inference.untrusted_engine_trial import record_trust
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import (
    FileRecord,
    hash_file,
    open_regular,
    publish_directory,
    staged_directory,
    sync_directory,
    temporary_name,
)
from dragoman.storage.disk_space_and_errors import (
    os_errors_converted,
    require_new_directory,
    require_parent_writable,
)

ENGINES_DIRECTORY = "engines"
MANIFEST_KIND = "dragoman engine"
# By precision; the default comes first.
ENGINE_NAMES = ("ctranslate2-float32", "ctranslate2-int8", "ctranslate2-int8_float32")
_TEMPORARY_LABEL = "engine"
# Maximum size of each file of an engine; no other file is opened.
MAX_FILE_BYTES = {
    "model.bin": 40 << 30,
    "config.json": 1 << 20,
    "shared_vocabulary.json": 64 << 20,
    "source_vocabulary.json": 64 << 20,
    "target_vocabulary.json": 64 << 20,
}


def list_engine_names(bundle: Path) -> list[str]:
    """Return the names of the engines in a bundle, valid or not; other folders are ignored."""
    folder = bundle / ENGINES_DIRECTORY
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(name for name in ENGINE_NAMES if (folder / name).is_dir())


def engine_digest(folder: Path) -> str:
    """Return the SHA-256 of an engine's manifest; raise CorruptError if it cannot be read."""
    return manifest.manifest_digest(manifest.read_manifest(folder))


def model_digest(bundle: Bundle) -> str:
    """Return a hash of what an engine is exported from: settings, weights and tokenizers."""
    files: dict[str, dict[str, Any]] = bundle.manifest["files"]
    source_hashes = {
        name: record["sha256"]
        for name, record in files.items()
        if name not in (layout.CALIBRATION, layout.CARD, layout.GOLDEN)
    }
    return hashlib.sha256(manifest.canonical_json(source_hashes)).hexdigest()


@contextlib.contextmanager
def publish_engine(
    final: Path, fields: Mapping[str, Any], *, replace: bool = False
) -> Iterator[Path]:
    """Yield a folder to fill; then sync its files, write a manifest and rename it to `final`.

    A failure leaves nothing behind. `fields` are read when the block ends, so that it may add to
    them. With `replace` an engine at `final` is replaced: exactly the files of its manifest are
    removed. The new engine is recorded as trusted.
    """
    require_replaceable(final) if replace else require_new_directory(final)
    with (
        os_errors_converted(final.parent),
        staged_directory(
            final, _TEMPORARY_LABEL, _replace_engine if replace else publish_directory
        ) as temporary,
    ):
        yield temporary
        made = manifest.write_manifest(
            temporary, _sync_files(temporary), {**fields, "created_by": f"dragoman {__version__}"}
        )
    record_trust(manifest.manifest_digest(made))


def require_replaceable(final: Path) -> None:
    """Raise BundleError unless `final` is free, or holds an engine and no unlisted files."""
    for directory in (final.parent, final):
        if directory.is_symlink():
            found = f"a symbolic link to {os.readlink(directory)!r:.120}"
            raise BundleError(
                f"{directory} must be a folder of the model itself",
                found=found,
                fix="remove the link, or use --out",
            )
    if not final.exists():
        require_parent_writable(final)
        return
    must, fix = (
        f"{final} must hold an engine and nothing else, to be replaced",
        "move it away or remove it, and export again",
    )
    if not final.is_dir():
        raise BundleError(must, found="a file", fix=fix)
    try:
        listed = {*manifest.read_manifest(final)["files"], manifest.MANIFEST_NAME}
    except DragomanError as error:
        raise BundleError(
            must, found=f"no manifest that can be read: {error.found}", fix=fix
        ) from error
    for entry in sorted(os.scandir(final), key=lambda entry: entry.name):
        if entry.name not in listed:
            raise BundleError(
                must, found=f"{entry.name!r:.120}, which its manifest does not list", fix=fix
            )
        if entry.is_dir(follow_symlinks=False):
            raise BundleError(must, found=f"a folder {entry.name!r:.120} in it", fix=fix)


def _replace_engine(temporary: Path, final: Path) -> None:
    """Rename a finished folder to `final`; an engine there is moved aside first, then removed."""
    require_replaceable(final)
    if not final.exists():
        publish_directory(temporary, final)
        return
    old = manifest.read_manifest(final)
    backup = final.parent / temporary_name(_TEMPORARY_LABEL)
    os.rename(final, backup)
    try:
        publish_directory(temporary, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(backup, final)
        raise
    with contextlib.suppress(OSError):  # a file added meanwhile stays
        for name in old["files"]:
            (backup / name).unlink(missing_ok=True)
        (backup / manifest.MANIFEST_NAME).unlink()
        backup.rmdir()


def verify_engine(folder: Path, bundle: Bundle) -> dict[str, Any]:
    """Verify an engine of a bundle, byte by byte, and return its manifest."""
    for directory in (folder.parent, folder):
        if directory.is_symlink():
            raise BundleError(
                f"{directory} must be a folder of the bundle itself",
                found="a symbolic link",
                fix="export the engine again",
            )
    content = manifest.read_manifest(folder)
    if content.get("kind") != MANIFEST_KIND:
        raise BundleError(
            f"{folder} must hold an engine",
            found=f"kind {content.get('kind')!r:.80}",
            fix="export the engine again",
        )
    unknown = set(content["files"]) - MAX_FILE_BYTES.keys()
    if unknown or not {"model.bin", "config.json"} <= set(content["files"]):
        found = f"{min(unknown)!r:.120}" if unknown else "no model.bin or no config.json"
        raise BundleError(
            f"{folder} must list an engine's files and no others",
            found=found,
            fix="export the engine again",
        )
    for name in content["files"]:
        _check_size(folder / name, MAX_FILE_BYTES[name])
    check_engine_files(folder, content, bundle)
    return content


def check_engine_files(folder: Path, content: Mapping[str, Any], bundle: Bundle) -> None:
    """Raise unless every file of an export is as written, and this model's weights are in it."""
    for check in manifest.check_files(folder):
        if not check.ok:
            raise CorruptError(
                f"{folder / check.name} must be as it was written",
                found=check.problem,
                fix="export it again",
            )
    if content.get("model_sha256") != model_digest(bundle):
        raise BundleError(
            f"{folder} must be exported from this model",
            found="one exported from other weights",
            fix="export it again",
        )


def _check_size(path: Path, most: int) -> None:
    """Raise unless a path is a regular file of at most `most` bytes."""
    try:
        with open_regular(path) as descriptor:
            size = os.fstat(descriptor).st_size
    except OSError as error:
        raise CorruptError(
            f"{path} must be a plain file",
            found=error.strerror or str(error),
            fix="export the engine again",
        ) from error
    if size > most:
        raise BundleError(
            f"{path} must have at most {most} bytes", found=str(size), fix="export the engine again"
        )


def _sync_files(folder: Path) -> dict[str, FileRecord]:
    """Sync every file below a folder, and return their records."""
    records = {}
    mode = os.stat(folder).st_mode & 0o666  # by the umask: some libraries write 0o600
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        os.chmod(path, mode)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        records[path.relative_to(folder).as_posix()] = hash_file(path)
    for each in folder.rglob("*"):
        if each.is_dir():
            sync_directory(each)
    return records
