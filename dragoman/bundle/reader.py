"""Reading of untrusted bundles: every file is verified before anything is built from it.

The list of files is fixed, symbolic links are not followed, sizes are limited, JSON is strict, and
no file can name another. `check_files` in storage/manifest.py compares the SHA-256 of each file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dragoman.bundle import format as layout
from dragoman.config import Config, from_dict
from dragoman.config.root_config import TRANSLATE
from dragoman.errors import BundleError, ConfigError, CorruptError, DivergedError
from dragoman.evaluate.confidence_calibration import ConfidenceMap
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import open_regular, read_regular

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BundleContents:
    """The verified contents of a bundle of any task, without its weights."""

    path: Path
    manifest: dict[str, Any]
    config: Config
    card: str
    golden: dict[str, Any]
    text_files: tuple[str, ...]  # names in text/
    calibration: ConfidenceMap | None = None  # of a translator; not in every bundle

    def read_text_files(self) -> dict[str, bytes]:
        """Return the contents of the files of text/."""
        return {
            name: read_regular(
                self.path / layout.TEXT / name, layout.MAX_FILE_BYTES[f"{layout.TEXT}/{name}"]
            )
            for name in self.text_files
        }


def read_bundle(path: Path) -> BundleContents:
    """Verify every file of a bundle against its manifest and read all but weights and text."""
    path = Path(path)
    layout.require_bundle(path)
    listed = _read_manifest(path)
    _require_plain_folder(path / layout.TEXT)
    _check_sizes(path, listed["files"])
    _verify_files(path)
    manifest.read_json(path / layout.TEXT / "text.json")  # strictly, before the tokenizer does
    prefix = f"{layout.TEXT}/"
    return BundleContents(
        path=path,
        manifest=listed,
        config=_read_config(path / layout.CONFIG),
        card=_read_text(path / layout.CARD),
        golden=manifest.read_json(
            path / layout.GOLDEN, max_bytes=layout.MAX_FILE_BYTES[layout.GOLDEN]
        ),
        text_files=tuple(
            name.removeprefix(prefix) for name in listed["files"] if name.startswith(prefix)
        ),
        calibration=_read_calibration(path / layout.CALIBRATION)
        if layout.CALIBRATION in listed["files"]
        else None,
    )


def require_task(contents: BundleContents, task: str) -> None:
    """Raise BundleError, with the command to use, unless a bundle is of this task."""
    found = contents.config.task
    if found == task:
        return
    command = layout.model_command(found, contents.config.language.objective)
    what = {TRANSLATE: "a translation model", "predict": "a model for `dragoman predict`"}
    raise BundleError(
        f"{contents.path} must be {what.get(task, f'a model of task {task}')}",
        found=f"a model of task {found}",
        fix=f"use `dragoman {command} -m {contents.path}`",
    )


def read_finite_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the expected tensors; raise CorruptError for values that are not finite."""
    count = sum(tensor.numel() for tensor in expected.values())
    if count > layout.MAX_PARAMETERS:
        raise BundleError(
            f"a model must have at most {layout.MAX_PARAMETERS:,} parameters",
            found=f"{count:,}",
            fix="check config.json",
        )
    from dragoman.storage.tensor_files import check_finite

    weights = read_expected_tensors(path, expected)
    try:
        check_finite(weights, path.name)
    except DivergedError as error:
        raise CorruptError(
            f"{path} must hold finite numbers", found=error.found, fix="restore it from a copy"
        ) from error
    return weights


def read_expected_tensors(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the expected tensors, also by the names that earlier releases gave them."""
    from dragoman.bundle.renamed_weights import rename_old_weights
    from dragoman.storage.tensor_files import read_header, read_tensors

    renamed = rename_old_weights(read_header(path), expected)
    return read_tensors(path, expected=expected, renamed=renamed)


def manifest_parameters(manifest: Mapping[str, Any]) -> int:
    """Return the number of parameters in a manifest; 0 if it has none."""
    count = manifest.get("parameters", 0)
    return count if type(count) is int and 0 <= count <= layout.MAX_PARAMETERS else 0


def listed_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without its file list."""
    hidden = ("files", "manifest_sha256", "format")
    return {name: value for name, value in manifest.items() if name not in hidden}


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest; raise BundleError unless it lists a bundle's files and no others."""
    content = manifest.read_manifest(path)
    where = path / manifest.MANIFEST_NAME
    if content.get("kind") != layout.MANIFEST_KIND:
        found = f"kind {content.get('kind')!r:.80}"
        raise BundleError(
            f"{where} must be that of a {layout.MANIFEST_KIND}",
            found=found,
            fix="pass a model's directory, not one inside it",
        )
    if content.get("bundle_format") != layout.FORMAT_VERSION:
        raise BundleError(
            f"{path} must have bundle format {layout.FORMAT_VERSION}",
            found=f"format {content.get('bundle_format')!r:.80}",
            fix="use a release of dragoman that supports it: `pip install --upgrade dragoman`",
        )
    names = set(content["files"])
    for wrong, what in (
        (names - set(layout.MAX_FILE_BYTES), "a file that no bundle has"),
        (layout.REQUIRED - names, "no entry for"),
    ):
        if wrong:
            found = f"{what}: {min(wrong)!r:.120}"
            raise BundleError(
                f"{where} must list a bundle's files and no others",
                found=found,
                fix="copy the model directory again",
            )
    return content


def _verify_files(path: Path) -> None:
    """Hash every file of the bundle; other files in the directory are never opened."""
    ours = {name.partition("/")[0] for name in layout.MAX_FILE_BYTES}
    unknown_files = {
        name for name in os.listdir(path) if name not in ours and name != manifest.MANIFEST_NAME
    }
    for check in manifest.check_files(path, ignore=unknown_files):
        if not check.ok and (
            check.name in layout.MAX_FILE_BYTES or check.name == manifest.MANIFEST_NAME
        ):
            raise manifest.corrupt_file_error(path / check.name, check.problem)


def _require_plain_folder(folder: Path) -> None:
    """Raise BundleError unless the path is a folder and not a symbolic link."""
    if folder.is_symlink() or not folder.is_dir():
        found = (
            "a symbolic link"
            if folder.is_symlink()
            else "nothing"
            if not folder.exists()
            else "a file"
        )
        raise BundleError(
            f"{folder} must be a folder of the bundle itself",
            found=found,
            fix="copy the model directory with what it links to",
        )


def _check_sizes(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raise BundleError for links, special files and too large files, before any is read."""
    for name in sorted(files):
        try:
            with open_regular(path / name) as descriptor:
                size = os.fstat(descriptor).st_size
        except OSError as error:
            raise BundleError(
                f"{path / name} must be a plain file of the bundle itself",
                found=_describe_file_type(path / name) or (error.strerror or str(error)).lower(),
                fix="copy the model directory again, with what it links to",
            ) from error
        if size > layout.MAX_FILE_BYTES[name]:
            raise BundleError(
                f"{path / name} must have at most {layout.MAX_FILE_BYTES[name]} bytes",
                found=f"{size}",
                fix="copy the model directory again",
            )


def _describe_file_type(path: Path) -> str:
    """Return what was found instead of a regular file."""
    if path.is_symlink():
        return "a symbolic link"
    if path.is_dir():
        return "a folder"
    return "a pipe, a socket or a device" if path.exists() else "nothing"


def _read_config(path: Path) -> Config:
    """Read the resolved configuration and validate it."""
    try:
        return from_dict(manifest.read_json(path))
    except ConfigError as error:
        found = "; ".join(error.problems[:3])
        raise BundleError(
            f"{path} must be a valid configuration",
            found=found,
            fix="use the dragoman that wrote it",
        ) from error


def _read_calibration(path: Path) -> ConfidenceMap:
    """Read the calibration of the confidence and validate it."""
    content = manifest.read_json(path, max_bytes=layout.MAX_FILE_BYTES[layout.CALIBRATION])
    return ConfidenceMap.from_dict(content, str(path))


def _read_text(path: Path) -> str:
    """Read a text file of at most its maximum size."""
    try:
        return read_regular(path, layout.MAX_FILE_BYTES[path.name]).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(
            f"{path} must be UTF-8", found=str(error), fix="copy the model directory again"
        ) from error
