"""Lines of text from a file: LF ends a line and nothing else does, so line numbers agree with `wc -l`.

U+2028, U+0085, form feeds and the like are content. A final CR is dropped, so is a byte order mark before line 1. A line that
is too long is never held in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dragoman.data.encodings import guess_encoding, utf16_by_head
from dragoman.data.streams import Caps, TextStream
from dragoman.errors import DataError


class BadLine(NamedTuple):
    """A line that cannot be used: what must hold, what was found, what to do."""

    file: Path
    number: int
    kind: str  # "invalid", "broken" for a row, or "overlong": the last is always set aside, never a reason to stop
    must: str
    found: str
    fix: str

    def error(self) -> DataError:
        """Make the error that names the file and the line."""
        return DataError(f"{self.file} line {self.number} {self.must}", found=self.found, fix=self.fix)


class Line(NamedTuple):
    """A line's number, counted from 1, and its text without the line's end."""

    number: int
    text: str


def open_lines(path: Path, *, max_line_bytes: int = 65_536, caps: Caps | None = None) -> Iterator[Line]:
    """Go through a file's lines; the first bad one is an error that names it."""
    lines = itertools.chain.from_iterable(line_blocks(TextStream(path, caps), max_line_bytes))
    for number, text in enumerate(lines, 1):
        if isinstance(text, BadLine):
            raise text.error()
        yield Line(number, text)


def line_blocks(stream: TextStream, max_line_bytes: int) -> Iterator[list[str | BadLine]]:
    """Go through a file's lines, many at a time; bad ones stand in their places."""
    number = 1  # of the first line of the next block
    rest = b""
    dropped = 0  # bytes of an overlong line that were thrown away already
    first = True
    for chunk in stream.chunks():
        if first:
            chunk, first = _without_mark(stream.path, chunk), False
        block: list[str | BadLine] = []
        if dropped:
            end = chunk.find(b"\n")
            if end < 0:
                dropped += len(chunk)
                continue
            block.append(_overlong(stream.path, number, dropped + end, max_line_bytes))
            chunk, dropped = chunk[end + 1 :], 0
        end = chunk.rfind(b"\n")
        if end >= 0:
            block += _decoded(stream.path, number + len(block), rest + chunk[:end], max_line_bytes)
            rest = chunk[end + 1 :]
        else:
            rest += chunk
        if len(rest) > max_line_bytes + 1:  # one more for a CR
            rest, dropped = b"", len(rest)
        if block:
            yield block
            number += len(block)
    if dropped:
        yield [_overlong(stream.path, number, dropped, max_line_bytes)]
    elif rest:
        yield _decoded(stream.path, number, rest, max_line_bytes)


def _without_mark(path: Path, head: bytes) -> bytes:
    encoding = utf16_by_head(head)
    if encoding:
        fix = f"convert it: iconv -f {encoding} -t UTF-8 {path} > {path}.utf8"
        raise DataError(f"{path} line 1 must be UTF-8, as must the whole file", found=encoding, fix=fix)
    return head.removeprefix(b"\xef\xbb\xbf")


def _decoded(path: Path, number: int, block: bytes, max_line_bytes: int) -> list[str | BadLine]:
    """Decode whole lines: at once when all are good, else one by one."""
    raw = block.split(b"\n")
    if len(max(raw, key=len)) <= max_line_bytes and b"\0" not in block:
        try:
            text = block.decode()
        except UnicodeDecodeError:
            pass
        else:
            lines = text.split("\n")
            return [line.removesuffix("\r") for line in lines] if "\r" in text else list[str | BadLine](lines)
    return [_one(path, number + index, line.removesuffix(b"\r"), max_line_bytes) for index, line in enumerate(raw)]


def _one(path: Path, number: int, line: bytes, max_line_bytes: int) -> str | BadLine:
    if len(line) > max_line_bytes:
        return _overlong(path, number, len(line), max_line_bytes)
    if b"\0" in line:
        found = f"a NUL byte at byte {line.index(0) + 1}"
        return BadLine(
            path, number, "invalid", "must be text", found, "is it text? remove the byte, or when training use --set data.on_bad_line=skip"
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        guess = guess_encoding(line)
        fix = f"convert the file: iconv -f {guess} -t UTF-8 {path} > {path}.utf8" if guess else "repair the line"
        found = f"byte 0x{line[error.start]:02X} at byte {error.start + 1} ({error.reason})" + (f", it looks like {guess}" if guess else "")
        return BadLine(path, number, "invalid", "must be UTF-8", found, f"{fix}, or when training use --set data.on_bad_line=skip")


def _overlong(path: Path, number: int, length: int, limit: int) -> BadLine:
    found = f"{length} bytes"
    fix = "raise data.max_line_bytes if it is one sentence; if lines end in CR only, convert the file: tr '\\r' '\\n'"
    return BadLine(path, number, "overlong", f"must have at most {limit} bytes", found, fix)
