"""Text in columns of a terminal: measured, cut and wrapped without splitting a character."""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len

SPACE_SIGN = "␣"
_NEWLINE_SIGN = "↵"
_JOINERS = frozenset("\u200d\ufe0e\ufe0f")
_REGIONAL = range(0x1F1E6, 0x1F200)  # letters whose pairs are flags


def label_token(token: str) -> str:
    """Return a token as a label: no leading space, no control characters; only spaces are "␣"."""
    text = token.replace("\u2581", " ").replace("\n", _NEWLINE_SIGN)
    text = text.lstrip(" ") or SPACE_SIGN * len(text)
    return "".join(char if _is_shown(char) else f"<{ord(char):X}>" for char in text)


def _is_shown(char: str) -> bool:
    """Whether a character may be written to a terminal as it is."""
    return char.isprintable() or char in _JOINERS or char == "\u200c"


def joins_letters(text: str) -> bool:
    """Whether a text has letters that join or run from right to left."""
    return any(unicodedata.bidirectional(char) in ("R", "AL") for char in text)


def split_clusters(text: str) -> list[str]:
    """Split a text into characters as a reader sees them, with their marks and joined emoji."""
    clusters: list[str] = []
    for char in text:
        if clusters and (
            unicodedata.combining(char)
            or cell_len(char) == 0
            or clusters[-1].endswith("\u200d")
            or (
                ord(char) in _REGIONAL and len(clusters[-1]) == 1 and ord(clusters[-1]) in _REGIONAL
            )
        ):
            clusters[-1] += char
        else:
            clusters.append(char)
    return clusters


def shorten_cells(text: str, cells: int) -> str:
    """Return a text cut to a number of terminal columns, with an ellipsis; no cluster is split."""
    if cell_len(text) <= cells:
        return text
    kept = ""
    for cluster in split_clusters(text):
        if cell_len(kept + cluster) > cells - 1:
            break
        kept += cluster
    return kept.rstrip() + "…"


def fit_cells(text: str, cells: int, *, right: bool = False) -> str:
    """Return a text of exactly so many columns: cut, or filled with spaces on one side."""
    text = shorten_cells(text, cells)
    fill = " " * (cells - cell_len(text))
    return fill + text if right else text + fill


def wrap_cells(text: str, width: int, *, indent: str = "") -> list[str]:
    """Break a text at spaces into lines of at most `width` columns; later lines are indented.

    A word that is wider than a line is broken between clusters.
    """
    lines, line = list[str](), ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line.strip() else f"{line}{word}"
        if cell_len(joined) <= width:
            line = joined
            continue
        if line.strip():
            lines.append(line)
            line = indent
        for cluster in split_clusters(word):
            if cell_len(line + cluster) > width:
                lines.append(line)
                line = indent
            line += cluster
    return [each.rstrip() for each in [*lines, line] if each.strip()]
