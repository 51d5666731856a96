"""Standard input and files as lines of text, and whether more of them are there already."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from dragoman.data.lines import detect_utf16, guess_encoding
from dragoman.data.text_stream import TextStream, open_input_file
from dragoman.errors import DataError

# Bytes kept of one line: more than the translator takes of it (`inference/translation.py`), which then says so.
MAX_LINE_BYTES = 1 << 21
_CHUNK_BYTES = 1 << 16  # bytes: what a pipe holds
_POLL_SECONDS = 0.01  # seconds in which whoever has more to write fills a pipe that was read empty


class StreamLines:
    """The lines of a stream, which knows without waiting whether there is another: all of a file is there, and what a pipe holds."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._complete: deque[bytes] = (
            deque()
        )  # lines that were read and not yet asked for, their ends included
        self._partial = list[bytes]()  # what was read of a line whose end was not
        self._held = 0  # bytes of that; the rest of a line that is too long is not kept
        self._ended = False
        self._is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        self._can_read()  # an error where that cannot be told

    def __iter__(self) -> Iterator[str]:
        """Give the lines as text."""
        return decode_lines(self._raw())

    def ready(self) -> bool:
        """Say whether another line can be had without waiting for whoever writes."""
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
        """Read what there is, waiting for it where there is nothing, and cut it at its line ends."""
        chunk = self._stream.read1(_CHUNK_BYTES)  # type: ignore[attr-defined]
        if not chunk:
            self._ended = True
            self._complete.extend(filter(None, [self._join_partial(b"")]))
            return
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = self._join_partial(lines[0])
            self._complete.extend(line + b"\n" for line in lines)
        if rest and self._held <= MAX_LINE_BYTES:
            self._partial.append(rest)
            self._held += len(rest)

    def _join_partial(self, end: bytes) -> bytes:
        """Put a line together; of one that is too long, as much as shows that it is, up to the end of a character."""
        line = b"".join([*self._partial, end])
        self._partial.clear()
        self._held = 0
        return line if len(line) <= MAX_LINE_BYTES else drop_partial_char(line[:MAX_LINE_BYTES])

    def _can_read(self) -> bool:
        """Say whether reading returns at once, or as good as."""
        return self._is_file or bool(select.select([self._stream], [], [], _POLL_SECONDS)[0])


def drop_partial_char(data: bytes) -> bytes:
    """Drop the bytes of a UTF-8 character that was cut off at the end."""
    end = len(data)
    while end > len(data) - 4 and end and data[end - 1] & 0xC0 == 0x80:
        end -= 1
    lead = data[end - 1] if end else 0
    length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    return data if len(data) - end + 1 == length else data[: end - 1]


def open_stream_lines(stream: BinaryIO) -> Iterable[str]:
    """Give the lines of a stream, which know whether there are more wherever that can be known."""
    try:
        return StreamLines(stream)
    except (OSError, ValueError):  # bytes in memory, or a system that cannot tell what a pipe holds
        return decode_lines(stream)


class InputFiles:
    """The lines of files, one after the other; all of a file is there already, so windows of them are full."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.read = 0  # lines handed on so far
        self._waiting = False  # whether lines come from a pipe, whose writer may be slow

    def __iter__(self) -> Iterator[str]:
        """Yield the lines of all files."""
        for path in self._paths:
            for line in self._lines(path):
                self.read += 1
                yield line

    def ready(self) -> bool:
        """Whether another line can be had without waiting."""
        return not self._waiting

    def count(self) -> int | None:
        """Count the lines of all files; None where one can be read only once."""
        if not all(path.is_file() for path in self._paths):
            return None
        total = 0
        for path in self._paths:
            last = b"\n"
            for chunk in TextStream(path).chunks():
                total, last = total + chunk.count(b"\n"), chunk[-1:]
            total += last != b"\n"
        return total

    def _lines(self, path: Path) -> Iterator[str]:
        """Yield one file's lines."""
        self._waiting = str(path) == "-" or not path.is_file()
        if str(path) == "-":
            yield from decode_lines(sys.stdin.buffer)
        elif self._waiting:
            with open(path, "rb") as stream:
                yield from decode_lines(stream, str(path))
        else:
            yield from decode_lines(_iter_raw_lines(TextStream(path)), str(path))


def check_inputs(paths: Sequence[Path]) -> list[Path]:
    """Raise the error that reading a file would raise, before any work is done."""
    for path in paths:
        if str(path) != "-" and (path.is_file() or path.is_dir() or not path.exists()):
            open_input_file(path).close()
    return list(paths)


def _iter_raw_lines(stream: TextStream) -> Iterator[bytes]:
    """Yield a file's lines as bytes, their ends included."""
    partial = list[bytes]()
    for chunk in stream.chunks():
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            yield b"".join([*partial, line, b"\n"])
            partial.clear()
        if rest:
            partial.append(rest)
    if partial:
        yield b"".join(partial)


def decode_lines(stream: Iterable[bytes], name: str = "standard input") -> Iterator[str]:
    """Read lines that end in LF or CRLF and nothing else; the first one that is not UTF-8 text ends the command."""
    for number, raw in enumerate(stream, start=1):
        if number == 1 or b"\0" in raw:
            _check_encoding(raw, number, name)
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"line {number} of {name} must be UTF-8",
                found=f"the byte 0x{raw[error.start]:02x} at position {error.start + 1}",
                fix=f"convert the text first, for example with iconv -f {guess_encoding(raw) or 'latin1'} -t utf-8",
            ) from error
        yield text.removesuffix("\n").removesuffix("\r")


def _check_encoding(raw: bytes, number: int, name: str) -> None:
    """Raise DataError for UTF-16, UTF-32 and other bytes that are no text, as reading a corpus does."""
    head = raw
    if (
        b"\0" in raw and len(raw) <= 16
    ):  # too short to tell, and cut within the two bytes of its line feed
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
