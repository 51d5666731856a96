"""Writing that is there whole or not at all: fsync before every name, one rename to make it visible."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dragoman.errors import BundleError
from dragoman.runtime.processes import is_process_alive
from dragoman.storage import fault_injection

Bytes = bytes | bytearray | memoryview

_CHUNK = 1 << 22  # bytes read or written at a time; larger gains nothing
# Systems that lack one of these have no such trap to fall into.
_SAFE_OPEN_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)
_BINARY_FLAG = getattr(os, "O_BINARY", 0)


class FileRecord(NamedTuple):
    """What a manifest remembers of a file."""

    bytes: int
    sha256: str


def write_file(
    path: Path, chunks: Iterable[Bytes], *, point: str = "publish.manifest"
) -> FileRecord:
    """Write a new file durably, read it back, and return what the disk gave; an existing name is an error.

    The mode is what the umask leaves of 0666, so that a server under another user can read a model.
    """
    written = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY_FLAG, 0o666)
    try:
        for chunk in _chunks_with_fault(chunks, point):
            written += _write_all(descriptor, chunk)
        fault_injection.point("publish.fsync")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    record = hash_file(path)
    if record.bytes != written:
        raise OSError(errno.EIO, f"wrote {written} bytes and read back {record.bytes}", str(path))
    return record


def hash_file(path: Path) -> FileRecord:
    """Hash a file through a fresh descriptor, in bounded memory; links and special files are errors."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as descriptor:
        while block := os.read(descriptor, _CHUNK):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading, never through a symbolic link; a pipe must not make us wait."""
    descriptor = os.open(path, os.O_RDONLY | _SAFE_OPEN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file that anybody may have written; raise OSError where it is none or larger."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"more than {max_bytes} bytes: {size}", str(path))
        data = bytearray()
        while block := os.read(descriptor, min(_CHUNK, size + 1 - len(data))):
            data += block
            if len(data) > size:
                raise OSError(errno.EIO, "a file that grows while it is read", str(path))
        return bytes(data)


@contextlib.contextmanager
def native_path(path: Path) -> Iterator[str]:
    """Yield a name for a path that libraries take which want UTF-8: the path itself, or a link to it in a private folder."""
    text = str(path)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        with tempfile.TemporaryDirectory(prefix="dragoman-link-") as folder:
            link = Path(folder, f"link{path.suffix}" if path.suffix.isascii() else "link")
            link.symlink_to(path.absolute())
            yield str(link)
    else:
        yield text


def open_run_file(path: Path, flags: int) -> int:
    """Open a file that a run writes; raise BundleError if it is a link or no regular file, which would be written through.

    A pipe without a reader must not make us wait, hence O_NONBLOCK; to a regular file it means nothing.
    """
    try:
        descriptor = os.open(path, flags | _SAFE_OPEN_FLAGS | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        found = _describe_irregular(path)
        if found:
            raise _not_regular_error(path, found) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular_error(path, _describe_irregular(path) or "something else")
    return descriptor


def _not_regular_error(path: Path, found: str) -> BundleError:
    return BundleError(
        f"{path} must be a plain file of the run itself",
        found=found,
        fix="remove it, or put the file itself there",
    )


def _describe_irregular(path: Path) -> str:
    """Return what is at a path where a regular file belongs; nothing if it is one, or absent."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if stat.S_ISDIR(mode):
        return "a directory"
    return "" if stat.S_ISREG(mode) else "a pipe, a socket or a device"


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Give a small file new contents: readers see the old or the new, never a part."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY_FLAG, mode)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def publish_directory(temporary: Path, final: Path, *, point: str = "publish") -> None:
    """Make a finished directory visible under its name by one rename, durably.

    A directory that is there already and not empty stays as it is and the rename fails.
    """
    sync_directory(temporary)
    fault_injection.point(f"{point}.rename")
    os.rename(temporary, final)
    if point == "publish":
        fault_injection.point("publish.fsync_dir")
    sync_directory(final.parent)


@contextlib.contextmanager
def staged_directory(
    final: Path, label: str, publish: Callable[[Path, Path], None] = publish_directory
) -> Iterator[Path]:
    """Yield a new directory beside `final` to be filled; afterwards `publish` renames it to `final`.

    A failure leaves nothing behind, parents that were made for it included. What a killed process left under the same
    label is removed: directories whose whole name is that of a temporary one, and whose process is gone.
    """
    missing = [each for each in final.parents if not each.exists()]
    temporary = final.parent / temporary_name(label)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent, label)
        os.mkdir(temporary)
        yield temporary
        publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):
            for each in missing:
                each.rmdir()
        raise


def _remove_leftovers(folder: Path, label: str) -> None:
    """Remove temporary directories of processes that are gone; follows no links."""
    for each in folder.glob(f".tmp-{label}-*"):
        match = re.fullmatch(rf"\.tmp-{label}-(\d+)-[0-9a-f]{{8}}", each.name)
        if (
            match
            and not is_process_alive(int(match[1]))
            and each.is_dir()
            and not each.is_symlink()
        ):
            shutil.rmtree(each, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    if not hasattr(
        os, "O_DIRECTORY"
    ):  # Windows opens no directories, and syncs their entries with the files
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(label: str) -> str:
    """Make a name that says whose leftover it is: `.tmp-<label>-<pid>-<random>`."""
    return f".tmp-{label}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_flat_directory(directory: Path) -> bool:
    """Remove a directory of ours: its plain files and then itself; says whether it is gone.

    What it does not expect, such as a folder inside, is left where it is, and so is the directory.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.path for entry in entries if not entry.is_dir(follow_symlinks=False)]
        for name in names:
            os.unlink(name)
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _write_all(descriptor: int, data: Bytes) -> int:
    """Write until all is written: one call may take less than it was given."""
    rest = memoryview(data).cast("B")
    total = len(rest)
    while rest:
        rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
    return total


def _chunks_with_fault(chunks: Iterable[Bytes], point: str) -> Iterator[Bytes]:
    """Hand on the chunks, passing the fault point when half of the first is written: faults leave partial files."""
    first = True
    for chunk in chunks:
        if first:
            first = False
            view = memoryview(chunk).cast("B")
            yield view[: len(view) // 2]
            fault_injection.point(point)
            yield view[len(view) // 2 :]
        else:
            yield chunk
