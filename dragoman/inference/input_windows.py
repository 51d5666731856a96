"""Reading ahead: lines go through a model in windows, within which like lengths are translated together.

A long window wastes little, and a short one answers soon. What is there already is read a whole window at a time; whoever has yet to
write the next lines may be waiting for answers to the last.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

from dragoman.errors import DataError

FIRST_WINDOW_LINES = 32  # lines that are waited for before the first answers
MAX_WINDOW_CHARS = (
    1 << 22
)  # of a window at most, so that long lines fill the memory no more than many
_WINDOW_GROWTH = 8  # how many times as long each window is as the last where nobody can say whether more lines are there
_STEADY_WINDOW_LINES = 256  # lines of a window from which on such lines are taken for a file, and read on while the last window is translated


class LineWindow(NamedTuple):
    """Lines that are looked at together."""

    first: int  # the number of its first line in the whole input, counted from 0
    texts: list[str]


class LineWindows:
    """The windows of some lines, in rows: within a row, reading the next keeps nobody waiting for answers to the last.

    Lines are there already in a list, in a regular file, and where an object of many lines has a method `ready` that says so. An error
    in the input comes after all that was read before it.
    """

    def __init__(self, lines: Iterable[Any], *, first: int, max_lines: int) -> None:
        self._lines, self._ready, self._max_lines = (
            iter_texts(lines),
            get_ready_check(lines),
            max_lines,
        )
        self._min_lines = min(first, max_lines)  # lines to wait for
        self._lines_read = 0
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Iterator[LineWindow]]:
        """Give the rows; each must be gone through before the next."""
        while (window := self._read_window(self._min_lines)).texts:
            yield self._iter_row(window)

    def _iter_row(self, window: LineWindow) -> Iterator[LineWindow]:
        """Give a window, and those after it that can be read meanwhile."""
        while window.texts:
            yield window
            if not (self._ready() if self._ready else len(window.texts) >= _STEADY_WINDOW_LINES):
                return
            window = self._read_window(1 if self._ready else self._min_lines)

    def _read_window(self, min_lines: int) -> LineWindow:
        """Read as many lines as must be waited for, and on to a full window as long as they are there."""
        if self._error is not None:
            raise self._error
        texts_read, characters = list[str](), 0
        while (
            len(texts_read) < self._max_lines
            and characters < MAX_WINDOW_CHARS
            and (len(texts_read) < min_lines or (self._ready is not None and self._ready()))
        ):
            try:
                line = next(self._lines, None)
            except Exception as error:  # told when all that came before is answered
                self._error = error
                if not texts_read:
                    raise
                break
            if line is None:
                break
            texts_read.append(line)
            characters += len(line)
        if self._ready is None:
            self._min_lines = min(_WINDOW_GROWTH * self._min_lines, self._max_lines)
        self._lines_read += len(texts_read)
        return LineWindow(self._lines_read - len(texts_read), texts_read)


def get_ready_check(lines: Iterable[Any]) -> Callable[[], bool] | None:
    """Give what says whether the next line can be had without waiting; None where nothing does."""
    own = getattr(lines, "ready", None)
    if callable(own):
        return own
    return (lambda: True) if isinstance(lines, Sized) or is_regular_file(lines) else None


def is_regular_file(stream: Any) -> bool:
    """Say whether something open is a file on a disk, and not a pipe, a terminal or no file at all."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, TypeError, ValueError):  # closed, or without a number
        return False


def check_text_iterable(lines: Any) -> Iterable[Any]:
    """Refuse what is not a row of texts: a single one would be taken letter by letter."""
    if isinstance(lines, str):
        raise DataError(
            "texts must be a list of texts",
            found=f"one text, {lines!r:.60}",
            fix="put it in brackets: [text]",
        )
    if isinstance(lines, (bytes, Mapping)) or not isinstance(lines, Iterable):
        raise DataError(
            "texts must be a list of texts",
            found=_describe_value(lines),
            fix='give a list such as ["Guten Morgen."], or an open text file',
        )
    return lines


def iter_texts(lines: Iterable[Any]) -> Iterator[str]:
    """Hand on texts, and refuse the first thing that is not one with its place."""
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise DataError(
                f"text {number} must be a text",
                found=_describe_value(line),
                fix='give "" for an empty one, and decode bytes as UTF-8',
            )
        yield line


def _describe_value(value: Any) -> str:
    """Say what stands where text belongs."""
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
