"""A model's stack drawn in text: what follows what, in which shapes, with how many weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dragoman.config import ModelConfig
    from dragoman.models.factory import LayerSummary

_LAYER_PATH = re.compile(
    r"(encoder|decoder)\.(\d+(?:\.\d+)*)\.(.+)"
)  # 0.3 is the fourth layer of a run
_RNN_WEIGHT = re.compile(r"kernel\.weight_(ih|hh)_l\d+")
_REDUNDANT_WORDS = re.compile(r"\b(recurrence|score|alignment)\.|_proj\b|_score\b")
_NUMBERED_LAYER = re.compile(r"^(above)\.\d+\.")
_LENGTH_LETTER = {"encoder": "S", "decoder": "T"}


class _DiagramLine(NamedTuple):
    """A line of the drawing, before its columns are lined up."""

    name: str
    class_name: str
    shapes: str
    parameters: str


def format_stack(rows: Sequence[LayerSummary], config: ModelConfig) -> list[str]:
    """Draw a model top to bottom; equal layers that follow one another are drawn once with their number."""
    parts = list(_diagram_lines(rows, config))
    widths = [max(len(part[column]) for part in parts) for column in range(3)]
    lines = []
    for part in parts:
        cells = [part[column].ljust(widths[column]) for column in range(3)]
        lines.append("  ".join([*cells, part.parameters.rjust(13)]).rstrip())
    return lines


def _diagram_lines(rows: Sequence[LayerSummary], config: ModelConfig) -> Iterator[_DiagramLine]:
    """Turn a model's rows into lines, stack by stack."""
    for side, group in groupby(rows, key=_stack_name):
        members = list(group)
        if side not in _LENGTH_LETTER:
            for row in members:
                yield _DiagramLine(
                    row.path, row.class_name, _format_shapes(row), f"{row.parameters:,}"
                )
            continue
        yield _DiagramLine(f"{side}  (B, {_LENGTH_LETTER[side]}, {config.width})", "", "", "")
        layers = [(number, list(layer)) for number, layer in groupby(members, key=_layer_number)]
        for _, same in groupby(
            layers,
            key=lambda layer: [(_layer_name(row), row.class_name, row.shapes) for row in layer[1]],
        ):
            repeated = list(same)
            numbers = [number for number, _ in repeated]
            where = (
                f"layer {numbers[0]}"
                if len(numbers) == 1
                else f"layers {numbers[0]} to {numbers[-1]}, each"
            )
            yield _DiagramLine(f"  ┌ {where}", "", "", "")
            yield from (
                _DiagramLine(
                    f"  │ {_layer_name(row)}",
                    row.class_name,
                    _format_shapes(row),
                    f"{row.parameters:,}",
                )
                for row in repeated[0][1]
            )
            total = sum(row.parameters for _, layer in repeated for row in layer)
            yield _DiagramLine(
                "  └", "", f"{len(numbers)} x" if len(numbers) > 1 else "", f"{total:,}"
            )


def _stack_name(row: LayerSummary) -> str:
    match = _LAYER_PATH.match(row.path)
    return match[1] if match else row.path


def _layer_number(row: LayerSummary) -> str:
    match = _LAYER_PATH.match(row.path)
    return match[2] if match else ""


def _layer_name(row: LayerSummary) -> str:
    match = _LAYER_PATH.match(row.path)
    return match[3] if match else row.path


def _format_shapes(row: LayerSummary) -> str:
    """Write a layer's shapes shortly: `weight_ih_l0` of cuDNN's cells is what goes in, equal layers of a stack are counted."""
    short = _REDUNDANT_WORDS.sub("", row.shapes).replace(".weight ", " ").replace("weight ", "")
    short = _RNN_WEIGHT.sub(lambda cell: "in" if cell[1] == "ih" else "state", short)
    counted = Counter(_NUMBERED_LAYER.sub(r"\1 ", shape) for shape in short.split(", "))
    return ", ".join(
        f"{number} x {shape}" if number > 1 else shape for shape, number in counted.items()
    )
