"""Validated lines of a text file: UTF-8, length and NUL bytes are checked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dragoman.data.compressed_input_streams import DecompressionLimits, FileStream
from dragoman.errors import DataError

_HIGH_RUNS = re.compile(rb"[\x80-\xff]+")
_LATIN_WORD = re.compile(rb"[A-Za-z][\xc0-\xff]|[\xc0-\xff][A-Za-z]")  # as in "Gr\xfc\xdfe"


def guess_encoding(line: bytes) -> str:
    """Return the likeliest encoding of a line that is not UTF-8, or ""."""
    runs = _HIGH_RUNS.findall(line)
    if not runs:
        return ""
    high = b"".join(runs)
    if (
        _can_decode(line, "gb18030")
        and sum(len(run) for run in runs if not len(run) % 2) > len(high) / 2
        and _is_common_hanzi(high)
    ):
        return "GBK"
    if (
        _can_decode(line, "cp1251")
        and len(high) / len(runs) >= 2
        and sum(byte >= 0xC0 for byte in high) > 0.9 * len(high)
        and not _LATIN_WORD.search(line)
    ):
        return "CP1251"
    return "CP1252" if _can_decode(line, "cp1252") else ""


def detect_utf16(head: bytes) -> str:
    """Detect UTF-16 and UTF-32 by a file's first bytes: a BOM, or a zero in every second byte."""
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        half = head[first:1024:2]
        if (
            len(half) >= 4
            and half.count(0) > 0.6 * len(half)
            and head[1 - first : 1024 : 2].count(0) < 0.1 * len(half)
        ):
            return name
    return ""


def _can_decode(line: bytes, encoding: str) -> bool:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _is_common_hanzi(high: bytes) -> bool:
    """Whether the lead bytes are mostly those of GB 2312's common characters, rows 16 to 55."""
    leads = high[::2]
    return sum(0xB0 <= byte <= 0xD7 or byte == 0xA3 or byte == 0xA1 for byte in leads) >= 0.6 * len(
        leads
    )


class BadLine(NamedTuple):
    """A line that cannot be used: what must hold, what was found, what to do."""

    file: Path
    number: int
    # "invalid", "broken" for a row, or "overlong", which is always skipped and never an error
    kind: str
    must: str
    found: str
    fix: str

    def error(self, *, training: bool = False) -> DataError:
        """Return the error with the file and the line; in training the line may be skipped."""
        skip = ", or leave it out with --set data.on_bad_line=skip" if training else ""
        return DataError(
            f"{self.file} line {self.number} {self.must}", found=self.found, fix=self.fix + skip
        )


class NumberedLine(NamedTuple):
    """A line's number from 1, and its text without the line end."""

    number: int
    text: str


def read_lines(
    path: Path, *, max_line_bytes: int = 65_536, limits: DecompressionLimits | None = None
) -> Iterator[NumberedLine]:
    """Yield a file's lines; the first bad one raises an error."""
    lines = itertools.chain.from_iterable(
        read_line_blocks(FileStream(path, limits), max_line_bytes)
    )
    for number, text in enumerate(lines, 1):
        if isinstance(text, BadLine):
            raise text.error()
        yield NumberedLine(number, text)


def read_line_blocks(stream: FileStream, max_line_bytes: int) -> Iterator[list[str | BadLine]]:
    """Yield a file's lines in blocks, bad ones included."""
    number = 1  # number of the next block's first line
    rest = b""
    dropped = 0  # bytes of an overlong line dropped so far
    first = True
    for chunk in stream.chunks():
        if first:
            chunk, first = _strip_byte_order_mark(stream.path, chunk), False
        block: list[str | BadLine] = []
        if dropped:
            end = chunk.find(b"\n")
            if end < 0:
                dropped += len(chunk)
                continue
            block.append(_overlong_line(stream.path, number, dropped + end, max_line_bytes))
            chunk, dropped = chunk[end + 1 :], 0
        end = chunk.rfind(b"\n")
        if end >= 0:
            block += _decode_lines(
                stream.path, number + len(block), rest + chunk[:end], max_line_bytes
            )
            rest = chunk[end + 1 :]
        else:
            rest += chunk
        if len(rest) > max_line_bytes + 1:  # one more for a CR
            rest, dropped = b"", len(rest)
        if block:
            yield block
            number += len(block)
    if dropped:
        yield [_overlong_line(stream.path, number, dropped, max_line_bytes)]
    elif rest:
        yield _decode_lines(stream.path, number, rest, max_line_bytes)


def _strip_byte_order_mark(path: Path, head: bytes) -> bytes:
    encoding = detect_utf16(head)
    if encoding:
        fix = f"convert it: iconv -f {encoding} -t UTF-8 {path} > {path}.utf8"
        raise DataError(
            f"{path} line 1 must be UTF-8, like the whole file", found=encoding, fix=fix
        )
    return head.removeprefix(b"\xef\xbb\xbf")


def _decode_lines(
    path: Path, number: int, block: bytes, max_line_bytes: int
) -> list[str | BadLine]:
    """Decode complete lines: together if all are valid, else one by one."""
    raw = block.split(b"\n")
    if len(max(raw, key=len)) <= max_line_bytes and b"\0" not in block:
        try:
            text = block.decode()
        except UnicodeDecodeError:
            pass
        else:
            lines = text.split("\n")
            return (
                [line.removesuffix("\r") for line in lines]
                if "\r" in text
                else list[str | BadLine](lines)
            )
    return [
        _decode_line(path, number + index, line.removesuffix(b"\r"), max_line_bytes)
        for index, line in enumerate(raw)
    ]


def _decode_line(path: Path, number: int, line: bytes, max_line_bytes: int) -> str | BadLine:
    if len(line) > max_line_bytes:
        return _overlong_line(path, number, len(line), max_line_bytes)
    if b"\0" in line:
        found = f"a NUL byte at byte {line.index(0) + 1}"
        return BadLine(
            path,
            number,
            "invalid",
            "must be text",
            found,
            "is it text? remove the byte",
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        guess = guess_encoding(line)
        fix = (
            f"convert the file: iconv -f {guess} -t UTF-8 {path} > {path}.utf8"
            if guess
            else "repair the line"
        )
        found = f"byte 0x{line[error.start]:02X} at byte {error.start + 1} ({error.reason})" + (
            f", it looks like {guess}" if guess else ""
        )
        return BadLine(
            path,
            number,
            "invalid",
            "must be UTF-8",
            found,
            fix,
        )


def _overlong_line(path: Path, number: int, length: int, limit: int) -> BadLine:
    found = f"{length} bytes"
    fix = (
        "put a line break between its sentences; if lines end in CR only, convert the file: "
        "tr '\\r' '\\n'"
    )
    return BadLine(path, number, "overlong", f"must have at most {limit} bytes", found, fix)
