"""Attention weights as a PNG heat map, with fonts for any script."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.explain.explanation import AttentionWeights, check_labels

# Fonts in order of preference; those not installed are skipped.
_PREFERRED_FONTS = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "Yu Gothic",
    "SimHei",
    "Malgun Gothic",
    "Apple SD Gothic Neo",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Nirmala UI",
    "Arial Unicode MS",
    "Droid Sans Fallback",
    "Unifont",
)


@functools.cache
def font_families() -> tuple[str, ...]:
    """Return the installed fonts, matplotlib's own first."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(name for name in _PREFERRED_FONTS if name in installed)


@functools.cache
def _drawable_chars() -> frozenset[int]:
    """Return the code points that some installed font covers."""
    from matplotlib import font_manager, ft2font

    characters: set[int] = set()
    for name in font_families():
        path = font_manager.findfont(font_manager.FontProperties(family=name))
        characters |= ft2font.FT2Font(path).get_charmap().keys()
    return frozenset(characters)


def escape_undrawable(token: str) -> str:
    """Return a token with its space mark as an open box and uncovered characters as code points.

    matplotlib would draw an empty box and warn.
    """
    escaped = token.replace("\u2581", "\u2423")
    known = _drawable_chars()
    return "".join(
        char if ord(char) in known and char.isprintable() else f"<{ord(char):X}>"
        for char in escaped
    ).replace("$", r"\$")


_CELL_INCHES = 0.34  # side of a cell: two characters of its label
_MAX_CELLS = 120  # rows and columns; larger maps are truncated
_MAX_LABEL_CHARS = 24  # characters of a label
_MAX_PIXELS = 2400.0  # side of the image; large maps get smaller cells


def save_attention_map(
    path: str | Path,
    weights: AttentionWeights,
    *,
    src_tokens: Sequence[str],
    tgt_tokens: Sequence[str],
    title: str = "",
) -> None:
    """Save weights (T, S) as a PNG heat map: a row per target token, a column per source token."""
    check_labels(weights, src_tokens, tgt_tokens)
    weights, rows, columns = (
        weights[:_MAX_CELLS, :_MAX_CELLS],
        tgt_tokens[:_MAX_CELLS],
        src_tokens[:_MAX_CELLS],
    )
    import matplotlib
    from matplotlib.figure import Figure

    # Not pyplot, which has global state and may need a window system.
    with matplotlib.rc_context({"font.family": list(font_families()), "font.size": 11}):
        height, width = (_CELL_INCHES * max(size, 3) for size in weights.shape)
        figure = Figure(figsize=(width, height), dpi=min(150.0, _MAX_PIXELS / max(width, height)))
        axes = figure.add_axes((0, 0, 1, 1))  # labels are outside; savefig enlarges the image
        image = axes.imshow(
            weights,
            cmap="Blues",
            vmin=0.0,
            vmax=max(1e-6, float(weights.max())),
            aspect="auto",
            interpolation="nearest",
        )
        _label_axes(
            axes, [_label_text(token) for token in columns], [_label_text(token) for token in rows]
        )
        if title:
            axes.set_title(
                textwrap.fill(escape_undrawable(title), max(24, int(width * 10))),
                fontsize=12,
                pad=12,
            )  # ten characters an inch
        side = figure.add_axes(
            (
                1 + 0.12 / width,
                1 - min(height, 2.0) / height,
                0.1 / width,
                min(height, 2.0) / height,
            )
        )
        figure.colorbar(image, cax=side).outline.set_visible(False)
        side.tick_params(labelsize=8, length=2)
        figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.12)


def _label_text(token: str) -> str:
    """Return a token as a label of at most _MAX_LABEL_CHARS characters."""
    return escape_undrawable(
        token if len(token) <= _MAX_LABEL_CHARS else f"{token[: _MAX_LABEL_CHARS - 1]}…"
    )


def _label_axes(axes: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Label columns and rows with the tokens and draw a grid between the cells."""
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks(range(len(columns)), columns)
    for tick, label in zip(axes.get_xticklabels(), columns, strict=True):
        tick.set_rotation(0 if len(label) <= 2 else 90)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(np.arange(-0.5, len(columns)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(rows)), minor=True)
    axes.grid(which="minor", color="#dddddd", linewidth=0.6)
    axes.tick_params(which="both", length=0)
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")
    axes.set_xlabel("source", color="#666666")
    axes.set_ylabel("target", color="#666666")
