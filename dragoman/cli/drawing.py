"""A model's stack drawn in text: what follows what, in which shapes, with how many weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dragoman.config import ModelConfig
    from dragoman.models.build import Row

_LAYER = re.compile(r"(encoder|decoder)\.(\d+(?:\.\d+)*)\.(.+)")  # 0.3 is the fourth layer of a run
_CELL = re.compile(r"kernel\.weight_(ih|hh)_l\d+")
_NEEDLESS = re.compile(r"\b(recurrence|score|alignment)\.|_proj\b|_score\b")
_STACKED = re.compile(r"^(above)\.\d+\.")
_LETTER = {"encoder": "S", "decoder": "T"}


class _Part(NamedTuple):
    """A line of the drawing, before its columns are lined up."""

    name: str
    what: str
    shapes: str
    parameters: str


def draw_stack(rows: Sequence[Row], config: ModelConfig) -> list[str]:
    """Draw a model top to bottom; equal layers that follow one another are drawn once with their number."""
    parts = list(_parts(rows, config))
    widths = [max(len(part[column]) for part in parts) for column in range(3)]
    lines = []
    for part in parts:
        cells = [part[column].ljust(widths[column]) for column in range(3)]
        lines.append("  ".join([*cells, part.parameters.rjust(13)]).rstrip())
    return lines


def _parts(rows: Sequence[Row], config: ModelConfig) -> Iterator[_Part]:
    """Turn a model's rows into lines, stack by stack."""
    for side, group in groupby(rows, key=_side):
        members = list(group)
        if side not in _LETTER:
            for row in members:
                yield _Part(row.path, row.what, _shapes(row), f"{row.parameters:,}")
            continue
        yield _Part(f"{side}  (B, {_LETTER[side]}, {config.width})", "", "", "")
        layers = [(number, list(layer)) for number, layer in groupby(members, key=_number)]
        for _, same in groupby(layers, key=lambda layer: [(_name(row), row.what, row.shapes) for row in layer[1]]):
            repeated = list(same)
            numbers = [number for number, _ in repeated]
            where = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]} to {numbers[-1]}, each"
            yield _Part(f"  ┌ {where}", "", "", "")
            yield from (_Part(f"  │ {_name(row)}", row.what, _shapes(row), f"{row.parameters:,}") for row in repeated[0][1])
            total = sum(row.parameters for _, layer in repeated for row in layer)
            yield _Part("  └", "", f"{len(numbers)} x" if len(numbers) > 1 else "", f"{total:,}")


def _side(row: Row) -> str:
    match = _LAYER.match(row.path)
    return match[1] if match else row.path


def _number(row: Row) -> str:
    match = _LAYER.match(row.path)
    return match[2] if match else ""


def _name(row: Row) -> str:
    match = _LAYER.match(row.path)
    return match[3] if match else row.path


def _shapes(row: Row) -> str:
    """Write a layer's shapes shortly: `weight_ih_l0` of cuDNN's cells is what goes in, equal layers of a stack are counted."""
    short = _NEEDLESS.sub("", row.shapes).replace(".weight ", " ").replace("weight ", "")
    short = _CELL.sub(lambda cell: "in" if cell[1] == "ih" else "state", short)
    counted = Counter(_STACKED.sub(r"\1 ", shape) for shape in short.split(", "))
    return ", ".join(f"{number} x {shape}" if number > 1 else shape for shape, number in counted.items())
