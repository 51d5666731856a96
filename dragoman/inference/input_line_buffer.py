"""Buffers of input lines for streaming: lines of a buffer are batched together by length.

A large buffer pads little; a small one has low latency. Lines that are available are read a whole
buffer at a time, and no line waits for others: a process that writes the input may wait for its
translation before writing more. Where it is unknown what is available, the first buffers are small.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from dragoman.inference.long_line_segments import iter_texts

FIRST_BUFFER_LINES = 32  # lines before the first translations, if it is unknown what is available
MAX_BUFFER_CHARS = 1 << 22  # so that a buffer of long lines does not fill the memory
# If it is unknown whether more lines are available, each buffer is this many times as large as the
# last, and from so many lines on the next buffer is read while the last is translated.
_BUFFER_GROWTH = 8
_STEADY_BUFFER_LINES = 256


LineT = TypeVar("LineT")


class LineBuffers(Generic[LineT]):
    """Groups of buffers of lines: reading the next buffer of a group does not wait for input.

    Lines are available at once in a list, in a regular file, and in an iterable whose method
    `ready` returns True. An error of the input is raised after all lines read before it were
    returned. Other inputs than lines come with `check`, which yields them or raises, and `size`.
    """

    def __init__(
        self,
        lines: Iterable[Any],
        *,
        first: int,
        max_lines: int,
        check: Callable[[Iterable[Any]], Iterator[Any]] = iter_texts,
        size: Callable[[Any], int] = len,  # characters
    ) -> None:
        self._lines: Iterator[LineT] = check(lines)
        self._ready, self._max_lines, self._size = get_ready_check(lines), max_lines, size
        # Lines to wait for. A line is not available before its writer has written it.
        self._min_lines = 1 if self._ready else min(first, max_lines)
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Iterator[list[LineT]]]:
        """Yield the groups; each must be exhausted before the next."""
        while buffer := self._read_buffer(self._min_lines):
            yield self._iter_group(buffer)

    def _iter_group(self, buffer: list[LineT]) -> Iterator[list[LineT]]:
        """Yield a buffer, and those after it that can be read without waiting."""
        while buffer:
            yield buffer
            if not (self._ready() if self._ready else len(buffer) >= _STEADY_BUFFER_LINES):
                return
            buffer = self._read_buffer(self._min_lines)

    def _read_buffer(self, min_lines: int) -> list[LineT]:
        """Read `min_lines` lines, and more up to a full buffer while they are available."""
        if self._error is not None:
            raise self._error
        texts_read, characters = list[LineT](), 0
        while (
            len(texts_read) < self._max_lines
            and characters < MAX_BUFFER_CHARS
            and (len(texts_read) < min_lines or (self._ready is not None and self._ready()))
        ):
            try:
                line = next(self._lines)
            except StopIteration:
                break
            except Exception as error:  # raised after the lines before it were returned
                self._error = error
                if not texts_read:
                    raise
                break
            texts_read.append(line)
            characters += self._size(line)
        if self._ready is None:
            self._min_lines = min(_BUFFER_GROWTH * self._min_lines, self._max_lines)
        return texts_read


def get_ready_check(lines: Iterable[Any]) -> Callable[[], bool] | None:
    """Return a function for whether the next line is available; None if unknown."""
    own = getattr(lines, "ready", None)
    if callable(own):
        return own
    return (lambda: True) if isinstance(lines, Sized) or is_regular_file(lines) else None


def is_regular_file(stream: Any) -> bool:
    """Whether an open stream is a file on a disk, not a pipe or a terminal."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, TypeError, ValueError):  # closed, or without a file descriptor
        return False
