"""Manifest: a directory's list of its files with sizes and SHA-256, written last.

A directory without a manifest is incomplete; one that differs from it in any byte is corrupt. The
manifest contains a hash of itself. It is canonical JSON: sorted keys, one form only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.errors import BundleError, CorruptError, encode_json
from dragoman.storage.atomic_and_safe_file_io import (
    FileRecord,
    describe_irregular,
    hash_file,
    open_regular,
    read_regular,
    sync_directory,
    write_file,
)

MANIFEST_NAME = "manifest.json"
FORMAT = 1

_MAX_BYTES = 1 << 20  # larger files are not manifests
_MAX_DEPTH = 32
_SELF_HASH_KEY = "manifest_sha256"


class FileCheck(NamedTuple):
    """The state of one file of a directory: path, size, and its problem, if any."""

    name: str
    bytes: int
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the file is as it was written."""
        return not self.problem


def canonical_json(value: Any) -> bytes:
    """Return a value as canonical JSON, which hashes are taken of; raise ValueError for NaN."""
    return encode_json(
        json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )


def read_json(path: Path, *, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Return an object from untrusted JSON; size, depth and duplicate keys are checked.

    Raise CorruptError with the file's name.
    """
    try:
        data = read_regular(path, max_bytes)
    except OSError as error:
        raise corrupt_file_error(path, error.strerror or str(error)) from error
    try:
        value = json.loads(data, object_pairs_hook=reject_duplicate_keys)
    except RecursionError as error:
        raise corrupt_file_error(path, f"values nested deeper than {_MAX_DEPTH}") from error
    except ValueError as error:  # JSON and UTF-8 errors are both ValueErrors
        raise corrupt_file_error(path, str(error)) from error
    if _nesting_depth(value) > _MAX_DEPTH:
        raise corrupt_file_error(path, f"values nested deeper than {_MAX_DEPTH}")
    if not isinstance(value, dict):
        raise corrupt_file_error(path, f"{type(value).__name__} instead of an object")
    return value


def write_manifest(
    directory: Path, files: Mapping[str, FileRecord], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the manifest of finished files durably and return it."""
    manifest = {
        "format": FORMAT,
        **fields,
        "files": {name: record._asdict() for name, record in files.items()},
    }
    manifest[_SELF_HASH_KEY] = _self_hash(manifest)
    write_file(directory / MANIFEST_NAME, [canonical_json(manifest)], point="publish.manifest")
    return manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return a directory's manifest; raise CorruptError if it differs from its own hash."""
    path = directory / MANIFEST_NAME
    manifest = read_json(path)
    if manifest.get(_SELF_HASH_KEY) != _self_hash(manifest):
        raise corrupt_file_error(path, "contents that differ from its own hash")
    if manifest.get("format") != FORMAT:
        raise BundleError(
            f"{path} must have format {FORMAT}",
            found=f"format {manifest.get('format')}",
            fix="use a release of dragoman that knows it",
        )
    try:
        same = read_regular(path, _MAX_BYTES) == canonical_json(manifest)
    except (OSError, ValueError):  # changed meanwhile
        same = False
    if not same:
        raise corrupt_file_error(path, "the right values in another JSON form")
    if not _is_file_table(manifest.get("files")):
        raise corrupt_file_error(path, "an invalid list of files")
    return manifest


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """Return the hash that a manifest contains of itself."""
    return str(manifest[_SELF_HASH_KEY])


def check_files(
    directory: Path, *, ignore: Collection[str] = (), sizes_only: bool = False
) -> Iterator[FileCheck]:
    """Compare a directory with its manifest, file by file; entries in `ignore` are skipped."""
    try:
        manifest = read_manifest(directory)
    except CorruptError as error:
        yield FileCheck(MANIFEST_NAME, 0, error.found)
        return
    yield FileCheck(MANIFEST_NAME, (directory / MANIFEST_NAME).stat().st_size)
    listed: dict[str, dict[str, Any]] = manifest["files"]
    for name in sorted(listed):
        yield _check_file(directory, name, listed[name], sizes_only)
    for name in _present_files(directory, ignore):
        if name not in listed and name != MANIFEST_NAME:
            yield FileCheck(name, 0, "not listed in manifest.json")


def verify_files(
    directory: Path, *, ignore: Collection[str] = (), sizes_only: bool = False
) -> dict[str, Any]:
    """Return the manifest of a directory; raise CorruptError for the first damaged file."""
    for check in check_files(directory, ignore=ignore, sizes_only=sizes_only):
        if not check.ok:
            raise corrupt_file_error(directory / check.name, check.problem)
    return read_manifest(directory)


def remove_listed_files(
    directory: Path, manifest: Mapping[str, Any], fault_point: str = "prune.unlink"
) -> None:
    """Remove the files that a manifest lists, the manifest last, and then the directory.

    Raise OSError if the directory contains anything else.
    """
    from dragoman.storage import fault_injection

    for name in [*sorted(manifest["files"]), MANIFEST_NAME]:
        fault_injection.point(fault_point)
        os.unlink(directory / name)
    os.rmdir(directory)
    sync_directory(directory.parent)


def _check_file(
    directory: Path, name: str, record: Mapping[str, Any], sizes_only: bool
) -> FileCheck:
    path = directory / name
    try:
        with open_regular(path) as descriptor:
            found = FileRecord(os.fstat(descriptor).st_size, record["sha256"])
        if found.bytes == record["bytes"] and not sizes_only:  # a file of another size is not read
            found = hash_file(path)
    except FileNotFoundError:
        return FileCheck(name, 0, "missing")
    except OSError as error:
        return FileCheck(name, 0, describe_irregular(path) or error.strerror or str(error))
    if found.bytes != record["bytes"]:
        return FileCheck(
            name, found.bytes, f"{found.bytes} bytes where {record['bytes']} were written"
        )
    if found.sha256 != record["sha256"]:
        return FileCheck(
            name,
            found.bytes,
            f"SHA-256 {found.sha256[:12]}… where {record['sha256'][:12]}… was written",
        )
    return FileCheck(name, found.bytes)


def _present_files(directory: Path, ignore: Collection[str]) -> Iterator[str]:
    """Return every file below a directory; links are not followed."""
    for folder, folders, files in os.walk(directory):
        relative = Path(folder).relative_to(directory)
        if relative == Path():
            folders[:] = [name for name in folders if name not in ignore]
            files = [name for name in files if name not in ignore]
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from sorted((relative / name).as_posix() for name in [*files, *linked])


def _is_file_table(files: Any) -> bool:
    """Whether the list of files is valid and names nothing outside its directory."""
    return isinstance(files, dict) and all(
        isinstance(record, dict)
        and record.keys() == {"bytes", "sha256"}
        and isinstance(record["bytes"], int)
        and isinstance(record["sha256"], str)
        and name != MANIFEST_NAME
        and all(part not in ("", ".", "..") for part in name.split("/"))
        and "\0" not in name
        for name, record in files.items()
    )


def _self_hash(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != _SELF_HASH_KEY}
    try:
        return hashlib.sha256(canonical_json(rest)).hexdigest()
    except ValueError:  # NaN, which we never write
        return ""


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, for `object_pairs_hook`; raise ValueError for a duplicate key."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated!r:.100} twice")
    return value


def _nesting_depth(value: Any, depth: int = 0) -> int:
    """Return the nesting depth of lists and objects, up to just past the limit."""
    if not isinstance(value, (dict, list)) or depth > _MAX_DEPTH:
        return depth
    return max(
        (
            _nesting_depth(part, depth + 1)
            for part in (value.values() if isinstance(value, dict) else value)
        ),
        default=depth + 1,
    )


def corrupt_file_error(path: Path, problem: str) -> CorruptError:
    """Return the error for a damaged file."""
    return CorruptError(
        f"{path} must be as it was written",
        found=problem,
        fix="restore it from a copy, or use another model or checkpoint",
    )
