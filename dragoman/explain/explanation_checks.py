"""Checks of an explanation from elsewhere, beyond its schema: that its parts fit together.

The schema knows types and ranges of single values. A page or a report also follows references: a
head's site, a node's parent, a token's span of the text. A file may claim any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.explain.explanation import Array

MAX_DEPTH = 64  # of nested JSON values
MAX_INTEGER = 1 << 53  # the largest that every reader of JSON keeps exactly


def find_unusable_values(values: Any) -> Iterator[str]:
    """Yield JSON values that cannot be written again: NaN, lone surrogates, deep nesting."""
    pending: list[tuple[Any, int]] = [(values, 0)]
    while pending:
        value, depth = pending.pop()
        if isinstance(value, str):
            if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
                yield f"text must be Unicode; found half of a surrogate pair in {value!a:.60}"
        elif isinstance(value, float):
            if not math.isfinite(value):
                yield f"numbers must be finite; found {value}"
        elif isinstance(value, int):
            if abs(value) > MAX_INTEGER:
                yield f"integers must be at most 2^53; found one of {value.bit_length()} bits"
        elif isinstance(value, (list, dict)):
            if depth >= MAX_DEPTH:
                yield f"values must be nested at most {MAX_DEPTH} deep; found more"
                return
            pending += [(each, depth + 1) for each in value]  # of an object: its keys
            if isinstance(value, dict):
                pending += [(each, depth + 1) for each in value.values()]


def find_inconsistencies(values: Mapping[str, Any], arrays: Mapping[str, Array]) -> Iterator[str]:
    """Yield what does not fit together, as "what must hold; found …".

    The values follow the schema, and `arrays` are its decoded tensors.
    """
    for part in ("source", "target"):
        yield from _check_text(part, values[part])
    steps, tokens = len(values["steps"]), len(values["target"]["tokens"])
    if values["model"].get("task") in ("translate", "language") and steps != tokens:
        yield f"steps must be as many as target tokens; found {steps} and {tokens}"
    for key in values["pieces"]:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            yield f"keys of pieces must be ids of tokens; found {key!r:.40}"
            break
    yield from _check_sites(values, arrays)
    if values["beam"] is not None:
        yield from _check_beam(values, arrays)
    yield from _check_references(values, arrays)
    for part in ("branches", "ablations"):
        for name, each in values[part].items():
            yield from _check_text(f"{part}.{name:.20}", each["target"])


def _check_text(part: str, text: Mapping[str, Any]) -> Iterator[str]:
    """Yield spans outside the text and words outside the tokens."""
    for token in text["tokens"]:
        start, end = token["span"]
        if not start <= end <= len(text["text"]):
            found = f"{start} to {end} of {len(text['text'])}"
            yield f"a span of {part} must be a part of its text; found {found} characters"
            return
    for start, end in text["words"]:
        if not start <= end <= len(text["tokens"]):
            found = f"{start} to {end} of {len(text['tokens'])}"
            yield f"a word of {part} must be a range of its tokens; found {found}"
            return


def _check_sites(values: Mapping[str, Any], arrays: Mapping[str, Array]) -> Iterator[str]:
    """Yield sites and heads whose arrays have another shape."""
    heads = {site["id"]: site["heads"] for site in values["sites"]}
    if len(heads) != len(values["sites"]):
        yield f"sites must have different ids; found {len(values['sites'])} with {len(heads)}"
    for head in values["heads"]:
        if head["head"] >= heads.get(head["site"], 0):
            yield f"a head must be one of its site's; found {head['site']:.20}.{head['head']}"
            return
    for site in values["sites"]:
        lengths = [_axis_length(values, site, axis) for axis in ("query", "key")]
        for name in (site["tensor"], site["contribution"]):
            if name is None:
                continue
            if name not in arrays:
                yield f"site {site['id']:.20} must name a tensor; found {name!r:.40}"
                return
            shape, pool = arrays[name].shape, values["tensors"][name]["pool"]
            if pool is not None and len(shape) == 3:
                fits = all(
                    len(edges) == size + 1 and _ascends(edges) and length in (None, edges[-1])
                    for edges, size, length in zip(
                        (pool["q"], pool["k"]), shape[1:], lengths, strict=True
                    )
                )
            else:
                fits = len(shape) == 3 and all(
                    length in (None, size) for length, size in zip(lengths, shape[1:], strict=True)
                )
            if not fits or shape[0] != site["heads"]:
                yield f"tensor {name:.20} must have a matrix for each head; found {shape}"
                return


def _axis_length(values: Mapping[str, Any], site: Mapping[str, Any], axis: str) -> int | None:
    """Return the number of positions on an axis; None if nothing else states it."""
    labels = site.get(f"{axis}_labels")
    if labels is not None:
        return len(labels)
    part = {"source": "source", "target": "target", "target_in": "target"}.get(site[axis])
    return None if part is None else len(values[part]["tokens"])


def _ascends(edges: Sequence[int]) -> bool:
    return edges[0] == 0 and all(left < right for left, right in zip(edges, edges[1:]))  # noqa: RUF007


def _check_beam(values: Mapping[str, Any], arrays: Mapping[str, Array]) -> Iterator[str]:
    """Yield nodes that make no tree."""
    nodes = {field: arrays.get(name) for field, name in values["beam"]["nodes"].items()}
    sizes = {None if array is None else array.shape for array in nodes.values()}
    [shape] = sizes if len(sizes) == 1 else [None]
    if shape is None or len(shape) != 1 or shape[0] == 0:
        yield f"the beam's nodes must be vectors of one length; found {sizes!s:.60}"
        return
    parent, reason, count = nodes["parent"], nodes["reason"], shape[0]
    assert parent is not None, "checked above"
    assert reason is not None, "checked above"
    if parent[0] != -1 or (parent[1:] < 0).any() or (parent >= np.arange(count)).any():
        yield "in the beam, parents must come before their children; found another order"
        return
    most = len(values["beam"]["reasons"])
    if reason.min() < 0 or reason.max() >= most:
        yield f"reasons of the beam's nodes must be below {most}; found {reason.max()}"
    for entry in values["nbest"]:
        if entry["leaf"] is not None and entry["leaf"] >= count:
            yield f"an n-best entry must end at one of {count} nodes; found {entry['leaf']}"
            return


def _check_references(values: Mapping[str, Any], arrays: Mapping[str, Array]) -> Iterator[str]:
    """Yield names of tensors that are not there or have another number of axes."""
    length = len(values["target"]["tokens"])
    lens, positions = values["lens"], values["positions"]
    named: list[tuple[str, str | None, int | None]] = [
        (f"extras.{name:.20}", tensor, None) for name, tensor in values["extras"].items()
    ]
    for each in values["attribution"]:
        named += [
            ("attribution.source", each["source"], 2),
            ("attribution.target", each["target"], 2),
        ]
    named.append(("positions.tensor", positions.get("tensor"), 2))
    if lens is not None:
        named.append(("lens.rank", lens["rank"], 2))
    for part, tensor, axes in named:
        if tensor is None:
            continue
        if tensor not in arrays:
            yield f"{part} must name a tensor; found {tensor!r:.40}"
            return
        if axes is not None and arrays[tensor].ndim != axes:
            yield f"{part} must be a matrix; found shape {arrays[tensor].shape}"
            return
    if lens is not None:
        sizes = (len(lens["layers"]), length)
        tops = {len(layer) for layer in lens["top"]}
        rank = None if lens["rank"] is None else arrays[lens["rank"]].shape
        if rank not in (None, sizes) or len(lens["top"]) not in (0, sizes[0]) or tops - {length}:
            yield f"the lens must have {sizes[0]} layers and {length} tokens; found {rank}"
    for curve in positions.get("curves", ()):
        if len(curve["x"]) != len(curve["y"]):
            yield f"a curve must have a y for each x; found {len(curve['x'])} and {len(curve['y'])}"
            return
