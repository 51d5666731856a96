"""Reading a configuration: recipe, then YAML file, then `path=value`, each checked, every problem told at once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dragoman.config.setting import Field, convert, settings_of
from dragoman.config.tree import SECTIONS, Config
from dragoman.errors import ConfigError, nearest
from dragoman.registry import catalogue

MAX_YAML_BYTES = 1 << 20  # a configuration is a page; anything larger is a mistake or an attack


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
    from_file = read_yaml(Path(file)) if file else {}
    name = recipe or str(from_file.pop("recipe", "") or "")
    from_file.pop("recipe", None)
    config = dataclasses.replace(catalogue("recipe").load(name)(), recipe=name) if name else base or Config()
    config = scale(config) if scale else config
    problems: list[str] = []
    config = _merge(config, from_file, problems)
    config = _merge(config, _nest(overrides, problems), problems)
    return _sound(config, problems)


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Apply `section.name=value` texts to a configuration and check the result."""
    problems: list[str] = []
    return _sound(_merge(config, _nest(overrides, problems), problems), problems)


def from_dict(values: Mapping[str, Any]) -> Config:
    """Rebuild a configuration from `to_dict`'s result, as strictly as from a file."""
    problems: list[str] = []
    rest = {key: value for key, value in values.items() if key != "recipe"}
    return _sound(dataclasses.replace(_merge(Config(), rest, problems), recipe=str(values.get("recipe", ""))), problems)


def _sound(config: Config, problems: list[str]) -> Config:
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
        raise ConfigError([f"config must be a Config; found {found}; make one with dragoman.read_config(recipe=..., overrides=[...])"])
    return from_dict(to_dict(config))


def to_dict(config: Config) -> dict[str, Any]:
    """Turn a configuration into plain values for JSON or YAML."""
    values = dataclasses.asdict(config)
    for section in SECTIONS:
        values[section] = {k: list(v) if isinstance(v, tuple) else v for k, v in values[section].items()}
    return values


def config_digest(config: Config) -> str:
    """Fingerprint a configuration: SHA-256 of its canonical JSON."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


class _StrictLoader(yaml.SafeLoader):
    """YAML without aliases (they can expand without end) and without duplicate keys (one would be lost)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse `*name` where it stands."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, f"the alias *{event.anchor} is not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Refuse a key that stands twice."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of settings: no tags, no aliases, no duplicate keys, at most 1 MiB."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ConfigError([f"--config must name a readable YAML file; found {file}: {error.strerror}; check the path"]) from error
    if len(raw) > MAX_YAML_BYTES:
        raise ConfigError([f"{file} must be at most 1 MiB; found {len(raw)} bytes; is it the right file?"])
    try:
        values = yaml.load(raw.decode("utf-8-sig"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, made stricter
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        found = " ".join(str(error).split())[:300]
        raise ConfigError([f"{file} must be plain YAML in UTF-8; found {found}; correct that place"]) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError([f"{file} must hold sections such as 'model:'; found {type(values).__name__}; see `dragoman recipes show tiny`"])
    return values


def _nest(overrides: Iterable[str], problems: list[str]) -> dict[str, Any]:
    """Turn `a.b=value` texts into nested values."""
    nested: dict[str, Any] = {}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        path, equals, value = text.partition("=")
        section, dot, name = path.strip().partition(".")
        if not equals or not dot or not name:
            problems.append(f"--set needs section.name=value; found {text!r}; for example --set model.width=256")
            continue
        try:
            parsed = yaml.load(value, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, made stricter
        except yaml.YAMLError:
            parsed = value
        if parsed is None and value.strip() not in ("null", "~"):
            parsed = value
        nested.setdefault(section, {})[name] = parsed
    return nested


def _merge(config: Config, values: Mapping[str, Any], problems: list[str]) -> Config:
    """Lay nested values over a configuration; what does not fit goes into `problems`."""
    for section, changes in values.items():
        if section not in SECTIONS:
            problems.append(_unknown_section(section))
            continue
        if not isinstance(changes, Mapping):
            if changes is not None:
                problems.append(f"{section} must hold settings; found {changes!r}; write them below it, indented")
            continue
        current = getattr(config, section)
        fields = {each.name: each for each in settings_of(type(current))}
        accepted: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in fields:
                problems.append(_unknown_setting(section, str(name), list(fields)))
                continue
            try:
                accepted[name] = convert(fields[name].setting.spelt(value), fields[name].type)
            except (ValueError, TypeError):
                problems.append(f"{section}.{name} must be {fields[name].allowed()}; found {_said(value)}; {_example(fields[name])}")
        config = dataclasses.replace(config, **{section: dataclasses.replace(current, **accepted)})
    return config


def _said(value: Any) -> str:
    """Quote what a person wrote, in YAML's words and not in Python's."""
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!r:.100}"


def _example(field: Field) -> str:
    """End a message about a wrong value with a right one, where there is a default to show."""
    shown = json.dumps(field.default) if not isinstance(field.default, str) else field.default
    return f"for example {shown}" if field.default not in ("", None) else "write it without brackets or braces"


def _unknown_section(section: str) -> str:
    """Answer a wrong section: perhaps it is a setting without its section."""
    owners = [f"{owner}.{section}" for owner in SECTIONS if section in _names(owner)]
    hint = f"did you mean {' or '.join(owners)}?" if owners else nearest(section, SECTIONS)
    return f"there is no section {section!r} in the configuration; {hint}"


def _unknown_setting(section: str, name: str, known: list[str]) -> str:
    """Answer a wrong setting with the nearest right one, here or in another section."""
    owners = [f"{owner}.{name}" for owner in SECTIONS if name in _names(owner)]
    hint = f"did you mean {' or '.join(owners)}?" if owners else nearest(name, known)
    return f"there is no setting {section}.{name}; {hint}"


def _names(section: str) -> set[str]:
    """List a section's settings."""
    return {each.name for each in settings_of(type(getattr(Config(), section)))}
