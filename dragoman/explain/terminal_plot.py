"""Attention weights as shaded blocks in a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from dragoman.explain.explanation import AttentionWeights, check_labels

_SHADES = " ░▒▓█"
_CELL_COLUMNS = 2  # terminal columns per source token: a square, or one wide character
_MAX_SOURCE_CHARS = 12  # characters shown of a source token
_MAX_TARGET_COLUMNS = 16  # columns shown of a target token


def render_attention(
    weights: AttentionWeights,
    *,
    src_tokens: Sequence[str],
    tgt_tokens: Sequence[str],
    width: int = 80,
) -> Text:
    """Return weights (T, S) as text: source tokens above the columns, targets before the rows.

    Shades are relative to the largest weight. A source wider than the terminal continues in another
    band below.
    """
    check_labels(weights, src_tokens, tgt_tokens)
    names = [_escape_token(token) for token in tgt_tokens]
    margin = min(_MAX_TARGET_COLUMNS, max((cell_len(name) for name in names), default=0))
    columns_per_band = max(1, (width - margin - 2) // _CELL_COLUMNS)
    picture = Text(no_wrap=True)
    for start in range(0, len(src_tokens), columns_per_band):
        if start:
            picture.append("\n")
        _draw_band(
            picture,
            weights[:, start : start + columns_per_band],
            src_tokens[start : start + columns_per_band],
            names,
            margin,
            float(weights.max(initial=0.0)),
        )
    return picture


def _draw_band(
    picture: Text,
    weights: AttentionWeights,
    tokens: Sequence[str],
    names: Sequence[str],
    margin: int,
    most: float,
) -> None:
    """Append one band of columns with its labels."""
    columns = [_split_clusters(_escape_token(token)) for token in tokens]
    tallest = max((len(column) for column in columns), default=0)
    for level in range(tallest):
        picture.append(" " * (margin + 2))
        for column in columns:
            at = level - (tallest - len(column))  # labels are aligned at the bottom
            picture.append(
                set_cell_size(column[at] if at >= 0 else "", _CELL_COLUMNS),
                style="dim" if at >= 0 and column[at] == "␣" else "",
            )
        picture.append("\n")
    for name, row in zip(names, weights, strict=True):
        picture.append(
            " " * (margin - min(margin, cell_len(name)))
            + set_cell_size(name, min(margin, cell_len(name)))
        )
        picture.append(" │", style="dim")
        for weight in row:
            shade = (
                _SHADES[round(min(1.0, float(weight) / most) * (len(_SHADES) - 1))]
                if most > 0
                else " "
            )
            picture.append(shade * _CELL_COLUMNS, style="blue")
        picture.append("\n")


def _escape_token(token: str) -> str:
    """Return a token with a visible space mark and without control characters."""
    return "".join(
        char if char.isprintable() else f"<{ord(char):X}>" for char in token.replace("\u2581", "␣")
    )


def _split_clusters(text: str) -> list[str]:
    """Split a label into characters with their combining marks, one per line."""
    clusters: list[str] = []
    for char in text:
        if clusters and (unicodedata.combining(char) or cell_len(char) == 0):
            clusters[-1] += char
        else:
            clusters.append(char)
    return (
        clusters
        if len(clusters) <= _MAX_SOURCE_CHARS
        else [*clusters[: _MAX_SOURCE_CHARS - 1], "…"]
    )
