"""Printing of commands: results on stdout, everything else on stderr.

Names, cards and messages may come from untrusted files. Control characters are escaped in
everything but translations, so that no file can control the terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dragoman.errors import escape_json_controls, escape_unprintable

PIPE_WIDTH = 200  # columns of a table written to a file or a pipe
_UNLIMITED = 100_000  # columns
_WARNING = "warning:"


class _Notes:
    """Whether notes are printed: --quiet leaves warnings and errors only."""

    shown = True


def show_notes(shown: bool) -> None:
    """Print notes or leave them out, except warnings."""
    _Notes.shown = shown


def print_error(message: str) -> None:
    """Print an error to stderr."""
    print(
        f"dragoman: error: {escape_unprintable(message, lines=True)}", file=sys.stderr, flush=True
    )


def print_note(message: str) -> None:
    """Print a message that is not a result to stderr, unless --quiet was given."""
    if not _Notes.shown and not message.startswith(_WARNING):
        return
    print(f"dragoman: {escape_unprintable(message, lines=True)}", file=sys.stderr, flush=True)


def print_result(text: str = "") -> None:
    """Print a line of the result and flush it."""
    print(escape_unprintable(text, lines=True), flush=True)


def print_text(text: str) -> None:
    """Print a translation unchanged and flush it."""
    print(text, flush=True)


def print_json(value: Any, write: Callable[[str], object] = print_text) -> None:
    """Print a value as one line of JSON; non-ASCII text is kept, control characters are escaped."""
    write(escape_json_controls(json.dumps(value, ensure_ascii=False)))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    right: Sequence[str] = (),
) -> None:
    """Print a table; columns named in `right` are right-aligned, a rich `Text` keeps its style."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, header_style="bold", pad_edge=False, show_header=any(columns))
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(
            *(
                cell if isinstance(cell, Text) else Text(escape_unprintable(str(cell)))
                for cell in row
            )
        )
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    if title:
        console.print(Text(escape_unprintable(title), style="bold"), soft_wrap=True)
    if not any(
        " " in str(cell) for cell in drawn.columns[-1].cells
    ):  # signatures: copied as a whole
        drawn.columns[-1].no_wrap = True
        needed = console.measure(drawn, options=console.options.update(max_width=_UNLIMITED))
        console.width = max(console.width, needed.minimum)
    console.print(drawn)


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun in the right form: `1 line`, `1,200 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
