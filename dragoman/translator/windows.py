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

FIRST = 32  # lines that are waited for before the first answers
CHARACTERS = 1 << 22  # of a window at most, so that long lines fill the memory no more than many
_GROWTH = 8  # how many times as long each window is as the last where nobody can say whether more lines are there
_STEADY = 256  # lines of a window from which on such lines are taken for a file, and read on while the last window is translated


class Window(NamedTuple):
    """Lines that are looked at together."""

    first: int  # the number of its first line in the whole input, counted from 0
    texts: list[str]


class Windows:
    """The windows of some lines, in rows: within a row, reading the next keeps nobody waiting for answers to the last.

    Lines are there already in a list, in a regular file, and where an object of many lines has a method `ready` that says so. An error
    in the input comes after all that was read before it.
    """

    def __init__(self, lines: Iterable[Any], *, first: int, most: int) -> None:
        self._lines, self._ready, self._most = only_texts(lines), readiness(lines), most
        self._least = min(first, most)  # lines to wait for
        self._read = 0
        self._failed: Exception | None = None

    def __iter__(self) -> Iterator[Iterator[Window]]:
        """Give the rows; each must be gone through before the next."""
        while (window := self._take(self._least)).texts:
            yield self._row(window)

    def _row(self, window: Window) -> Iterator[Window]:
        """Give a window, and those after it that can be read meanwhile."""
        while window.texts:
            yield window
            if not (self._ready() if self._ready else len(window.texts) >= _STEADY):
                return
            window = self._take(1 if self._ready else self._least)

    def _take(self, least: int) -> Window:
        """Read as many lines as must be waited for, and on to a full window as long as they are there."""
        if self._failed is not None:
            raise self._failed
        taken, characters = list[str](), 0
        while len(taken) < self._most and characters < CHARACTERS and (len(taken) < least or (self._ready is not None and self._ready())):
            try:
                line = next(self._lines, None)
            except Exception as error:  # told when all that came before is answered
                self._failed = error
                if not taken:
                    raise
                break
            if line is None:
                break
            taken.append(line)
            characters += len(line)
        if self._ready is None:
            self._least = min(_GROWTH * self._least, self._most)
        self._read += len(taken)
        return Window(self._read - len(taken), taken)


def readiness(lines: Iterable[Any]) -> Callable[[], bool] | None:
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


def given(lines: Any) -> Iterable[Any]:
    """Refuse what is not a row of texts: a single one would be taken letter by letter."""
    if isinstance(lines, str):
        raise DataError("texts must be a list of texts", found=f"one text, {lines!r:.60}", fix="put it in brackets: [text]")
    if isinstance(lines, (bytes, Mapping)) or not isinstance(lines, Iterable):
        raise DataError(
            "texts must be a list of texts", found=_kind(lines), fix='give a list such as ["Guten Morgen."], or an open text file'
        )
    return lines


def only_texts(lines: Iterable[Any]) -> Iterator[str]:
    """Hand on texts, and refuse the first thing that is not one with its place."""
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise DataError(f"text {number} must be a text", found=_kind(line), fix='give "" for an empty one, and decode bytes as UTF-8')
        yield line


def _kind(value: Any) -> str:
    """Say what stands where text belongs."""
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
