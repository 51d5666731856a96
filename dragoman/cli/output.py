"""How commands show things: results on stdout, everything else on stderr.

Names, cards and messages may come from a stranger's file: everything but a translation is made `printable` here, so that
nothing a file holds can control a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dragoman.errors import escape_json_controls, escape_unprintable

PIPE_WIDTH = (
    200  # columns of a table that goes into a file or a pipe, where wrapping would only hurt
)


def print_error(message: str) -> None:
    """Say what went wrong, on stderr, the way every Unix command does."""
    print(
        f"dragoman: error: {escape_unprintable(message, lines=True)}", file=sys.stderr, flush=True
    )


def print_note(message: str) -> None:
    """Say something that is not a result, on stderr."""
    print(f"dragoman: {escape_unprintable(message, lines=True)}", file=sys.stderr, flush=True)


def print_result(text: str = "") -> None:
    """Write a line of the result, and let a pipe have it at once."""
    print(escape_unprintable(text, lines=True), flush=True)


def print_text(text: str) -> None:
    """Write a line of text as the model gave it, character by character: it is data, and somebody may compare it."""
    print(text, flush=True)


def print_json(value: Any, write: Callable[[str], object] = print_text) -> None:
    """Write a result as one line of JSON, text in its own script; controls are escaped, which is the same JSON."""
    write(escape_json_controls(json.dumps(value, ensure_ascii=False)))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    right: Sequence[str] = (),
) -> None:
    """Draw a table; the columns named in `right` are set flush right, as numbers are, and a rich `Text` keeps its style."""
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
    console.print(drawn)


def format_count(number: int, noun: str) -> str:
    """Count things in words that agree: `1 line`, `1,200 lines`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
