"""Read a configuration from a recipe, a YAML file and `section.name=value` overrides.

Later sources replace earlier ones. All problems are reported in one error.
"""

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

from dragoman.config.root_config import (
    SECTIONS,
    TASK_STACKS,
    TRANSLATE,
    Config,
    find_settings,
    suggest_setting,
)
from dragoman.config.setting_aliases import rename_old_settings
from dragoman.config.setting_declaration import Field, Paths, convert_value, list_settings
from dragoman.errors import ConfigError, suggest_name
from dragoman.registry import catalogue

# a configuration is a page of text; a larger file is a mistake or an attack
MAX_YAML_BYTES = 1 << 20
_MAX_YAML_DEPTH = 32
_MAX_INT_DIGITS = 300  # digits of a number; floats have fewer than 310
_MAX_UNKNOWN_REPORTED = 20  # unknown settings or sections reported one by one; the rest are counted


def read_config(
    *,
    recipe: str = "",
    file: str | Path | None = None,
    overrides: Iterable[str] = (),
    base: Config | None = None,
    scale: Callable[[Config], Config] | None = None,
    task: str = "",
) -> Config:
    """Read and validate a configuration; raise ConfigError with all problems.

    Without a recipe the settings start from `base`, or from the defaults of the task. `scale` is
    applied to them before the file and the overrides.
    """
    problems: list[str] = []
    from_file = rename_old_settings(read_yaml(Path(file)) if file else {}, problems)
    name = recipe or _read_name(from_file, "recipe", problems)
    task = task or _read_name(from_file, "task", problems)
    for key in ("recipe", "task"):
        from_file.pop(key, None)
    if not name and base is None and task:
        name = default_recipe(task)
    config = (
        dataclasses.replace(catalogue("recipe").load(name)(), recipe=name)
        if name
        else base or Config()
    )
    if task and config.task != task and task in (TRANSLATE, *TASK_STACKS):
        problems.append(
            f"--task {task} needs a recipe of this task; found {name or 'settings'} of task "
            f"{config.task}; see `dragoman recipes --task {task}`"
        )
    config = scale(config) if scale else config
    config = _merge_values(config, from_file, problems)
    config = _merge_values(config, _parse_overrides(overrides, problems), problems)
    return _validated(config, problems)


def recipe_task(name: str) -> str:
    """Return the task of a recipe; raise ConfigError if there is no such recipe."""
    return str(catalogue("recipe")[name].task)


def default_recipe(task: str) -> str:
    """Return the recipe of a task that is used when none is named; "" for translation."""
    if task == TRANSLATE:
        return ""
    if task not in TASK_STACKS:
        known = (TRANSLATE, *TASK_STACKS)
        raise ConfigError(
            [
                f"--task must be one of {', '.join(known)}; found {task!r:.60}; "
                f"{suggest_name(task, known, listed=True)}"
            ]
        )
    named = [name for name, entry in catalogue("recipe").items() if entry.task == task]
    if not named:
        raise ConfigError([f"--task {task} needs a recipe; found none; name one by --recipe"])
    return named[0]


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Return a configuration with `section.name=value` overrides applied and validated."""
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
    """Return the configuration of a `to_dict` result, validated like a file."""
    problems: list[str] = []
    rest = rename_old_settings(
        {key: value for key, value in values.items() if key not in ("recipe", "task")}, problems
    )
    return _validated(
        dataclasses.replace(
            _merge_values(Config(), rest, problems),
            recipe=_read_name(values, "recipe", problems),
            task=_read_name(values, "task", problems) or TRANSLATE,
        ),
        problems,
    )


def _read_name(values: Mapping[str, Any], key: str, problems: list[str]) -> str:
    """Return the name of the recipe or task, or ""; other values are added to `problems`."""
    name = values.get(key) or ""
    if isinstance(name, str):
        return name
    problems.append(f"{key} must be a name; found {_quote_value(name)}; see `dragoman recipes`")
    return ""


def _validated(config: Config, problems: list[str]) -> Config:
    """Return the configuration, or raise ConfigError with unreadable and out-of-range settings.

    Inconsistencies between settings are checked only if every setting is valid by itself.
    """
    problems = [*problems, *(config.range_problems() if problems else config.problems())]
    if problems:
        raise ConfigError(problems)
    return config


def require_config(config: Any) -> Config | None:
    """Return a valid Config unchanged, or raise ConfigError; None stays None.

    A Config built in Python may hold values that no file could.
    """
    if config is None:
        return None
    if not isinstance(config, Config):
        found = f"{config!r:.60} ({type(config).__name__})"
        raise ConfigError(
            [
                f"config must be a Config; found {found}; make one with "
                "dragoman.read_config(recipe=..., overrides=[...])"
            ]
        )
    return from_dict(to_dict(config))


def to_dict(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values for JSON or YAML, with the sections of its task."""
    values = dataclasses.asdict(config)
    for section in SECTIONS:
        if section not in config.sections:
            del values[section]
            continue
        values[section] = {
            k: list(v) if isinstance(v, tuple) else v for k, v in values[section].items()
        }
    return values


def config_digest(config: Config) -> str:
    """Return the SHA-256 of a configuration's canonical JSON."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


class _StrictLoader(yaml.SafeLoader):
    """YAML loader for untrusted files, restricted to what JSON could express.

    Aliases, tags, duplicate keys and deep nesting are errors; dates stay text. Errors inside
    PyYAML's constructors are raised as YAMLError.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Raise YAMLError for an alias, a tag or deep nesting."""
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
        """Return the value of a node, or raise a YAMLError with its position."""
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
        ) as error:
            # such as 0b_, which PyYAML takes for a number
            raise yaml.constructor.ConstructorError(
                None, None, f"an invalid value ({error})", node.start_mark
            ) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return a mapping; raise YAMLError for a duplicate key."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r:.100} is not text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r:.100} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# Plain scalars are not resolved to dates, merge keys (<<), default keys (=) or base-60 numbers
# (1:30).
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
    """Return parsed YAML from an untrusted text; raise yaml.YAMLError if it is not plain."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, made stricter
    except (
        ValueError,
        ArithmeticError,
        LookupError,
        RecursionError,
    ) as error:
        # raised by the scanner for "\U00110000"
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from error


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the settings of a YAML file of at most 1 MiB."""
    raw = _read_bytes(file)
    try:
        values = load_yaml(raw.decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        found = " ".join(str(error).split())[:300]
        raise ConfigError(
            [f"{file} must be plain YAML in UTF-8; found {found}; correct that line"]
        ) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            [
                f"{file} must hold sections such as 'model:'; found {type(values).__name__}; see "
                "`dragoman recipes show tiny`"
            ]
        )
    return values


def _read_bytes(file: Path) -> bytes:
    """Return the bytes of a regular file of at most 1 MiB; a pipe or a device could block."""
    try:
        # Not storage's open_regular, which is in a higher layer: a configuration may be a symbolic
        # link.
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
                        f"{file} must be at most 1 MiB; found {status.st_size} bytes; is it the "
                        "right file?"
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
    """Return nested values from `a.b=value` texts."""
    nested: dict[str, Any] = {}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, value = text.partition("=")
        section, dot, name = path.strip().partition(".")
        if not equals or not dot or not name:
            meant = find_settings(path.strip().lower().replace("-", "_"))
            hint = f"did you mean {' or '.join(meant)}?" if meant else "for example model.width=256"
            problems.append(f"--set needs section.name=value; found {text!r}; {hint}")
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
    """Return a configuration with nested values set; invalid values are added to `problems`."""
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
                    f"{section} must hold settings; found {_quote_value(changes)}; write them "
                    "below it, indented"
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
                    f"{section}.{name} must be {fields[name].allowed()}; found "
                    f"{_quote_value(value)}; {_example_hint(fields[name])}"
                )
        config = dataclasses.replace(config, **{section: dataclasses.replace(current, **accepted)})
    return config


def _limit_messages(names: list[str], answer: Callable[[str], str], what: str) -> list[str]:
    """Return messages for the first unknown names, and one with the number of the others."""
    more = len(names) - _MAX_UNKNOWN_REPORTED
    return [
        *map(answer, names[:_MAX_UNKNOWN_REPORTED]),
        *([f"there are {more:,} more unknown {what}; is it the right file?"] if more > 0 else []),
    ]


def _quote_value(value: Any) -> str:
    """Return a value as YAML writes it, for messages."""
    return (
        "nothing"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value!r:.100}"
    )


def _example_hint(field: Field) -> str:
    """Return an example of a valid value, for the end of a message."""
    shown = json.dumps(field.default) if not isinstance(field.default, str) else field.default
    if field.type == Paths:
        return "write a path, or several as [one, two]"
    return (
        f"for example {shown}"
        if field.default not in ("", None)
        else "write it without brackets or braces"
    )


def _unknown_section_message(section: str) -> str:
    """Return the message for an unknown section, which may be a setting without its section."""
    section = section[:200]
    return (
        f"there is no section {section!r} in the configuration; "
        f"{suggest_setting(section, SECTIONS)}"
    )


def _unknown_setting_message(section: str, name: str, known: list[str]) -> str:
    """Return the message for an unknown setting, with the nearest known one."""
    name = name[:200]
    return f"there is no setting {section}.{name}; {suggest_setting(name, known, section)}"
