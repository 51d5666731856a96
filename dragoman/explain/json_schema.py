"""A validator for JSON Schema, draft 2020-12: the part of it that `schema.json` uses.

It needs no dependency, so that a file from elsewhere is checked wherever Dragoman runs. Keywords
that it does not know raise an error instead of being ignored.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

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
# Keywords whose check reads the whole schema, each with the one that is checked instead of it.
_FIRST_SIBLING = {
    "properties": "",
    "additionalProperties": "properties",
    "prefixItems": "",
    "items": "prefixItems",
}
