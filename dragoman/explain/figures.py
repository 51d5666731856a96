"""Attention as a picture for a page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.explain.explanation import Weights, check_labels
from dragoman.explain.fonts import families, spelt

_INCHES = 0.34  # a side of a cell: room for two characters of its label
_MOST_CELLS = 120  # a side of the picture; more than a page can show
_LONGEST = 24  # characters of a label
_MOST_PIXELS = 2400.0  # a side; large pictures get smaller cells


def save_attention_map(
    path: str | Path, weights: Weights, *, src_pieces: Sequence[str], tgt_pieces: Sequence[str], title: str = ""
) -> None:
    """Draw weights (T, S) as a PNG: a row for each target piece, a column for each source piece, dark where it looked."""
    check_labels(weights, src_pieces, tgt_pieces)
    weights, rows, columns = weights[:_MOST_CELLS, :_MOST_CELLS], tgt_pieces[:_MOST_CELLS], src_pieces[:_MOST_CELLS]
    import matplotlib
    from matplotlib.figure import Figure

    # The object's face and not pyplot: no global state, no window system.
    with matplotlib.rc_context({"font.family": list(families()), "font.size": 11}):
        height, width = (_INCHES * max(size, 3) for size in weights.shape)
        figure = Figure(figsize=(width, height), dpi=min(150.0, _MOST_PIXELS / max(width, height)))
        axes = figure.add_axes((0, 0, 1, 1))  # the labels stand outside; saving makes room for them
        image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=max(1e-6, float(weights.max())), aspect="auto", interpolation="nearest")
        _label(axes, [_shortened(piece) for piece in columns], [_shortened(piece) for piece in rows])
        if title:
            axes.set_title(textwrap.fill(spelt(title), max(24, int(width * 10))), fontsize=12, pad=12)  # ten characters an inch
        side = figure.add_axes((1 + 0.12 / width, 1 - min(height, 2.0) / height, 0.1 / width, min(height, 2.0) / height))
        figure.colorbar(image, cax=side).outline.set_visible(False)
        side.tick_params(labelsize=8, length=2)
        figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.12)


def _shortened(piece: str) -> str:
    """Spell a piece in as many characters as there is room for."""
    return spelt(piece if len(piece) <= _LONGEST else f"{piece[: _LONGEST - 1]}…")


def _label(axes: Any, columns: Sequence[str], rows: Sequence[str]) -> None:
    """Put the pieces at their columns and rows, with a fine grid between the cells."""
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
