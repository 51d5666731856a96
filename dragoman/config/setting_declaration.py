"""Declaration of a setting: default, range and description in one place.

`setting` declares a field of a configuration, `list_settings` returns the declarations of a
section, and `convert_value` converts a given value to the declared type.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dragoman.config.setting_aliases import RENAMED_VALUES
from dragoman.errors import suggest_name
from dragoman.registry import catalogue

# NUL, which no file name contains, and surrogates other than those of undecodable file names.
_INVALID_TEXT = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
Paths = str | tuple[str, ...]
"""One file, or several in order; a list of one is the same as the one."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Allowed values of a field, and its description."""

    doc: str
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    kind: str = ""  # registry kinds joined by +, whose names are choices too

    def names(self) -> tuple[str, ...]:
        """Return the allowed names; empty if any value of the type is allowed."""
        return (
            *self.choices,
            *(name for kind in self.kind.split("+") if kind for name in catalogue(kind)),
        )

    def restore_on_off(self, value: Any) -> Any:
        """Return "on" or "off" where YAML has read one of these words as a boolean."""
        word = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else None
        return word if word in self.choices else value

    def describe_range(self) -> str:
        """Return the range as text, such as "at least 1"."""
        if self.names():
            return "one of " + ", ".join(self.names())
        if self.at_least is not None and self.at_most is not None:
            return f"{format_bound(self.at_least)} to {format_bound(self.at_most)}"
        if self.at_least is not None:
            return f"at least {format_bound(self.at_least)}"
        return f"at most {format_bound(self.at_most)}" if self.at_most is not None else ""

    def problem(self, path: str, value: Any) -> str | None:
        """Return the problem with a value of the right type, or ""."""
        names = self.names()
        if names and value not in names:
            renamed = RENAMED_VALUES.get(path, {}).get(str(value))
            hint = (
                f"it is now {renamed}" if renamed else suggest_name(str(value), names, listed=True)
            )
            return f"{path} must be {self.describe_range()}; found {value!r}; {hint}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{path} must be a finite number; found {value}; write a number such as 0.1"
        if self.at_least is not None and value is not None and value < self.at_least:
            return f"{path} must be at least {format_bound(self.at_least)}; found {value}; raise it"
        if self.at_most is not None and value is not None and value > self.at_most:
            return f"{path} must be at most {format_bound(self.at_most)}; found {value}; lower it"
        return None


def format_bound(number: float) -> str:
    """Return a bound as text: 1,000,000 and 1e-12, not 1e+06."""
    return f"{int(number):,}" if float(number).is_integer() else f"{number:g}"


def setting(
    default: Any,
    doc: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] = (),
    kind: str = "",
) -> Any:
    """Declare a field of the configuration."""
    return dataclasses.field(
        default=default, metadata={"setting": Setting(doc, at_least, at_most, choices, kind)}
    )


class Field(typing.NamedTuple):
    """A setting with its name and type."""

    name: str
    type: Any
    default: Any
    setting: Setting

    def allowed(self) -> str:
        """Return the allowed values as text: "an integer, at least 1"."""
        limits = self.setting.describe_range()
        return (
            limits
            if self.setting.names()
            else ", ".join(filter(None, (describe_type(self.type), limits)))
        )


def list_settings(section: Any) -> tuple[Field, ...]:
    """Return the settings of a section class."""
    return _cached_settings(section)


@functools.cache
def _cached_settings(section: Any) -> tuple[Field, ...]:
    hints = typing.get_type_hints(section)
    return tuple(
        Field(field.name, hints[field.name], field.default, field.metadata["setting"])
        for field in dataclasses.fields(section)
        if "setting" in field.metadata
    )


def describe_type(kind: Any) -> str:
    """Return the name of a type for messages, such as "an integer"."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if kind in words:
        return words[kind]
    if typing.get_origin(kind) is tuple:
        return "a list of integers" if int in typing.get_args(kind) else "a list of text"
    return " or ".join(
        "nothing" if part is types.NoneType else describe_type(part)
        for part in typing.get_args(kind)
    )


def convert_value(value: Any, kind: Any) -> Any:
    """Return a value from YAML or the command line converted to a field's type.

    Raise ValueError, TypeError or OverflowError if it cannot be converted.
    """
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        if kind == Paths:
            return _convert_paths(value)
        if value is None:
            return None
        return convert_value(
            value, next(part for part in typing.get_args(kind) if part is not types.NoneType)
        )
    if kind == tuple[int, ...]:
        numbers = value if isinstance(value, (list, tuple)) else [value]
        return tuple(convert_value(number, int) for number in numbers)
    if typing.get_origin(kind) is tuple:
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise ValueError
        return tuple(_rejoin_brackets(parts))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is float and isinstance(value, str):
        return float(value)  # YAML reads "1e-3" as text
    if kind is int and isinstance(value, str):
        value = float(value)  # likewise "1e5"
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind is str and isinstance(value, str) and _INVALID_TEXT.search(value):
        raise ValueError
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError
    return value


def _convert_paths(value: Any) -> Paths:
    """Return one path or a tuple of paths."""
    if not isinstance(value, (list, tuple)):
        return str(convert_value(value, str))
    parts = tuple(str(convert_value(part, str)) for part in value)
    return parts if len(parts) > 1 else "".join(parts)


def _rejoin_brackets(parts: Iterable[str]) -> Iterator[str]:
    """Yield entries, joining those that YAML split at commas inside brackets.

    [lstm(layers=2, residual_connection=false)] is one entry.
    """
    torn: list[str] = []
    open_brackets = 0
    for part in parts:
        torn.append(part)
        open_brackets += part.count("(") - part.count(")")
        if open_brackets <= 0:
            yield ", ".join(torn)
            torn, open_brackets = [], 0
    yield from torn  # an unclosed bracket is reported by the block parser
