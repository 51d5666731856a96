"""Windows of input lines for streaming: lines of a window are batched together by length.

A long window pads little; a short one has low latency. Lines that are available are read a whole
window at a time. Where a writer may wait for translations before writing more, windows start short.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from dragoman.inference.translation import iter_texts

FIRST_WINDOW_LINES = 32  # lines that are read before the first translations
MAX_WINDOW_CHARS = 1 << 22  # so that a window of long lines does not fill the memory
# If nothing tells whether more lines are available, each window is this many times as long as the
# last, and from so many lines on the next window is read while the last is translated.
_WINDOW_GROWTH = 8
_STEADY_WINDOW_LINES = 256


LineT = TypeVar("LineT")


class LineWindows(Generic[LineT]):
    """Groups of windows of lines: reading the next window of a group does not wait for a writer.

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
        self._min_lines = min(first, max_lines)  # lines to wait for
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Iterator[list[LineT]]]:
        """Yield the groups; each must be exhausted before the next."""
        while window := self._read_window(self._min_lines):
            yield self._iter_group(window)

    def _iter_group(self, window: list[LineT]) -> Iterator[list[LineT]]:
        """Yield a window, and those after it that can be read without waiting."""
        while window:
            yield window
            if not (self._ready() if self._ready else len(window) >= _STEADY_WINDOW_LINES):
                return
            window = self._read_window(1 if self._ready else self._min_lines)

    def _read_window(self, min_lines: int) -> list[LineT]:
        """Read `min_lines` lines, and more up to a full window while they are available."""
        if self._error is not None:
            raise self._error
        texts_read, characters = list[LineT](), 0
        while (
            len(texts_read) < self._max_lines
            and characters < MAX_WINDOW_CHARS
            and (len(texts_read) < min_lines or (self._ready is not None and self._ready()))
        ):
            try:
                line = next(self._lines, None)
            except Exception as error:  # raised after the lines before it were returned
                self._error = error
                if not texts_read:
                    raise
                break
            if line is None:
                break
            texts_read.append(line)
            characters += self._size(line)
        if self._ready is None:
            self._min_lines = min(_WINDOW_GROWTH * self._min_lines, self._max_lines)
        return texts_read


def get_ready_check(lines: Iterable[Any]) -> Callable[[], bool] | None:
    """Return a function that tells whether the next line is available; None if unknown."""
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
