"""Byte streams of plain, .gz and .xz text files, untrusted and in bounded memory.

A truncated archive is an error, not a shorter corpus. An archive that expands without limit is an
error, and so is a file that changes while it is read.
"""

from __future__ import annotations

import glob
import hashlib
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Protocol

from dragoman.errors import CorruptError, DataError, DiskError, DragomanError, PermissionDeniedError

_CHUNK = 1 << 18
_SUFFIXES = {".gz": "gzip", ".xz": "xz"}
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
# A pipe without a writer must not block; Windows has other flags.
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
# xz -9 needs 65 MiB to decompress; a header may ask for 4 GiB.
_XZ_MEMORY = 96 << 20


@dataclass(frozen=True, slots=True)
class DecompressionLimits:
    """Limits of decompression."""

    total_bytes: int = 1 << 40
    ratio: int = 200  # output per input in each window; text compresses 3 to 10 times
    window_bytes: int = 64 << 20


class _Decompressor(Protocol):
    """Common interface of zlib's and lzma's decompressors."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    @property
    def needs_input(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


class _GzipDecompressor:
    """zlib's decompressor with lzma's interface: unread input is kept inside."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


class FileStream:
    """Reads a file once from its start; afterwards `digest` is the SHA-256 of its bytes on disk."""

    def __init__(self, path: Path, limits: DecompressionLimits | None = None) -> None:
        self.path, self._limits = Path(path), limits or DecompressionLimits()
        self.compression = _SUFFIXES.get(self.path.suffix.lower(), "")
        self.position = 0
        self.size = 0
        self.digest = ""

    def chunks(self) -> Iterator[bytes]:
        """Yield the text's bytes in chunks of a few hundred KiB."""
        with open_input_file(self.path) as file:
            before = os.fstat(file.fileno())
            self.size, self.position = before.st_size, 0
            _check_magic(self.path, file.read(8), self.compression)
            file.seek(0)
            yield from (
                self._decompressed_chunks(self._compressed_chunks(file))
                if self.compression
                else self._compressed_chunks(file)
            )
            after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (
            after.st_size,
            after.st_mtime_ns,
        ) or self.position != before.st_size:
            raise CorruptError(
                f"{self.path} must stay as it is while it is read",
                found=f"{before.st_size} bytes at first and {self.position} read"
                if before.st_size != self.position
                else "another modification time than at first",
                fix="start again when nothing writes to it",
            )

    def _compressed_chunks(self, file: BufferedReader) -> Iterator[bytes]:
        hasher = hashlib.sha256()
        try:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
                self.position += len(chunk)
                yield chunk
        except OSError as error:
            raise DiskError(
                f"{self.path} must be readable to its end", found=str(error), fix="check the disk"
            ) from error
        self.digest = hasher.hexdigest()

    def _decompressed_chunks(self, packed: Iterator[bytes]) -> Iterator[bytes]:
        decompressor = self._new_decompressor()
        written = window_in = window_out = 0
        rest = b""
        whole = False  # whether the last archive member is complete
        try:
            for chunk in packed:
                window_in += len(chunk)
                rest = rest + chunk
                while rest or not decompressor.needs_input:
                    if whole:
                        rest = rest.lstrip(b"\0")  # both formats allow padding between members
                        if not rest:
                            break
                        decompressor, whole = self._new_decompressor(), False
                    out = decompressor.decompress(rest, _CHUNK)
                    rest = b""
                    if decompressor.eof:
                        rest, whole = decompressor.unused_data, True
                    if out:
                        written += len(out)
                        window_out += len(out)
                        if window_out >= self._limits.window_bytes:
                            self._check_limits(written, window_in, window_out)
                            window_in = window_out = 0
                        yield out
        except (zlib.error, lzma.LZMAError) as error:
            raise DataError(
                f"{self.path} must be a valid {self.compression} file",
                found=f"{error} near byte {self.position} of {self.size}",
                fix="create or copy it again",
            ) from error
        self._check_limits(written, 1, 0)
        if not whole:
            raise DataError(
                f"{self.path} must be a whole {self.compression} file",
                found=f"an end after {self.size} bytes, in the middle of the data",
                fix="copy it again: it was cut short",
            )

    def _new_decompressor(self) -> _Decompressor:
        if self.compression == "gzip":
            return _GzipDecompressor()
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)

    def _check_limits(self, written: int, window_in: int, window_out: int) -> None:
        if window_out > self._limits.ratio * window_in:
            raise DataError(
                f"{self.path} must not unpack to more than {self._limits.ratio} times its size, "
                "as text never does",
                found=f"{window_out:,} bytes out of {window_in:,}",
                fix="unpack it yourself if you trust it",
            )
        if written > self._limits.total_bytes:
            raise DataError(
                f"{self.path} must not unpack to more than {self._limits.total_bytes} bytes",
                found=f"{written} and more",
                fix="split it, or unpack it yourself if you trust it",
            )


def open_input_file(path: Path) -> BufferedReader:
    """Open a regular file for reading, or raise an error that states why it cannot be opened."""
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        raise _open_error(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        found = (
            "a directory" if stat.S_ISDIR(mode) else "a pipe or device, which cannot be read twice"
        )
        raise DataError(f"{path} must be a plain file", found=found, fix="pass a file")
    return open(descriptor, "rb")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes on disk.

    It is computed every time: a cached size and time would miss an edit that keeps both, and
    hashing runs at 1.8 GB/s.
    """
    with open_input_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_error(path: Path, error: OSError) -> DragomanError:
    if isinstance(error, PermissionError):
        return PermissionDeniedError(
            f"{path} must be readable", found=str(error.strerror), fix=f"chmod +r {path}"
        )
    if path.is_symlink():
        found = f"a link to {os.readlink(path)}, which does not exist"
        return DataError(
            f"{path} must exist", found=found, fix="correct the link, or name the file itself"
        )
    # The name may contain pattern characters; one that begins with a dot has no stem.
    stem = glob.escape(path.name.split(".")[0])
    near = (
        [each.name for each in sorted(path.parent.glob(f"{stem}*"))[:5] if each.is_file()]
        if stem and path.parent.is_dir()
        else []
    )
    fix = f"did you mean {', '.join(near)}?" if near else "check the path"
    return DataError(f"{path} must exist", found=f"{error.strerror}".lower(), fix=fix)


def _check_magic(path: Path, head: bytes, compression: str) -> None:
    """Raise DataError if a file's name and first bytes disagree on its compression."""
    real = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    if not head and compression:
        raise DataError(
            f"{path} must be a {compression} file, by its name",
            found="an empty file",
            fix="create or copy it again",
        )
    if real == compression:
        return
    suffix = next((suffix for suffix, name in _SUFFIXES.items() if name == real), "")
    if suffix:
        fix = f"rename it to end in {suffix}"
    else:
        fix = (
            "unpack it first, or pack it as .gz or .xz"
            if real
            else f"rename it without {path.suffix}"
        )
    raise DataError(
        f"{path} must be {compression or 'plain text'}, by its name",
        found=f"{real or 'no'} {'data' if real else compression + ' data'}",
        fix=fix,
    )
