"""Lines of standard input and of files, with a non-blocking test for further lines."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from dragoman.data.compressed_input_streams import FileStream, open_input_file
from dragoman.data.text_lines import detect_utf16, guess_encoding
from dragoman.errors import DataError

# Bytes kept of one line: more than the translator accepts (`inference/translation_result.py`),
# which reports it.
MAX_LINE_BYTES = 1 << 21
_CHUNK_BYTES = 1 << 16  # capacity of a pipe
_POLL_SECONDS = 0.01  # time for a writer to refill a pipe that was read empty


class StreamLines:
    """The lines of a stream, with `ready` to test for another line without blocking."""

    def __init__(self, stream: BinaryIO, name: str = "standard input") -> None:
        self._stream, self._name = stream, name
        self._complete: deque[bytes] = deque()  # lines read and not yet returned, with their ends
        self._splitter = _LineSplitter()
        self._ended = False
        self._is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        self._can_read()  # raises if the stream cannot be polled

    def __iter__(self) -> Iterator[str]:
        """Yield the lines as text."""
        return decode_lines(self._raw(), self._name)

    def ready(self) -> bool:
        """Whether another line can be read without blocking."""
        while not self._complete and not self._ended and self._can_read():
            self._read()
        return bool(self._complete)

    def _raw(self) -> Iterator[bytes]:
        while True:
            while not self._complete and not self._ended:
                self._read()
            if not self._complete:
                return
            yield self._complete.popleft()

    def _read(self) -> None:
        """Read a chunk, blocking if none is available, and split it into lines."""
        chunk = self._stream.read1(_CHUNK_BYTES)  # type: ignore[attr-defined]
        self._ended = not chunk
        self._complete.extend(self._splitter.split(chunk) if chunk else self._splitter.finish())

    def _can_read(self) -> bool:
        """Whether a read returns without blocking, within _POLL_SECONDS."""
        return self._is_file or bool(select.select([self._stream], [], [], _POLL_SECONDS)[0])


class _LineSplitter:
    """Splits chunks into lines; the excess of a line above MAX_LINE_BYTES is dropped."""

    def __init__(self) -> None:
        self._partial = list[bytes]()  # chunks of a line whose end has not been read
        self._partial_bytes = 0

    def split(self, chunk: bytes) -> list[bytes]:
        """Return the lines that a chunk completes, with their ends."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = self._join_partial(lines[0])
        if rest and self._partial_bytes <= MAX_LINE_BYTES:
            self._partial.append(rest)
            self._partial_bytes += len(rest)
        return [line + b"\n" for line in lines]

    def finish(self) -> list[bytes]:
        """Return the last line, if it has no line end."""
        return [last] if (last := self._join_partial(b"")) else []

    def _join_partial(self, end: bytes) -> bytes:
        """Join the chunks of a line; truncate one that is too long at a character boundary."""
        line = b"".join([*self._partial, end])
        self._partial.clear()
        self._partial_bytes = 0
        return line if len(line) <= MAX_LINE_BYTES else drop_partial_char(line[:MAX_LINE_BYTES])


def drop_partial_char(data: bytes) -> bytes:
    """Drop an incomplete UTF-8 character at the end."""
    end = len(data)
    while end > len(data) - 4 and end and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    lead = data[end - 1] if end else 0
    length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    return data if len(data) - end + 1 == length else data[: end - 1]


def open_stream_lines(stream: BinaryIO, name: str = "standard input") -> Iterable[str]:
    """Return the lines of a stream, as StreamLines where the stream can be polled."""
    try:
        return StreamLines(stream, name)
    except (OSError, ValueError):  # bytes in memory, or a system without select() on pipes
        return decode_lines(stream, name)


class InputFiles:
    """The lines of several files, one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.read = 0  # lines yielded so far
        self._ready: Callable[[], bool] = lambda: False  # of the file that is read

    def __iter__(self) -> Iterator[str]:
        """Yield the lines of all files."""
        for path in self._paths:
            for line in self._lines(path):
                self.read += 1
                yield line

    def ready(self) -> bool:
        """Whether another line can be read without blocking."""
        return self._ready()

    def count(self) -> int | None:
        """Return the number of lines of all files; None if one can be read only once."""
        if not all(path.is_file() for path in self._paths):
            return None
        total = 0
        for path in self._paths:
            last = b"\n"
            for chunk in FileStream(path).chunks():
                total, last = total + chunk.count(b"\n"), chunk[-1:]
            total += last != b"\n"
        return total

    def _lines(self, path: Path) -> Iterator[str]:
        """Yield one file's lines."""
        if str(path) == "-":
            yield from self._stream_lines(sys.stdin.buffer)
        elif not path.is_file():
            with open(path, "rb") as stream:
                yield from self._stream_lines(stream, str(path))
        else:
            self._ready = lambda: True
            yield from decode_lines(_iter_raw_lines(FileStream(path)), str(path))

    def _stream_lines(self, stream: BinaryIO, *name: str) -> Iterable[str]:
        """Return the lines of a pipe."""
        lines = open_stream_lines(stream, *name)
        self._ready = getattr(lines, "ready", lambda: False)
        return lines


def check_inputs(paths: Sequence[Path]) -> list[Path]:
    """Raise DataError now if a file cannot be read."""
    for path in paths:
        if str(path) != "-" and (path.is_file() or path.is_dir() or not path.exists()):
            open_input_file(path).close()
    return list(paths)


def _iter_raw_lines(stream: FileStream) -> Iterator[bytes]:
    """Yield a file's lines as bytes, with their line ends."""
    splitter = _LineSplitter()
    for chunk in stream.chunks():
        yield from splitter.split(chunk)
    yield from splitter.finish()


def decode_lines(stream: Iterable[bytes], name: str = "standard input") -> Iterator[str]:
    """Yield lines that end in LF or CRLF; raise DataError for one that is not UTF-8."""
    for number, raw in enumerate(stream, start=1):
        if number == 1 or b"\0" in raw:
            _check_encoding(raw, number, name)
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"line {number} of {name} must be UTF-8",
                found=f"the byte 0x{raw[error.start]:02x} at position {error.start + 1}",
                fix="convert the text first, for example with iconv -f "
                f"{guess_encoding(raw) or 'latin1'} -t utf-8",
            ) from error
        yield text.removesuffix("\n").removesuffix("\r")


def _check_encoding(raw: bytes, number: int, name: str) -> None:
    """Raise DataError for UTF-16, UTF-32 and binary data."""
    head = raw
    if b"\0" in raw and len(raw) <= 16:  # too short to detect, and cut within a two-byte line feed
        head = raw.rstrip(b"\r\n\0")
        head = (head + b"\0" * (len(head) % 2)) * 8
    encoding = detect_utf16(head) if number == 1 else ""
    if encoding:
        raise DataError(
            f"{name} must be UTF-8",
            found=encoding,
            fix=f"convert it first: iconv -f {encoding} -t UTF-8",
        )
    if b"\0" in raw:
        raise DataError(
            f"line {number} of {name} must be text",
            found=f"a NUL byte at byte {raw.index(0) + 1}",
            fix="is it text? UTF-16 must be converted first: iconv -f UTF-16 -t UTF-8",
        )
