"""Disk checks: free space, permissions, and the conversion of OSError to our errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from dragoman.errors import BundleError, DiskError, DragomanError, PermissionDeniedError

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_PERMISSION_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class DiskFullError(DiskError):
    """The disk is full: unlike other disk errors it may pass when space is freed."""


def convert_os_error(error: OSError, path: Path) -> DragomanError:
    """Return our error for an OSError: PermissionDeniedError, BundleError or DiskError."""
    name = error.filename or path
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and error.filename2:  # a rename to it failed
        return BundleError(
            "--out must be a new directory",
            found=f"files of another process at {error.filename2}",
            fix="choose another path, or remove it first",
        )
    found = f"{error.strerror or error} at {name}"
    if error.errno in DISK_FULL_ERRNOS:
        return DiskFullError(
            "the disk must have space for the file",
            found=found,
            fix="free some space and run the same command again",
        )
    if error.errno == errno.EFBIG:  # from RLIMIT_FSIZE; freeing space does not help
        return DiskError(
            "the file must be within the system's size limit",
            found=found,
            fix="raise the limit, as with ulimit -f unlimited",
        )
    if error.errno in _PERMISSION_ERRNOS:
        return PermissionDeniedError(
            "the directory must be writable",
            found=found,
            fix="change its permissions or choose another directory",
        )
    return DiskError(
        "reading and writing must succeed",
        found=found,
        fix="check the disk and run the same command again",
    )


@contextlib.contextmanager
def os_errors_converted(path: Path) -> Iterator[None]:
    """Convert every OSError of the block."""
    try:
        yield
    except OSError as error:
        raise convert_os_error(error, path) from error


def free_disk_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user may still write on the disk of `path`."""
    return shutil.disk_usage(path).free


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def require_disk_space(path: Path, needed: int, what: str) -> None:
    """Raise DiskError if a write would not fit on the disk."""
    free = free_disk_bytes(path)
    if free < needed:
        raise DiskFullError(
            f"{what} must fit on the disk: {format_bytes(needed)}",
            found=f"{format_bytes(free)} free at {path}",
            fix="free some space, or choose a directory on another disk",
        )


def require_writable(directory: Path) -> None:
    """Create the directory if it is missing; raise if it is not writable."""
    with os_errors_converted(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))


def require_new_directory(out: Path) -> None:
    """Raise an error if `out` exists or cannot be created; creates nothing."""
    with os_errors_converted(out):
        if os.path.lexists(out):
            what = (
                "a symbolic link"
                if out.is_symlink()
                else "a directory"
                if out.is_dir()
                else "a file"
            )
            if what == "a directory":
                what = "a directory with files" if any(out.iterdir()) else "an empty directory"
            raise BundleError(
                "--out must be a new directory",
                found=f"{what} at {out}",
                fix="choose another path, or remove it first",
            )
    require_parent_writable(out)


def require_parent_directory(out: Path) -> None:
    """Raise an error unless `out` is, or can be made as, a directory in an existing one."""
    for path, must in ((out.parent, "must be in a directory"), (out, "must be a directory")):
        if path.exists() and not path.is_dir():
            raise BundleError(
                f"--out {must}",
                found=f"a file at {path}",
                fix="choose another path",
            )
    if not out.absolute().parent.is_dir():
        raise BundleError(
            "--out must be in an existing directory",
            found=f"no {out.parent}",
            fix=f"make it: mkdir -p {shlex.quote(str(out.parent))}",
        )


def require_parent_writable(path: Path) -> None:
    """Raise an error if `path` or a missing parent cannot be created; creates nothing."""
    with os_errors_converted(path):
        nearest = next(each for each in path.absolute().parents if os.path.lexists(each))
        if not nearest.is_dir():
            what = "a broken link" if nearest.is_symlink() else "a file"
            raise BundleError(
                f"{path} must be in a directory",
                found=f"{what} at {nearest}",
                fix="choose another path",
            )
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))
