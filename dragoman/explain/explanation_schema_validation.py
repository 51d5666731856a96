"""Validation of an explanation from elsewhere: its JSON schema, and that its parts fit together.

`schema_errors` is a validator for the part of JSON Schema, draft 2020-12, that `schema.json` uses.
It needs no dependency, so that a file is checked wherever Dragoman runs. Keywords that it does not
know raise an error instead of being ignored.

The schema knows types and ranges of single values. A page or a report also follows references: a
head's site, a node's parent, a token's span of the text. A file may claim any of them, so
`find_inconsistencies` follows them first. That an explanation matches what its model
computed is checked by `explanation_consistency_checks.py`.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from dragoman.explain.explanation import Array

MAX_PROBLEMS = 20  # problems that are looked for

_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool)
        and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
_ANNOTATIONS = frozenset(["$schema", "$id", "$defs", "title", "description", "examples"])
# Keywords whose check reads the whole schema, each with the one that is checked instead of it.
_FIRST_SIBLING = {
    "properties": "",
    "additionalProperties": "properties",
    "prefixItems": "",
    "items": "prefixItems",
}
MAX_DEPTH = 64  # of nested JSON values
MAX_INTEGER = 1 << 53  # the largest that every reader of JSON keeps exactly


@functools.cache
def explanation_schema() -> Mapping[str, Any]:
    """Return the schema of explanations."""
    text = resources.files("dragoman.explain").joinpath("schema.json").read_text(encoding="utf-8")
    schema: Mapping[str, Any] = json.loads(text)
    return schema


def find_problems(value: Any, schema: Mapping[str, Any] | None = None) -> list[str]:
    """Return what is wrong with a value, as "path: what must hold; found …"; empty if nothing.

    The schema is by default that of explanations.
    """
    root = explanation_schema() if schema is None else schema
    problems = list[str]()
    for problem in _problems(value, root, root, "$"):
        problems.append(problem)
        if len(problems) >= MAX_PROBLEMS:
            break
    return problems


def _problems(
    value: Any, schema: Mapping[str, Any] | bool, root: Mapping[str, Any], path: str
) -> Iterator[str]:
    """Yield the problems of a value at a path."""
    if isinstance(schema, bool):
        if not schema:
            yield f"{path}: must not be there"
        return
    for keyword, rule in schema.items():
        if keyword in _ANNOTATIONS:
            continue
        check = _KEYWORDS.get(keyword)
        if check is None:
            raise ValueError(f"the schema keyword {keyword!r} is not known")
        if keyword in _FIRST_SIBLING:
            if _FIRST_SIBLING[keyword] not in schema:  # else both were checked with the first
                yield from check(value, schema, root, path)
        else:
            yield from check(value, rule, root, path)


def _check_ref(value: Any, rule: str, root: Mapping[str, Any], path: str) -> Iterator[str]:
    target: Any = root
    for part in rule.removeprefix("#/").split("/"):
        target = target[part]
    yield from _problems(value, target, root, path)


def _check_type(
    value: Any, rule: str | list[str], _: Mapping[str, Any], path: str
) -> Iterator[str]:
    names = [rule] if isinstance(rule, str) else rule
    if not any(_TYPES[name](value) for name in names):
        yield f"{path}: must be of type {' or '.join(names)}; found {_show(value)}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: must be finite; found {value}"


def _check_enum(value: Any, rule: list[Any], _: Mapping[str, Any], path: str) -> Iterator[str]:
    if not any(_equal(value, each) for each in rule):
        yield f"{path}: must be one of {', '.join(map(str, rule))}; found {_show(value)}"


def _check_const(value: Any, rule: Any, _: Mapping[str, Any], path: str) -> Iterator[str]:
    if not _equal(value, rule):
        yield f"{path}: must be {rule!r}; found {_show(value)}"


def _equal(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal; True is not 1."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _check_any_of(value: Any, rule: list[Any], root: Mapping[str, Any], path: str) -> Iterator[str]:
    found = [list(_problems(value, each, root, path)) for each in rule]
    if all(found):  # report the problems of the alternative that came nearest
        yield from min(found, key=len)


def _check_object(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str
) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    known = schema.get("properties", {})
    for name, each in value.items():
        if name in known:
            yield from _problems(each, known[name], root, f"{path}.{name}")
        elif "additionalProperties" in schema:
            rule = schema["additionalProperties"]
            yield from _problems(each, rule, root, f"{path}.{_show(name)}")


def _check_required(value: Any, rule: list[str], _: Mapping[str, Any], path: str) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{path}: must have {name!r}" for name in rule if name not in value)


def _check_array(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: str
) -> Iterator[str]:
    if not isinstance(value, list):
        return
    first = schema.get("prefixItems", [])
    for at, each in enumerate(value):
        if at < len(first):
            yield from _problems(each, first[at], root, f"{path}[{at}]")
        elif "items" in schema:
            yield from _problems(each, schema["items"], root, f"{path}[{at}]")


def _check_limit(
    holds: Callable[[Any, Any], bool], words: str, applies: Callable[[Any], bool]
) -> Callable[[Any, Any, Mapping[str, Any], str], Iterator[str]]:
    """Return a check that a number, or the length of an array or a string, keeps a limit."""

    def check(value: Any, rule: Any, _: Mapping[str, Any], path: str) -> Iterator[str]:
        if applies(value) and not holds(value, rule):
            yield f"{path}: must {words} {rule}; found {_show(value)}"

    return check


def _show(value: Any) -> str:
    return f"{value!r:.60}"


_KEYWORDS: dict[str, Callable[..., Iterator[str]]] = {
    "$ref": _check_ref,
    "type": _check_type,
    "enum": _check_enum,
    "const": _check_const,
    "anyOf": _check_any_of,
    "properties": _check_object,
    "additionalProperties": _check_object,
    "required": _check_required,
    "prefixItems": _check_array,
    "items": _check_array,
    "minimum": _check_limit(lambda value, rule: value >= rule, "be at least", _TYPES["number"]),
    "minItems": _check_limit(
        lambda value, rule: len(value) >= rule, "have items, at least", _TYPES["array"]
    ),
    "maxItems": _check_limit(
        lambda value, rule: len(value) <= rule, "have items, at most", _TYPES["array"]
    ),
    "minLength": _check_limit(
        lambda value, rule: len(value) >= rule, "have characters, at least", _TYPES["string"]
    ),
    "pattern": _check_limit(
        lambda value, rule: re.search(rule, value) is not None, "match", _TYPES["string"]
    ),
}


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
    for key in values["token_texts"]:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            yield f"keys of token_texts must be token ids; found {key!r:.40}"
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
