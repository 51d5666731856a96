"""Reading a configuration: recipe, then YAML file, then `path=value`, each checked, every problem told at once."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dragoman.config.aliases import rename_old_settings
from dragoman.config.config import SECTIONS, Config, suggest_setting
from dragoman.config.setting import Field, Paths, convert_value, list_settings
from dragoman.errors import ConfigError
from dragoman.registry import catalogue

MAX_YAML_BYTES = 1 << 20  # a configuration is a page; anything larger is a mistake or an attack
_MAX_YAML_DEPTH = 32
_MAX_INT_DIGITS = 300  # of a number, which floats end at
_MAX_UNKNOWN_REPORTED = 20  # unknown settings or sections reported one by one; the rest are counted


def read_config(
    *,
    recipe: str = "",
    file: str | Path | None = None,
    overrides: Iterable[str] = (),
    base: Config | None = None,
    scale: Callable[[Config], Config] | None = None,
) -> Config:
    """Read a whole configuration, later sources over earlier ones, and refuse one that cannot be run.

    Where no recipe is named, `base` stands in its place, or else every setting's default. `scale` changes what stands
    there before anything is laid over it.
    """
    problems: list[str] = []
    from_file = rename_old_settings(read_yaml(Path(file)) if file else {}, problems)
    name = recipe or _read_recipe_name(from_file, problems)
    from_file.pop("recipe", None)
    config = (
        dataclasses.replace(catalogue("recipe").load(name)(), recipe=name)
        if name
        else base or Config()
    )
    config = scale(config) if scale else config
    config = _merge_values(config, from_file, problems)
    config = _merge_values(config, _parse_overrides(overrides, problems), problems)
    return _validated(config, problems)


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Apply `section.name=value` texts to a configuration and check the result."""
    problems: list[str] = []
    return _validated(
        _merge_values(config, _parse_overrides(overrides, problems), problems), problems
    )


def overridden_settings(file: str | Path | None, overrides: Iterable[str]) -> frozenset[str]:
    """Return the settings that a file and overrides name, such as "model.width"."""
    from_file = rename_old_settings(read_yaml(Path(file)) if file else {}, [])
    sections = [
        (section, values) for section, values in from_file.items() if isinstance(values, Mapping)
    ]
    sections += _parse_overrides(overrides, []).items()
    return frozenset(f"{section}.{name}" for section, values in sections for name in values)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Rebuild a configuration from `to_dict`'s result, as strictly as from a file."""
    problems: list[str] = []
    rest = rename_old_settings(
        {key: value for key, value in values.items() if key != "recipe"}, problems
    )
    return _validated(
        dataclasses.replace(
            _merge_values(Config(), rest, problems), recipe=_read_recipe_name(values, problems)
        ),
        problems,
    )


def _read_recipe_name(values: Mapping[str, Any], problems: list[str]) -> str:
    """Return the name of the recipe, empty where there is none; one that is no text goes into `problems`."""
    name = values.get("recipe") or ""
    if isinstance(name, str):
        return name
    problems.append(f"recipe must be a name; found {_quote_value(name)}; see `dragoman recipes`")
    return ""


def _validated(config: Config, problems: list[str]) -> Config:
    """Refuse a configuration with all that is wrong: what could not be taken in, and what was but is out of range.

    What goes wrong between settings is only looked for among settings that are right by themselves.
    """
    problems = [*problems, *(config.range_problems() if problems else config.problems())]
    if problems:
        raise ConfigError(problems)
    return config


def require_config(config: Any) -> Config | None:
    """Refuse what is no configuration, and one made in Python that holds what no file could; None stays None."""
    if config is None:
        return None
    if not isinstance(config, Config):
        found = f"{config!r:.60} ({type(config).__name__})"
        raise ConfigError(
            [
                f"config must be a Config; found {found}; make one with dragoman.read_config(recipe=..., overrides=[...])"
            ]
        )
    return from_dict(to_dict(config))


def to_dict(config: Config) -> dict[str, Any]:
    """Turn a configuration into plain values for JSON or YAML."""
    values = dataclasses.asdict(config)
    for section in SECTIONS:
        values[section] = {
            k: list(v) if isinstance(v, tuple) else v for k, v in values[section].items()
        }
    return values


def config_digest(config: Config) -> str:
    """Fingerprint a configuration: SHA-256 of its canonical JSON."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


class _StrictLoader(yaml.SafeLoader):
    """YAML as JSON would have it, since anybody may have written it.

    No aliases, which can expand without end, no tags, no duplicate keys, of which one would be lost, no depth without
    end; a date is text. What the constructors of PyYAML trip over becomes a YAMLError.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, tags and depth where they stand."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        found, mark = "", event.start_mark
        if isinstance(event, yaml.AliasEvent):
            found = f"the alias *{event.anchor} is not allowed"
        elif getattr(event, "tag", None):
            found = f"the tag {event.tag} is not allowed"
        elif self.depth >= _MAX_YAML_DEPTH:
            found = f"values nested deeper than {_MAX_YAML_DEPTH}"
        if found:
            raise yaml.constructor.ConstructorError(None, None, found, mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Build a value, or raise a YAMLError that names its place."""
        if (
            isinstance(node, yaml.ScalarNode)
            and node.tag == "tag:yaml.org,2002:int"
            and len(node.value) > _MAX_INT_DIGITS
        ):
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(node.value)} digits", node.start_mark
            )
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            ArithmeticError,
            LookupError,
        ) as error:  # such as 0b_, which it takes for a number
            raise yaml.constructor.ConstructorError(
                None, None, f"a value that is none ({error})", node.start_mark
            ) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that stands twice."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r:.100} is not text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r:.100} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# Of what YAML takes plain words for: no dates, no merge keys (<<) and no default keys (=); no number in base sixty, 1:30.
_YAML_SCALAR_TYPES = {"null", "bool", "float", "int"}
_NOT_SEXAGESIMAL = re.compile(r"(?![-+0-9_.:]*:)")
_StrictLoader.yaml_implicit_resolvers = {
    first: [
        (
            tag,
            re.compile(_NOT_SEXAGESIMAL.pattern + f"(?:{pattern.pattern})", pattern.flags)
            if tag.endswith(("int", "float"))
            else pattern,
        )
        for tag, pattern in found
        if tag.rpartition(":")[2] in _YAML_SCALAR_TYPES
    ]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_yaml(text: str) -> Any:
    """Parse YAML that anybody may have written; raise yaml.YAMLError where it is not plain."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, made stricter
    except (
        ValueError,
        ArithmeticError,
        LookupError,
        RecursionError,
    ) as error:  # of the scanner: "\U00110000"
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of settings: no tags, no aliases, no duplicate keys, at most 1 MiB."""
    raw = _read_bytes(file)
    try:
        values = load_yaml(raw.decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        found = " ".join(str(error).split())[:300]
        raise ConfigError(
            [f"{file} must be plain YAML in UTF-8; found {found}; correct that place"]
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            [
                f"{file} must hold sections such as 'model:'; found {type(values).__name__}; see `dragoman recipes show tiny`"
            ]
        )
    return values


def _read_bytes(file: Path) -> bytes:
    """Read a regular file of at most 1 MiB; a pipe or a device could make us wait for ever."""
    try:
        # Not open_regular of dragoman.storage, which stands above: the person's own file may well be a link.
        descriptor = os.open(
            file,
            os.O_RDONLY
            | getattr(os, "O_NONBLOCK", 0)
            | getattr(os, "O_NOCTTY", 0)
            | getattr(os, "O_BINARY", 0),
        )
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "neither a file nor a link to one")
            if status.st_size > MAX_YAML_BYTES:
                raise ConfigError(
                    [
                        f"{file} must be at most 1 MiB; found {status.st_size} bytes; is it the right file?"
                    ]
                )
            return os.read(descriptor, MAX_YAML_BYTES)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        found = f"{file}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(
            [f"--config must name a readable YAML file; found {found}; check the path"]
        ) from error


def _parse_overrides(overrides: Iterable[str], problems: list[str]) -> dict[str, Any]:
    """Turn `a.b=value` texts into nested values."""
    nested: dict[str, Any] = {}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, value = text.partition("=")
        section, dot, name = path.strip().partition(".")
        if not equals or not dot or not name:
            problems.append(
                f"--set needs section.name=value; found {text!r}; for example --set model.width=256"
            )
            continue
        try:
            parsed = load_yaml(value)
        except yaml.YAMLError:
            parsed = value
        if parsed is None and value.strip() not in ("null", "~"):
            parsed = value
        nested.setdefault(section, {})[name] = parsed
    return nested


def _merge_values(config: Config, values: Mapping[str, Any], problems: list[str]) -> Config:
    """Lay nested values over a configuration; what does not fit goes into `problems`."""
    problems += _limit_messages(
        [section for section in values if section not in SECTIONS],
        _unknown_section_message,
        "sections",
    )
    for section, changes in values.items():
        if section not in SECTIONS:
            continue
        if not isinstance(changes, Mapping):
            if changes is not None:
                problems.append(
                    f"{section} must hold settings; found {_quote_value(changes)}; write them below it, indented"
                )
            continue
        current = getattr(config, section)
        fields = {each.name: each for each in list_settings(type(current))}
        accepted: dict[str, Any] = {}
        known = functools.partial(_unknown_setting_message, section, known=list(fields))
        problems += _limit_messages(
            [str(name) for name in changes if name not in fields], known, f"settings in {section}"
        )
        for name, value in changes.items():
            if name not in fields:
                continue
            try:
                accepted[name] = convert_value(
                    fields[name].setting.restore_on_off(value), fields[name].type
                )
            except (ValueError, TypeError, OverflowError):
                problems.append(
                    f"{section}.{name} must be {fields[name].allowed()}; found {_quote_value(value)}; {_example_hint(fields[name])}"
                )
        config = dataclasses.replace(config, **{section: dataclasses.replace(current, **accepted)})
    return config


def _limit_messages(names: list[str], answer: Callable[[str], str], what: str) -> list[str]:
    """Answer the first unknown names one by one, and count the others: each answer takes a search."""
    more = len(names) - _MAX_UNKNOWN_REPORTED
    return [
        *map(answer, names[:_MAX_UNKNOWN_REPORTED]),
        *([f"there are {more:,} more unknown {what}; is it the right file?"] if more > 0 else []),
    ]


def _quote_value(value: Any) -> str:
    """Quote what a person wrote, in YAML's words and not in Python's."""
    return (
        "nothing"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value!r:.100}"
    )


def _example_hint(field: Field) -> str:
    """End a message about a wrong value with a right one, where there is a default to show."""
    shown = json.dumps(field.default) if not isinstance(field.default, str) else field.default
    if field.type == Paths:
        return "write a path, or several as [one, two]"
    return (
        f"for example {shown}"
        if field.default not in ("", None)
        else "write it without brackets or braces"
    )


def _unknown_section_message(section: str) -> str:
    """Answer a wrong section: perhaps it is a setting without its section."""
    section = section[:200]
    return f"there is no section {section!r} in the configuration; {suggest_setting(section, SECTIONS)}"


def _unknown_setting_message(section: str, name: str, known: list[str]) -> str:
    """Answer a wrong setting with the nearest right one, here or in another section."""
    name = name[:200]
    return f"there is no setting {section}.{name}; {suggest_setting(name, known, section)}"
