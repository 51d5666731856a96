"""Attention maps as figures: PNG, SVG or PDF, with fonts for any script."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.explain.attention_view import AttentionView
from dragoman.explain.explanation import AttentionWeights, check_labels
from dragoman.explain.figures import (
    DOTS_PER_INCH,
    FAINT,
    HEAT_MAP,
    escape_undrawable,
    figure_style,
    save_figure,
    warn_about_glyphs,
)

_CELL_INCHES = 0.2  # side of a cell: a line of its label
_MIN_CELL_INCHES = 0.08
_MAX_CELLS = 120  # rows and columns; larger maps are truncated
_MAX_LABEL_CHARS = 24  # characters of a label
_MAX_INCHES = 10.0  # side of the map; large maps get smaller cells
_MAX_PIXELS = 2400.0  # side of a PNG
_GAP_INCHES = 0.25  # between two maps


def save_attention_map(
    path: str | Path,
    weights: AttentionWeights | None,
    *,
    src_tokens: Sequence[str],
    tgt_tokens: Sequence[str],
    title: str = "",
) -> None:
    """Save weights (T, S) as a heat map: a row per target token, a column per source token."""
    check_labels(weights, src_tokens, tgt_tokens)
    assert weights is not None, "check_labels refuses it"
    view = AttentionView(
        weights, list(tgt_tokens), list(src_tokens), "target tokens", "source tokens", "", ""
    )
    save_attention_views(path, [view], title=[title] if title else [])


def save_attention_views(
    path: str | Path, views: Sequence[AttentionView], *, title: Sequence[str] = ()
) -> None:
    """Save maps below each other in one figure, each with its title and the names of its axes.

    The title is a line or several, such as the input and the output.
    """
    from matplotlib.figure import Figure

    views = [_cut_view(view) for view in views]
    texts = [*title, *(each for view in views for each in (*view.rows, *view.columns))]
    warn_about_glyphs(texts)
    with figure_style(texts):
        sizes = [_map_inches(view.weights.shape) for view in views]
        width = max(width for width, _ in sizes)
        longest = [_label_inches(view.columns) for view in views]
        heights = [height + extra + 0.65 for (_, height), extra in zip(sizes, longest, strict=True)]
        total = sum(heights) + _GAP_INCHES * (len(views) - 1)
        figure = Figure(figsize=(width, total), dpi=_dots_per_inch(width, total))
        top = total
        for view, (map_width, map_height), height in zip(views, sizes, heights, strict=True):
            bottom = top - height
            axes = figure.add_axes(  # labels stand outside; saving enlarges the page
                (0, bottom / total, map_width / width, map_height / total)
            )
            _draw_map(axes, view)
            _draw_scale(figure, view, map_width, map_height, bottom, width, total)
            top = bottom - _GAP_INCHES
        if title:
            lines = [line for text in title for line in _wrap(text, width)]
            figure.axes[0].set_title("\n".join(lines), loc="left", pad=8)
        save_figure(figure, path, tight=True)


def _dots_per_inch(width: float, height: float) -> float:
    """Return the resolution of a PNG, lower for large maps."""
    return min(DOTS_PER_INCH, _MAX_PIXELS / max(width, height))


def _cut_view(view: AttentionView) -> AttentionView:
    """Return the first rows and columns of a map that is too large to draw."""
    return view._replace(
        weights=view.weights[:_MAX_CELLS, :_MAX_CELLS],
        rows=view.rows[:_MAX_CELLS],
        columns=view.columns[:_MAX_CELLS],
    )


def _map_inches(shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the width and the height of a map."""
    rows, columns = (max(2, size) for size in shape)
    cell = max(_MIN_CELL_INCHES, min(_CELL_INCHES, _MAX_INCHES / max(rows, columns)))
    return cell * columns, cell * rows


def _label_inches(labels: Sequence[str]) -> float:
    """Return the height that labels need above a map, once turned."""
    longest = max((len(_label_text(label)) for label in labels), default=1)
    return 0.12 if longest <= 2 else 0.056 * longest


def _draw_map(axes: Any, view: AttentionView) -> None:
    """Draw one map with its labels."""
    axes.imshow(
        view.weights,
        cmap=HEAT_MAP,
        vmin=0.0,
        vmax=max(1e-6, _color_scale(view.weights)),
        aspect="auto",
        interpolation="nearest",
    )
    columns = [_label_text(token) for token in view.columns]
    rows = [_label_text(token) for token in view.rows]
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks(range(len(columns)), columns)
    is_wide = [unicodedata.east_asian_width(label[:1] or " ") in "WF" for label in columns]
    is_turned = sum(len(label) > 2 for label in columns) > len(columns) / 2
    for tick, label, wide in zip(axes.get_xticklabels(), columns, is_wide, strict=True):
        tick.set_rotation(90 if len(label) > 2 or (is_turned and not wide) else 0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(np.arange(-0.5, len(columns)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(rows)), minor=True)
    axes.grid(False)
    axes.grid(which="minor", color="#E2E2E2", linewidth=0.4)
    cell = _height(axes) / max(2, len(rows))
    axes.tick_params(which="both", length=0, pad=2, labelsize=min(7.0, 72 * cell * 0.8))
    axes.spines[:].set_visible(True)
    for spine in axes.spines.values():
        spine.set_color("#BBBBBB")
    axes.set_xlabel(view.column_axis, color=FAINT)
    axes.set_ylabel(view.row_axis, color=FAINT)
    if view.what:
        inches = axes.get_position().width * axes.figure.get_figwidth()
        wrapped = textwrap.fill(f"{view.what}; {view.row_sum}", _line_chars(inches))
        axes.text(
            0,
            -0.06 / _height(axes),
            wrapped,
            transform=axes.transAxes,
            va="top",
            fontsize=7,
            color=FAINT,
        )


def _wrap(text: str, inches: float) -> list[str]:
    """Return the lines of a title."""
    return textwrap.wrap(escape_undrawable(" ".join(text.split())), _line_chars(inches))


def _line_chars(inches: float) -> int:
    """Return the characters of a line of text above or below a map."""
    return max(36, int(inches * 15))


def _color_scale(weights: AttentionWeights) -> float:
    """Return the weight of the darkest color: exceeded by the largest of one row in five at most.

    The first row of causal attention has one key and the weight 1, beside which all others pale.
    """
    largest = weights.max(axis=-1, initial=0.0)
    return float(np.quantile(largest, 0.8, method="higher")) if len(largest) else 0.0


def _height(axes: Any) -> float:
    """Return the height of axes in inches."""
    return float(axes.get_position().height * axes.figure.get_figheight())


def _draw_scale(
    figure: Any,
    view: AttentionView,
    map_width: float,
    map_height: float,
    bottom: float,
    width: float,
    total: float,
) -> None:
    """Draw the scale of the colors to the right of a map."""
    tall = min(map_height, 1.2)
    side = figure.add_axes(
        (
            (map_width + 0.08) / width,
            (bottom + map_height - tall) / total,
            0.07 / width,
            tall / total,
        )
    )
    is_cut = float(view.weights.max(initial=0.0)) > _color_scale(view.weights) + 1e-6
    image = figure.axes[-2].images[0]
    bar = figure.colorbar(image, cax=side, extend="max" if is_cut else "neither")
    bar.outline.set_visible(False)
    bar.locator = _ticks(map_height)
    side.tick_params(labelsize=6, length=1.5, pad=1.5)


def _ticks(height: float) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4 if height > 0.7 else 1)


def _label_text(token: str) -> str:
    """Return a token as a label of at most _MAX_LABEL_CHARS characters."""
    text = token.replace("\u2581", " ")
    text = text.lstrip(" ") or "\u2423" * len(text)
    return escape_undrawable(
        text if len(text) <= _MAX_LABEL_CHARS else f"{text[: _MAX_LABEL_CHARS - 1]}…"
    )
