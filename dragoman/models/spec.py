"""Block lists as text: `self*6`, `lstm(attention=additive)*2`. Reading them imports no tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dragoman.errors import ConfigError, nearest
from dragoman.models.catalogue import BLOCKS

Value = int | float | bool | str

MOST_BLOCKS = 1000  # a stack deeper than this is a typing mistake
_LONGEST = 1000  # characters of an entry; anybody may have written it, and reading it must not take long
# What people call blocks elsewhere; by spelling alone a transformer would be taken for a reformer.
_ALSO_CALLED = {"transformer": "self", "attention": "self", "selfattention": "self", "self_attention": "self", "cross": "attend"}
_ALSO_CALLED |= {"rnn": "lstm", "birnn": "bilstm", "cnn": "conv", "convolution": "conv", "ffn": "feedforward", "lsh": "reformer"}
# Possessive repetitions: without them a run of spaces that nothing follows is tried in every division among the three.
_SHAPE = re.compile(r"(?P<name>[A-Za-z_]\w*+)\s*+(?:\((?P<options>[^()]*+)\))?\s*+(?:\*\s*+(?P<times>[^\s*]++))?")


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block of a stack, as it was asked for."""

    name: str
    options: dict[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        """Write it as in a configuration."""
        inside = ", ".join(f"{key}={_text(value)}" for key, value in self.options.items())
        return f"{self.name}({inside})" if inside else self.name


def parse_blocks(texts: Iterable[str], setting: str = "model.encoder") -> list[BlockSpec]:
    """Read a list of blocks, repetitions written out; every problem names the part that it is about."""
    problems: list[str] = []
    texts = list(texts)
    if len(texts) > MOST_BLOCKS:
        raise ConfigError([f"{setting} must list at most {MOST_BLOCKS} blocks; found {len(texts)} entries; write self*6 for six of a kind"])
    specs = [spec for text in texts for spec in _parse(text, setting, problems)]
    if not specs and not problems:
        problems.append(f"{setting} must list at least one block; found none; for example [self*6]")
    if len(specs) > MOST_BLOCKS:
        problems.append(f"{setting} must list at most {MOST_BLOCKS} blocks; found {len(specs)}; lower the number after *")
    if problems:
        raise ConfigError(problems)
    return specs


def _parse(text: str, setting: str, problems: list[str]) -> list[BlockSpec]:
    """Read one entry; what is wrong goes into `problems`."""
    if len(text) > _LONGEST:
        problems.append(f"{setting} must list blocks of at most {_LONGEST} characters; found {len(text)}, {text[:40]!r} …; shorten it")
        return []
    shape = _SHAPE.fullmatch(text.strip())
    if shape is None:
        problems.append(f"{setting} must list blocks such as self, self*6 or lstm(attention=additive); found {text!r}; {_blame(text)}")
        return []
    name, times = shape["name"], shape["times"] or "1"
    if name not in BLOCKS:
        hint = f"did you mean {_ALSO_CALLED[name.lower()]}?" if name.lower() in _ALSO_CALLED else nearest(name, BLOCKS)
        problems.append(f"{setting} must list known blocks; found {name!r} in {text!r}; {hint}")
    count = int(times) if times.isdecimal() and times.isascii() else 0
    if count < 1:
        problems.append(f"{setting} must repeat a block a whole number of times; found {times!r} in {text!r}; for example {name}*6")
    spec = BlockSpec(name, _options(shape["options"] or "", text, setting, problems))
    return [spec] * min(count, MOST_BLOCKS + 1)


def _options(inside: str, text: str, setting: str, problems: list[str]) -> dict[str, Value]:
    """Read `key=value, key=value`."""
    options: dict[str, Value] = {}
    for part in inside.split(",") if inside.strip() else ():
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.isidentifier() or not value:
            problems.append(f"{setting} must give a block's options as name=value; found {part.strip()!r} in {text!r}; for example heads=4")
        elif key in options:
            problems.append(f"{setting} must give an option once; found {key!r} twice in {text!r}; keep one")
        else:
            options[key] = _value(value)
    return options


def _value(text: str) -> Value:
    """Read a number, true, false, or a word."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _text(value: Value) -> str:
    """Write a value as `_value` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _blame(text: str) -> str:
    """Point at what keeps an entry from being read."""
    if not text.strip():
        return "write a block's name"
    if text.count("(") != text.count(")"):
        return "close every bracket"
    if "," in text.split("(")[0]:
        return "make each block an entry of its own: [self*2, self(heads=4)]"
    rest = re.sub(r"^\s*[A-Za-z_]\w*\s*(\([^()]*\))?", "", text).strip()
    return f"remove or correct {rest!r}"
