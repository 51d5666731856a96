"""Text diagram of a model's layers with shapes and parameter counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dragoman.config import ModelConfig
    from dragoman.models.factory import LayerSummary

# 0.3 is the fourth layer of a group.
_LAYER_PATH = re.compile(r"(encoder|decoder)\.(\d+(?:\.\d+)*)\.(.+)")
_RNN_WEIGHT = re.compile(r"module\.weight_([ih]h)_l\d+")
_REDUNDANT_WORDS = re.compile(r"\b(rnn|score|alignment)\.|_(proj|score|rnn)\b")
_NUMBERED_LAYER = re.compile(r"^(upper_layers)\.\d+\.")
_LENGTH_LETTER = {"encoder": "S", "decoder": "T"}


class _DiagramLine(NamedTuple):
    """A line of the diagram, before its columns are aligned."""

    name: str
    class_name: str
    shapes: str
    parameters: str


def format_stack(rows: Sequence[LayerSummary], config: ModelConfig) -> list[str]:
    """Return the lines of the diagram; consecutive equal layers are shown once with their count."""
    parts = list(_diagram_lines(rows, config))
    widths = [max(len(part[column]) for part in parts) for column in range(3)]
    lines = []
    for part in parts:
        cells = [part[column].ljust(widths[column]) for column in range(3)]
        lines.append("  ".join([*cells, part.parameters.rjust(13)]).rstrip())
    return lines


def _diagram_lines(rows: Sequence[LayerSummary], config: ModelConfig) -> Iterator[_DiagramLine]:
    """Yield the diagram lines of each stack."""
    for side, group in groupby(rows, key=_stack_name):
        members = list(group)
        if side not in _LENGTH_LETTER:
            for row in members:
                yield _DiagramLine(
                    row.path, row.class_name, _format_shapes(row), f"{row.parameters:,}"
                )
            continue
        length = "S + T" if config.architecture == "prefix_lm" else _LENGTH_LETTER[side]
        yield _DiagramLine(f"{side}  (B, {length}, {config.width})", "", "", "")
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
    """Return a layer's weight shapes in short form; equal sublayers are counted."""
    short = _REDUNDANT_WORDS.sub("", row.shapes).replace(".weight ", " ").replace("weight ", "")
    short = _RNN_WEIGHT.sub(r"\1", short)
    counted = Counter(_NUMBERED_LAYER.sub(r"\1 ", shape) for shape in short.split(", "))
    return ", ".join(
        f"{number} x {shape}" if number > 1 else shape for shape, number in counted.items()
    )
