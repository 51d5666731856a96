"""Attention as blocks of shade in a terminal: readable without colours, and narrow enough for any window."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from dragoman.explain.explanation import Weights, check_labels

_SHADES = " ░▒▓█"
_CELL = 2  # columns of the terminal for one source piece: a square, and room for one wide character
_TALLEST = 12  # characters of a source piece that are shown
_WIDEST = 16  # columns of a target piece that are shown


def attention_text(weights: Weights, *, src_pieces: Sequence[str], tgt_pieces: Sequence[str], width: int = 80) -> Text:
    """Draw weights (T, S): source pieces read downwards over the columns, target pieces stand before the rows.

    Shades are relative to the largest weight. A source wider than the terminal goes on in another band below.
    """
    check_labels(weights, src_pieces, tgt_pieces)
    names = [_shown(piece) for piece in tgt_pieces]
    margin = min(_WIDEST, max((cell_len(name) for name in names), default=0))
    band = max(1, (width - margin - 2) // _CELL)
    picture = Text(no_wrap=True)
    for start in range(0, len(src_pieces), band):
        if start:
            picture.append("\n")
        _draw_band(
            picture, weights[:, start : start + band], src_pieces[start : start + band], names, margin, float(weights.max(initial=0.0))
        )
    return picture


def _draw_band(picture: Text, weights: Weights, pieces: Sequence[str], names: Sequence[str], margin: int, most: float) -> None:
    """Draw some of the columns under their labels."""
    columns = [_clusters(_shown(piece)) for piece in pieces]
    tallest = max((len(column) for column in columns), default=0)
    for level in range(tallest):
        picture.append(" " * (margin + 2))
        for column in columns:
            at = level - (tallest - len(column))  # labels end at the picture's edge
            picture.append(set_cell_size(column[at] if at >= 0 else "", _CELL), style="dim" if at >= 0 and column[at] == "␣" else "")
        picture.append("\n")
    for name, row in zip(names, weights, strict=True):
        picture.append(" " * (margin - min(margin, cell_len(name))) + set_cell_size(name, min(margin, cell_len(name))))
        picture.append(" │", style="dim")
        for weight in row:
            shade = _SHADES[round(min(1.0, float(weight) / most) * (len(_SHADES) - 1))] if most > 0 else " "
            picture.append(shade * _CELL, style="blue")
        picture.append("\n")


def _shown(piece: str) -> str:
    """Spell a piece with a mark for its space and no character that would move the cursor."""
    return "".join(char if char.isprintable() else f"<{ord(char):X}>" for char in piece.replace("\u2581", "␣"))


def _clusters(text: str) -> list[str]:
    """Cut a label into what takes one line each: a character with the marks that combine with it."""
    clusters: list[str] = []
    for char in text:
        if clusters and (unicodedata.combining(char) or cell_len(char) == 0):
            clusters[-1] += char
        else:
            clusters.append(char)
    return clusters if len(clusters) <= _TALLEST else [*clusters[: _TALLEST - 1], "…"]
