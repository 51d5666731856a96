"""Parser of block lists such as `transformer*6` or `lstm(attention=additive)*2`; needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dragoman.errors import ConfigError, suggest_name
from dragoman.models.block_catalogue import BLOCKS

OptionValue = int | float | bool | str

MAX_BLOCKS = 1000  # a stack deeper than this is a typing mistake
_MAX_ENTRY_CHARS = 1000  # bounds the parsing time of untrusted configurations
# Names of blocks elsewhere, for the hint; by spelling alone `attention` would match nothing.
_BLOCK_ALIASES = dict.fromkeys(
    ("self", "attention", "selfattention", "self_attention", "transformer_layer"), "transformer"
)
_BLOCK_ALIASES |= dict.fromkeys(
    ("attend", "cross", "crossattention", "encoder_attention"), "cross_attention"
)
_BLOCK_ALIASES |= {
    "elman": "rnn",
    "srnn": "sliced_rnn",
    "cnn": "conv",
    "convolution": "conv",
    "feedforward": "ffn",
    "feed_forward": "ffn",
    "mlp": "ffn",
    "lsh": "reformer",
}
# Possessive quantifiers, so that a long run of spaces does not backtrack.
_BLOCK_PATTERN = re.compile(
    r"(?P<name>[A-Za-z_]\w*+)\s*+(?:\((?P<options>[^()]*+)\))?\s*+(?:\*\s*+(?P<times>[^\s*]++))?"
)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One block of a stack, as written in a configuration."""

    name: str
    options: dict[str, OptionValue] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the text of the block in a configuration."""
        inside = ", ".join(f"{key}={_format_value(value)}" for key, value in self.options.items())
        return f"{self.name}({inside})" if inside else self.name


def parse_blocks(texts: Iterable[str], setting: str = "model.encoder") -> list[BlockSpec]:
    """Return the blocks of a list, repetitions expanded; raise ConfigError for invalid entries."""
    problems: list[str] = []
    texts = list(texts)
    if len(texts) > MAX_BLOCKS:
        raise ConfigError(
            [
                f"{setting} must list at most {MAX_BLOCKS} blocks; found {len(texts)} entries; "
                "write transformer*6 for six equal blocks"
            ]
        )
    specs = [spec for text in texts for spec in _parse_entry(text, setting, problems)]
    if not specs and not problems:
        problems.append(
            f"{setting} must list at least one block; found none; for example [transformer*6]"
        )
    if len(specs) > MAX_BLOCKS:
        problems.append(
            f"{setting} must list at most {MAX_BLOCKS} blocks; found {len(specs)}; "
            "lower the number after *"
        )
    if problems:
        raise ConfigError(problems)
    return specs


def _parse_entry(text: str, setting: str, problems: list[str]) -> list[BlockSpec]:
    """Return the blocks of one entry; append the errors to `problems`."""
    if len(text) > _MAX_ENTRY_CHARS:
        problems.append(
            f"{setting} must list blocks of at most {_MAX_ENTRY_CHARS} characters; "
            f"found {len(text)}, {text[:40]!r} …; shorten it"
        )
        return []
    shape = _BLOCK_PATTERN.fullmatch(text.strip())
    if shape is None:
        problems.append(
            f"{setting} must list blocks such as transformer*6, bilstm or "
            f"lstm(attention=additive); found {text!r}; {_syntax_hint(text)}"
        )
        return []
    name, times = shape["name"], shape["times"] or "1"
    if name not in BLOCKS:
        hint = (
            f"did you mean {_BLOCK_ALIASES[name.lower()]}?"
            if name.lower() in _BLOCK_ALIASES
            else suggest_name(name, BLOCKS)
        )
        problems.append(f"{setting} must list known blocks; found {name!r} in {text!r}; {hint}")
    count = int(times) if times.isdecimal() and times.isascii() else 0
    if count < 1:
        problems.append(
            f"{setting} must repeat a block by a positive integer; "
            f"found {times!r} in {text!r}; for example {name}*6"
        )
    spec = BlockSpec(name, _parse_options(shape["options"] or "", text, setting, problems))
    return [spec] * min(count, MAX_BLOCKS + 1)


def _parse_options(
    inside: str, text: str, setting: str, problems: list[str]
) -> dict[str, OptionValue]:
    """Return the options of `key=value, key=value`."""
    options: dict[str, OptionValue] = {}
    for part in inside.split(",") if inside.strip() else ():
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not key.isidentifier() or not value:
            problems.append(
                f"{setting} must write the options of a block as name=value; "
                f"found {part.strip()!r} in {text!r}; for example heads=4"
            )
        elif key in options:
            problems.append(
                f"{setting} must set an option once; found {key!r} twice in {text!r}; keep one"
            )
        else:
            options[key] = _parse_value(value)
    return options


def _parse_value(text: str) -> OptionValue:
    """Return a number, a bool or a word."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _format_value(value: OptionValue) -> str:
    """Return a value as `_parse_value` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _syntax_hint(text: str) -> str:
    """Return a hint about the syntax error of an entry."""
    if not text.strip():
        return "write a block's name"
    if text.count("(") != text.count(")"):
        return "close every bracket"
    if "," in text.split("(")[0]:
        return "make each block an entry of its own: [transformer*2, transformer(heads=4)]"
    rest = re.sub(r"^\s*[A-Za-z_]\w*\s*(\([^()]*\))?", "", text).strip()
    return f"remove or correct {rest!r}"
