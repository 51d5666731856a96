"""Attention weights in the terminal: shaded blocks with labels of any script."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from dragoman.explain.attention_plots import AttentionView
from dragoman.explain.explanation import AttentionWeights, check_labels
from dragoman.explain.terminal_text_width import (
    fit_cells,
    joins_letters,
    label_token,
    split_clusters,
    wrap_cells,
)

MAX_MAP_TOKENS = 64  # rows and columns of a map
_SHADES = " ░▒▓█"
_CELL_COLUMNS = 2  # terminal columns per source token: a square, or one wide character
_MAX_LABEL_LINES = 12  # lines of a label above a column
_MAX_ROW_COLUMNS = 16  # columns of a label before a row


def render_view(view: AttentionView, *, width: int = 80) -> Text:
    """Return a map with a line that names its axes above it and its scale below it."""
    drawn = Text(no_wrap=True)
    for line in wrap_cells(f"rows: {view.row_axis}; columns: {view.column_axis}", width):
        drawn.append(f"{line}\n", "dim")
    most = MAX_MAP_TOKENS
    drawn.append_text(
        render_attention(
            view.weights[:most, :most],
            src_tokens=view.columns[:most],
            tgt_tokens=view.rows[:most],
            width=width,
        )
    )
    counts = len(view.rows), len(view.columns)
    if max(counts) > most:
        shown = " and ".join(
            f"{min(count, most)} of {count:,} {name}"
            for count, name in zip(counts, ("rows", "columns"), strict=True)
        )
        for line in wrap_cells(f"the first {shown}; --html and --json have all", width):
            drawn.append(f"{line}\n", "dim")
    darkest = shade_scale(view.weights)
    scale = f"{_SHADES[1:]} up to {darkest:.2f} and more; {view.row_sum}"
    if darkest < 0.005:
        scale = f"nothing has a weight of 0.01 or more; {view.row_sum}"
    for line in wrap_cells(scale, width):
        drawn.append(f"{line}\n", "dim")
    return drawn


def render_attention(
    weights: AttentionWeights | None,
    *,
    src_tokens: Sequence[str],
    tgt_tokens: Sequence[str],
    width: int = 80,
) -> Text:
    """Return weights (T, S) as text: source tokens above the columns, targets before the rows.

    The darkest shade is from `shade_scale` on. A source wider than the terminal continues in
    another band below. Letters that join or run from right to left cannot stand above each other:
    such columns are numbered, and the numbers are explained at the end.
    """
    check_labels(weights, src_tokens, tgt_tokens)
    assert weights is not None, "check_labels rejects it"
    names = [label_token(token) for token in tgt_tokens]
    columns = [label_token(token) for token in src_tokens]
    is_numbered = any(joins_letters(column) for column in columns)
    above = [str(number) for number in range(1, len(columns) + 1)] if is_numbered else columns
    margin = min(_MAX_ROW_COLUMNS, max((cell_len(name) for name in names), default=0))
    columns_per_band = max(1, (width - margin - 2) // _CELL_COLUMNS)
    picture = Text(no_wrap=True)
    for start in range(0, len(src_tokens), columns_per_band):
        if start:
            picture.append("\n")
        _draw_band(
            picture,
            weights[:, start : start + columns_per_band],
            above[start : start + columns_per_band],
            names,
            margin,
            shade_scale(weights),
        )
    if is_numbered:
        # A mark of direction after each name: numbers must not be drawn into the next one.
        listed = "  ".join(f"{number} {name}\u200e" for number, name in enumerate(columns, 1))
        for line in wrap_cells(listed, width):
            picture.append(f"{line}\n")
    return picture


def shade_scale(weights: AttentionWeights) -> float:
    """Return the weight that gets the darkest shade: the median of the rows' largest.

    The largest of all would not do: the first row of causal attention has one key and the weight 1,
    beside which all others look empty.
    """
    largest = weights.max(axis=-1, initial=0.0)
    largest = largest[largest > 0]
    return float(np.median(largest)) if len(largest) else 0.0


def _draw_band(
    picture: Text,
    weights: AttentionWeights,
    labels: Sequence[str],
    names: Sequence[str],
    margin: int,
    scale: float,
) -> None:
    """Append one band of columns with its labels."""
    columns = [_shorten_clusters(split_clusters(label)) for label in labels]
    tallest = max((len(column) for column in columns), default=0)
    for level in range(tallest):
        line = Text(" " * (margin + 2))
        for column in columns:
            at = level - (tallest - len(column))  # labels are aligned at the bottom
            line.append(set_cell_size(column[at] if at >= 0 else "", _CELL_COLUMNS))
        line.rstrip()
        picture.append_text(line).append("\n")
    for name, row in zip(names, weights, strict=True):
        picture.append(fit_cells(name, margin, right=True))
        picture.append(" │", style="dim")
        shades = "".join(
            _SHADES[round(min(1.0, float(weight) / scale) * (len(_SHADES) - 1))] * _CELL_COLUMNS
            if scale > 0
            else " " * _CELL_COLUMNS
            for weight in row
        )
        picture.append(shades.rstrip() + "\n")


def _shorten_clusters(clusters: list[str]) -> list[str]:
    """Return the lines of a label above a column, an ellipsis last if it is too long."""
    if len(clusters) <= _MAX_LABEL_LINES:
        return clusters
    return [*clusters[: _MAX_LABEL_LINES - 1], "…"]
