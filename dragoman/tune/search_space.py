"""Search space of a study: which settings are searched, over which values.

An expression names a setting, or several with their usual values, or one with its own values:

    size,dropout,learning_rate,vocab_size      usual values, chosen around the base configuration
    model.dropout=0.0..0.4                     a range of numbers
    train.learning_rate=1e-4..1e-2:log         a range searched on a logarithmic scale
    train.optimizer=adam,adamw,muon            choices
    size=128x2,256x4                           width x layers; heads and ffn_width follow

`size` is the one name that is not a setting. The section of a setting may be left out.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dragoman.config import Config, apply_overrides
from dragoman.config.loader import load_yaml
from dragoman.config.root_config import suggest_setting
from dragoman.config.setting_declaration import Field, convert_value, list_settings
from dragoman.errors import ConfigError, suggest_name

SIZE = "size"
DEFAULT_SEARCH = (SIZE, "model.dropout", "train.learning_rate", "text.vocab_size")
LOG_SUFFIX = ":log"
MAX_CHOICES = 100
# Settings that all trials share: they define where a run reads and writes, how long it takes and
# how its result is measured.
_SHARED_SECTIONS = ("data", "decode")
_SHARED_SETTINGS = frozenset(
    f"train.{name}"
    for name in (
        "seed", "device", "threads", "time_budget", "init_from", "best_metric", "target_exact",
        "extend_vocabulary",
        "validate_every", "validate_sentences", "checkpoint_every", "keep_checkpoints",
        "tensorboard", "deterministic", "final_checkpoint",
    )
)  # fmt: skip
_SIZE_PATTERN = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,2})")
_BLOCK_PATTERN = re.compile(r"(.*?)(?:\*(\d+))?", re.DOTALL)
_USUAL_SIZES = ("128x2", "192x3", "256x4", "384x5", "512x6")  # those of automatic configuration
_USUAL_HEADS = {192: 4, 384: 6}  # other widths have heads of 64, and at least 4 heads
_SUBWORD_TOKENIZERS = ("bpe", "unigram")
_LEARNING_RATE_FACTOR = 4.0  # a usual range is from 1/4 to 4 times the base value
_USUAL_RANGES: Mapping[str, tuple[float, float, bool]] = {  # low, high, log
    "model.dropout": (0.0, 0.4, False),
    "train.label_smoothing": (0.0, 0.2, False),
    "train.weight_decay": (1e-4, 0.1, True),
    "text.bpe_dropout": (0.0, 0.2, False),
    "train.word_dropout": (0.0, 0.2, False),
    "train.r_drop": (0.0, 5.0, False),
    "train.simcut": (0.0, 3.0, False),
}

Value = str | int | float  # a choice as it is written, or a number of a range


@dataclass(frozen=True, slots=True)
class SearchParameter:
    """A setting that is searched: over choices, or over a range of numbers."""

    name: str  # such as "model.dropout", or "size"
    choices: tuple[str, ...] = ()  # as they are written; empty for a range
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    integer: bool = False

    @property
    def label(self) -> str:
        """The name without its section, for tables and figures."""
        return self.name.rpartition(".")[2]

    def accepts(self, value: Any) -> bool:
        """Whether a value lies in the space."""
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            return False
        return self.low <= value <= self.high

    def nearest(self, config: Config) -> Value | None:
        """Return the value of a configuration: clipped to the range, or None if it is no choice."""
        current = current_value(config, self.name)
        if self.choices:
            same = (each for each in self.choices if parse_choice(self.name, each) == current)
            return next(same, None)
        if isinstance(current, bool) or not isinstance(current, (int, float)):
            return None
        clipped = min(max(current, self.low), self.high)
        return round(clipped) if self.integer else float(clipped)

    def describe(self) -> str:
        """Return the values as text, in the form of an expression."""
        if self.choices:
            return ", ".join(self.choices)
        return f"{format_value(self.low)}..{format_value(self.high)}{LOG_SUFFIX * self.log}"

    def to_dict(self) -> dict[str, Any]:
        """Return the parameter as JSON values."""
        if self.choices:
            return {"name": self.name, "choices": list(self.choices)}
        return {
            "name": self.name,
            "low": self.low,
            "high": self.high,
            "log": self.log,
            "integer": self.integer,
        }


def format_value(value: Value) -> str:
    """Return a value with at most four digits after the leading one."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_search(expressions: Iterable[str], config: Config) -> tuple[SearchParameter, ...]:
    """Return the search space of `--search` expressions; raise ConfigError with all problems.

    Usual values lie around those of `config`, the base configuration. Without expressions the usual
    settings are searched, as far as they apply to it.
    """
    problems: list[str] = []
    found: dict[str, SearchParameter] = {}
    texts = [text for text in expressions if text.strip()]
    if not texts:
        for name in DEFAULT_SEARCH:
            if not _usual_problem(name, config):
                found[name] = usual_parameter(name, config)
    for text in texts:
        for parameter in _parse_expression(text, config, problems):
            if parameter.name in found:
                problems.append(
                    f"--search must name a setting once; found {parameter.name} twice; "
                    "keep one of them"
                )
            found[parameter.name] = parameter
    covered = {"model.width", "model.heads", "model.ffn_width", "model.encoder", "model.decoder"}
    if SIZE in found and (both := sorted(covered & found.keys())):
        problems.append(f"--search size sets {both[0]} already; found both; leave one of them out")
    if problems:
        raise ConfigError(problems)
    if not found:
        raise ConfigError(
            [
                "--search must name a setting; found none that applies to this configuration; "
                "for example --search model.dropout=0.0..0.4"
            ]
        )
    return tuple(found.values())


def apply_values(config: Config, values: Mapping[str, Value]) -> Config:
    """Return a configuration with the values of a trial; raise ConfigError for invalid ones."""
    if SIZE in values:
        config = apply_size(config, str(values[SIZE]))
    return apply_overrides(
        config, [f"{name}={value}" for name, value in values.items() if name != SIZE]
    )


def current_value(config: Config, name: str) -> Any:
    """Return the value of a setting, or the size as text; None if the size has no such form."""
    if name == SIZE:
        counts = {_block_count(getattr(config.model, stack)) for stack in config.stacks}
        single = len(counts) == 1 and None not in counts
        return f"{config.model.width}x{counts.pop()}" if single else None
    section, _, setting = name.partition(".")
    return getattr(getattr(config, section), setting)


def apply_size(config: Config, size: str) -> Config:
    """Return a configuration with another width and number of layers.

    The feed-forward width stays the same multiple of the width, and heads keep their size where it
    divides the width.
    """
    width, layers = (int(part) for part in size.split("x"))
    model = config.model
    values: dict[str, object] = {
        "width": width,
        "heads": _choose_heads(width, model.width, model.heads),
        "ffn_width": max(1, round(width * model.ffn_width / model.width)),
    }
    for stack in config.stacks:
        (block,) = getattr(model, stack)
        named = _BLOCK_PATTERN.fullmatch(block)
        assert named is not None, "the pattern matches every text"
        values[stack] = (f"{named[1]}*{layers}",)
    return config.replace(model=values)


def _choose_heads(width: int, base_width: int, base_heads: int) -> int:
    """Return the number of heads of a width: the base's at its width, else heads of about 64."""
    if width == base_width:
        return base_heads
    heads = _USUAL_HEADS.get(width, max(4, width // 64))
    while width % heads:
        heads -= 1
    return heads


def _block_count(stack: Sequence[str]) -> int | None:
    """Return how often the only block of a stack is repeated; None if there are several."""
    if len(stack) != 1:
        return None
    named = _BLOCK_PATTERN.fullmatch(stack[0])
    return int(named[2] or 1) if named else None


# Usual values


def usual_parameter(name: str, config: Config) -> SearchParameter:
    """Return a parameter with its usual values around a base configuration.

    Raise ConfigError for a setting without usual values.
    """
    if problem := _usual_problem(name, config):
        raise ConfigError([problem])
    current = current_value(config, name)
    if name == SIZE:
        return SearchParameter(name, _usual_sizes(str(current)))
    if name == "text.vocab_size":
        sizes = sorted({_round_size(current / 2), int(current), _round_size(current * 2)})
        return SearchParameter(name, tuple(str(size) for size in sizes if size >= 300))
    if name == "train.batch_tokens":
        sizes = sorted({max(16, current // 2), current, current * 2})
        return SearchParameter(name, tuple(map(str, sizes)))
    if name == "train.learning_rate":
        low, high = current / _LEARNING_RATE_FACTOR, current * _LEARNING_RATE_FACTOR
        return SearchParameter(name, low=low, high=high, log=True)
    if name in _USUAL_RANGES:
        low, high, log = _USUAL_RANGES[name]
        return SearchParameter(name, low=low, high=high, log=log)
    field = _field(name)
    words = ("true", "false") if field.type is bool else field.setting.names()
    return SearchParameter(name, tuple(words))


def _usual_problem(name: str, config: Config) -> str:
    """Return why a setting has no usual values; "" if it has."""
    if name == SIZE:
        if current_value(config, SIZE) is None:
            found = ", ".join(
                f"model.{stack}={list(getattr(config.model, stack))}" for stack in config.stacks
            )
            return (
                "--search size needs stacks of one repeated block and equal depth; found "
                f"{found or 'no stacks'}; search model.width instead"
            )
        return ""
    if name == "text.vocab_size" and config.text.tokenizer not in _SUBWORD_TOKENIZERS:
        return (
            "--search vocab_size needs subwords; found "
            f"text.tokenizer={config.text.tokenizer}; leave it out"
        )
    if name == "train.learning_rate" and not current_value(config, name):
        return "--search learning_rate needs a base value; found 0; name a range"
    numbers = ("text.vocab_size", "train.batch_tokens", "train.learning_rate", *_USUAL_RANGES)
    field = _field(name)
    if name in numbers or field.setting.names() or field.type is bool:
        return ""
    return (
        f"--search {name} needs values; found none; write {name}=low..high, or "
        f"{name}=one,two ({field.allowed()})"
    )


def _usual_sizes(base: str) -> tuple[str, ...]:
    """Return the sizes around a base: two smaller ones, itself and one larger."""

    def weights(size: str) -> int:
        width, layers = (int(part) for part in size.split("x"))
        return width * width * layers

    sizes = sorted({*_USUAL_SIZES, base}, key=weights)
    at = sizes.index(base)
    return tuple(sizes[max(0, at - 2) : at + 2])


def _round_size(size: float) -> int:
    """Return a vocabulary size rounded to 500, or a small one to 50."""
    step = 500 if size >= 1000 else 50
    return max(step, step * round(size / step))


# Expressions


def _parse_expression(text: str, config: Config, problems: list[str]) -> Iterable[SearchParameter]:
    """Return the parameters of an expression; errors are added to `problems`."""
    written, equals, values = text.partition("=")
    if not equals:
        parameters = []
        for word in filter(None, (part.strip() for part in text.split(","))):
            name = _resolve(word, config, problems)
            problem = _usual_problem(name, config) if name else ""
            if problem:
                problems.append(problem)
            elif name:
                parameters.append(usual_parameter(name, config))
        return parameters
    name = _resolve(written.strip(), config, problems)
    if not name:
        return ()
    if name == SIZE and _usual_problem(SIZE, config):
        problems.append(_usual_problem(SIZE, config))
        return ()
    parameter = _parse_range(name, values, problems) if ".." in values else None
    if parameter is None and ".." not in values:
        parameter = _parse_choices(name, values, problems)
    return (parameter,) if parameter is not None else ()


def _resolve(written: str, config: Config, problems: list[str]) -> str:
    """Return the name of a setting that can be searched; otherwise "" and a problem."""
    if written == SIZE:
        return SIZE
    names = [
        f"{section}.{each.name}"
        for section in config.sections
        for each in list_settings(type(getattr(config, section)))
    ]
    owners = [name for name in names if name.rpartition(".")[2] == written]
    usual = [name for name in owners if name in DEFAULT_SEARCH]
    if written in names or usual:
        name = written if written in names else usual[0]
    elif len(usable := [each for each in owners if not _is_shared(each)] or owners) == 1:
        name = usable[0]
    else:
        known = [SIZE, *(each for each in names if not _is_shared(each))]
        hint = (
            f"did you mean {' or '.join(owners)}?"
            if owners
            else suggest_name(written, known)
            if "." in written
            else suggest_setting(written, [SIZE, *(each.rpartition(".")[2] for each in known)])
        )
        if hint.startswith("choose one of"):
            hint = f"for example {', '.join(DEFAULT_SEARCH)}; `dragoman settings` lists all"
        problems.append(f"--search must name a setting; found {written!r:.60}; {hint}")
        return ""
    if _is_shared(name):
        problems.append(
            f"--search needs a setting that may differ between trials; found {name}, which all "
            f"trials share; set it once by --set {name}=…"
        )
        return ""
    return name


def _is_shared(name: str) -> bool:
    return name.partition(".")[0] in _SHARED_SECTIONS or name in _SHARED_SETTINGS


def _field(name: str) -> Field:
    section, _, setting = name.partition(".")
    fields = list_settings(type(getattr(Config(), section)))
    return next(each for each in fields if each.name == setting)


def _number_type(kind: Any) -> type | None:
    """Return int or float if a setting holds one, apart from None."""
    for each in (kind, *typing.get_args(kind)):
        if each in (int, float):
            return typing.cast(type, each)
    return None


def parse_choice(name: str, text: str) -> Any:
    """Return a choice as a value of its setting; raise ValueError, TypeError or YAMLError."""
    if name == SIZE:
        if not _SIZE_PATTERN.fullmatch(text):
            raise ValueError(text)
        return text
    field = _field(name)
    return convert_value(field.setting.restore_on_off(load_yaml(text)), field.type)


def _parse_choices(name: str, values: str, problems: list[str]) -> SearchParameter | None:
    """Return a parameter with choices; errors are added to `problems`."""
    choices = _split_choices(values)
    before = len(problems)
    if not choices or len(choices) > MAX_CHOICES:
        problems.append(
            f"--search {name} needs 1 to {MAX_CHOICES} values; found {len(choices)}; write "
            f"{name}=one,two, or {name}=low..high"
        )
    for text in choices[:MAX_CHOICES]:
        try:
            value = parse_choice(name, text)
        except (ValueError, TypeError, OverflowError, yaml.YAMLError):
            allowed = "width x layers, such as 256x4" if name == SIZE else _field(name).allowed()
            problems.append(
                f"--search {name}: a value must be {allowed}; found {text!r:.60}; correct it"
            )
            continue
        if name != SIZE and (problem := _field(name).setting.problem(name, value)):
            problems.append(f"--search {problem}")
    if len(set(choices)) < len(choices):
        twice = next(text for text in choices if choices.count(text) > 1)
        problems.append(f"--search {name} must list a value once; found {twice} twice; remove one")
    return SearchParameter(name, tuple(choices)) if len(problems) == before else None


def _split_choices(values: str) -> list[str]:
    """Return the parts between commas that are outside of brackets."""
    parts, depth = [""], 0
    for char in values:
        depth += (char in "[({") - (char in "])}")
        if char == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _parse_range(name: str, values: str, problems: list[str]) -> SearchParameter | None:
    """Return a parameter with a range; errors are added to `problems`."""
    text = values.strip()
    log = text.endswith(LOG_SUFFIX)
    ends = text.removesuffix(LOG_SUFFIX).split("..")
    kind = None if name == SIZE else _number_type(_field(name).type)
    if kind is None:
        problems.append(
            f"--search {name} has no range, because it is not a number; found {text!r:.60}; list "
            f"its values: {name}={'128x2,256x4' if name == SIZE else 'one,two'}"
        )
        return None
    try:
        low, high = (convert_value(end.strip(), kind) for end in ends)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError(text)
    except (ValueError, TypeError, OverflowError):
        what = "two integers" if kind is int else "two numbers"
        problems.append(
            f"--search {name} needs a range of {what}, low..high or low..high:log; found "
            f"{text!r:.60}; for example {_example_range(name)}"
        )
        return None
    setting = _field(name).setting
    wrong = [problem for end in (low, high) if (problem := setting.problem(name, end))]
    if low >= high:
        wrong.append(f"{name} needs a range from low to high; found {text}; exchange its ends")
    if log and low <= 0:
        wrong.append(
            f"{name}: a logarithmic range must begin above 0; found {text}; raise its low end, or "
            f"leave out {LOG_SUFFIX}"
        )
    problems += [f"--search {problem}" for problem in wrong]
    parameter = SearchParameter(name, low=low, high=high, log=log, integer=kind is int)
    return None if wrong else parameter


def _example_range(name: str) -> str:
    if name in _USUAL_RANGES:
        low, high, log = _USUAL_RANGES[name]
        return f"{name}={low:g}..{high:g}{LOG_SUFFIX * log}"
    if name == "train.learning_rate":
        return f"{name}=1e-4..1e-2:log"
    return f"{name}=1000..8000" if name == "text.vocab_size" else "model.width=128..512"
