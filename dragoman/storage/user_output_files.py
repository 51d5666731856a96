"""Output files that a person named: checked before the work starts, written atomically."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from dragoman.errors import ConfigError, PermissionDeniedError
from dragoman.storage.atomic_and_safe_file_io import sync_directory, temporary_name
from dragoman.storage.disk_space_and_errors import os_errors_converted


def check_output_file(
    option: str, path: Path, *, inputs: Iterable[Path] = (), others: Iterable[Path] = ()
) -> None:
    """Raise an error if an output file cannot be written, or is an input or another output.

    An input may be a model directory, which must not have the output inside.
    """
    real = Path(os.path.realpath(path))
    if path.is_dir():
        raise ConfigError(
            [f"{option} must name a file; found the directory {path}; add a file name to it"]
        )
    if not real.parent.is_dir():
        found = f"a file at {real.parent}" if real.parent.exists() else f"no {real.parent}"
        raise ConfigError(
            [
                f"{option} must be in an existing directory; found {found}; make it: mkdir -p "
                f"{shlex.quote(str(real.parent))}"
            ]
        )
    _check_writable(option, real if real.exists() and not real.is_file() else real.parent)
    if real.is_file():
        _check_writable(option, real)
    for each in inputs:
        if Path(each).is_dir() and Path(os.path.realpath(each)) in real.parents:
            raise ConfigError(
                [
                    f"{option} must be outside the model directory that the command reads; found "
                    f"{path} in {each}; write to another directory"
                ]
            )
        if _is_same_file(real, Path(each)):
            raise ConfigError(
                [
                    f"{option} must not be a file that the command reads; found {path}; write to "
                    "another and rename it after"
                ]
            )
    for each in others:
        if _is_same_file(real, Path(each)):
            raise ConfigError(
                [
                    f"each output must have its own file; found {path} twice; name another "
                    f"with {option}"
                ]
            )


def _check_writable(option: str, path: Path) -> None:
    """Raise PermissionDeniedError if a path is not writable."""
    if not os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0)):
        raise PermissionDeniedError(
            f"{option} must be writable",
            found=f"no permission to write {path}",
            fix="change its permissions or choose another path",
        )


def _is_same_file(real: Path, other: Path) -> bool:
    """Whether two paths name one file, existing or not."""
    try:
        return os.path.samefile(real, other)
    except OSError:
        return real == Path(os.path.realpath(other))


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a person named: atomically, through links; a device or a pipe directly."""
    with _open_bytes(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[TextIO]:
    """Open a text file for atomic writing, compressed if it ends in .gz or .xz.

    Lines are written to a temporary file, which replaces an old file at the end and is removed
    after an error. A device or a pipe is written directly.
    """
    with _open_bytes(path) as file, _text_writer(file, path.suffix) as text:
        yield text


@contextlib.contextmanager
def _open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for atomic writing, or a device directly."""
    real = Path(os.path.realpath(path))
    with os_errors_converted(real):
        if real.exists() and not real.is_file():
            with open(real, "wb") as device:
                yield device
            return
        temporary = real.with_name(temporary_name(real.name[:40]))
        try:
            with open(temporary, "xb") as file:
                if real.exists():
                    os.fchmod(file.fileno(), stat.S_IMODE(real.stat().st_mode))
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, real)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        sync_directory(real.parent)


@contextlib.contextmanager
def _text_writer(file: IO[bytes], suffix: str) -> Iterator[TextIO]:
    """Yield a UTF-8 text stream with the compression of a suffix."""
    packed: Any = file
    if suffix.lower() == ".gz":
        # No name or time: equal texts give equal bytes.
        packed = gzip.GzipFile("", "wb", 6, file, mtime=0)
    elif suffix.lower() == ".xz":
        packed = lzma.LZMAFile(file, "wb")  # noqa: SIM115 -- closed below, after the text that is written through it
    text = io.TextIOWrapper(packed, encoding="utf-8", newline="\n")
    try:
        yield text
        text.flush()
    finally:
        text.detach()
        if packed is not file:
            packed.close()
