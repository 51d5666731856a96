"""Atomic, durable writes: fsync the data, then make it visible by one rename.

Checkpoints are written so by `write_checkpoint` of `checkpoint/checkpoint_io.py`.
"""

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
from dragoman.storage import fault_injection

Bytes = bytes | bytearray | memoryview

_CHUNK = 1 << 22  # bytes read or written at a time
# Flags that a system lacks are not needed there.
_SAFE_OPEN_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)
_BINARY_FLAG = getattr(os, "O_BINARY", 0)


class FileRecord(NamedTuple):
    """Size and SHA-256 of a file, as a manifest lists them."""

    bytes: int
    sha256: str


def write_file(
    path: Path, chunks: Iterable[Bytes], *, point: str = "publish.manifest"
) -> FileRecord:
    """Write a new file durably, read it back and return its record; raise if the name exists.

    The mode is 0666 minus the umask, so that a server under another user can read a model.
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
    """Return the size and SHA-256 of a regular file, read in chunks."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as descriptor:
        while block := os.read(descriptor, _CHUNK):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading without following links; a pipe does not block."""
    descriptor = os.open(path, os.O_RDONLY | _SAFE_OPEN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the contents of an untrusted regular file; raise OSError if it is larger."""
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
    """Yield a UTF-8 name of a path for native libraries: the path, or a temporary link to it."""
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
    """Open a file for writing; raise BundleError if it is a link or not a regular file.

    O_NONBLOCK keeps a pipe without a reader from blocking; it has no effect on regular files.
    """
    try:
        descriptor = os.open(path, flags | _SAFE_OPEN_FLAGS | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        found = describe_irregular(path)
        if found:
            raise _not_regular_error(path, found) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular_error(path, describe_irregular(path) or "something else")
    return descriptor


def _not_regular_error(path: Path, found: str) -> BundleError:
    return BundleError(
        f"{path} must be a plain file of the run itself",
        found=found,
        fix="remove it, or put the file itself there",
    )


def describe_irregular(path: Path) -> str:
    """Return the kind of a path that is not a regular file; "" if it is one, or absent."""
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
    """Replace the contents of a small file atomically: readers see the old or the new contents."""
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

    The rename fails if a non-empty directory has the name already.
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
    """Yield a temporary directory beside `final` to be filled, then rename it by `publish`.

    A failure removes it, and the parents that were made for it. Temporary directories of the same
    label whose process has ended are removed first.
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
    """Remove temporary directories of processes that have ended; links are not followed."""
    for each in folder.glob(f".tmp-{label}-*"):
        match = re.fullmatch(rf"\.tmp-{label}-(\d+)-[0-9a-f]{{8}}", each.name)
        if (
            match
            and not is_process_alive(int(match[1]))
            and each.is_dir()
            and not each.is_symlink()
        ):
            shutil.rmtree(each, ignore_errors=True)


def is_process_alive(pid: int) -> bool:
    """Whether a process is alive; True where the system cannot be asked safely."""
    if os.name != "posix":
        return True  # signal 0 would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync_directory(directory: Path) -> None:
    """Make the directory's entries durable."""
    if not hasattr(os, "O_DIRECTORY"):
        # Windows cannot open directories; it syncs entries with the files
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(label: str) -> str:
    """Return a temporary name with our process id: `.tmp-<label>-<pid>-<random>`."""
    return f".tmp-{label}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_flat_directory(directory: Path) -> bool:
    """Remove a directory of plain files; return whether it is gone.

    A directory that contains another directory is left in place.
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
    """Write all bytes; one system call may write fewer than it was given."""
    rest = memoryview(data).cast("B")
    total = len(rest)
    while rest:
        rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
    return total


def _chunks_with_fault(chunks: Iterable[Bytes], point: str) -> Iterator[Bytes]:
    """Yield the chunks, with the fault point in the middle of the first one."""
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
