"""Standard input as lines of text, and whether more of them are there already."""

from __future__ import annotations

import os
import select
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from dragoman.errors import DataError

_CHUNK = 1 << 16  # bytes: what a pipe holds
_MOMENT = 0.01  # seconds in which whoever has more to write fills a pipe that was read empty


class Arriving:
    """The lines of a stream, which knows without waiting whether there is another: all of a file is there, and what a pipe holds."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._whole: deque[bytes] = deque()  # lines that were read and not yet asked for, their ends included
        self._begun = list[bytes]()  # what was read of a line whose end was not
        self._ended = False
        self._on_disk = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        self._can_read()  # an error where that cannot be told

    def __iter__(self) -> Iterator[str]:
        """Give the lines as text."""
        return read_lines(self._raw())

    def ready(self) -> bool:
        """Say whether another line can be had without waiting for whoever writes."""
        while not self._whole and not self._ended and self._can_read():
            self._read()
        return bool(self._whole)

    def _raw(self) -> Iterator[bytes]:
        while True:
            while not self._whole and not self._ended:
                self._read()
            if not self._whole:
                return
            yield self._whole.popleft()

    def _read(self) -> None:
        """Read what there is, waiting for it where there is nothing, and cut it at its line ends."""
        chunk = self._stream.read1(_CHUNK)  # type: ignore[attr-defined]
        if not chunk:
            self._ended = True
            self._whole.extend(filter(None, [b"".join(self._begun)]))
            self._begun.clear()
            return
        *lines, rest = chunk.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._begun, lines[0]])
            self._begun.clear()
            self._whole.extend(line + b"\n" for line in lines)
        if rest:
            self._begun.append(rest)

    def _can_read(self) -> bool:
        """Say whether reading returns at once, or as good as."""
        return self._on_disk or bool(select.select([self._stream], [], [], _MOMENT)[0])


def open_lines(stream: BinaryIO) -> Iterable[str]:
    """Give the lines of a stream, which know whether there are more wherever that can be known."""
    try:
        return Arriving(stream)
    except (OSError, ValueError):  # bytes in memory, or a system that cannot tell what a pipe holds
        return read_lines(stream)


def read_lines(stream: Iterable[bytes]) -> Iterator[str]:
    """Read lines that end in LF or CRLF and nothing else; the first one that is not UTF-8 ends the command."""
    for number, raw in enumerate(stream, start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"line {number} of standard input must be UTF-8",
                found=f"the byte 0x{raw[error.start]:02x} at position {error.start + 1}",
                fix="convert the text first, for example with iconv -f latin1 -t utf-8",
            ) from error
        yield text.removesuffix("\n").removesuffix("\r")
