"""`dragoman settings`: every setting with its default, range and description."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dragoman.cli.options import JsonOption
from dragoman.cli.terminal_output import print_json, print_table
from dragoman.errors import ConfigError, suggest_name, suggest_names

if TYPE_CHECKING:
    from dragoman.config import Config


class SettingRow(NamedTuple):
    """One setting, formatted for display."""

    path: str
    default: str
    allowed: str
    sentence: str


def settings(
    path: Annotated[
        str, typer.Argument(help="Section, such as train, or setting, such as model.width.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """List the settings that --set and --config can change."""
    rows = list_all_settings()
    chosen = [
        row for row in rows if not path or row.path == path or row.path.startswith(f"{path}.")
    ]
    if not chosen:
        hint = _suggest_path(path, [row.path for row in rows])
        raise ConfigError([f"there is no setting or section {path!r}; {hint}"])
    if json:
        print_json([row._asdict() for row in chosen])
    else:
        print_table(["setting", "default", "values", "meaning"], chosen)


def _suggest_path(path: str, paths: list[str]) -> str:
    """Return a suggestion for an unknown setting or section.

    It is the setting that other toolkits call so, settings whose names contain the word, or the
    nearest spelling.
    """
    from dragoman.config.root_config import find_settings

    section, _, name = path.rpartition(".")
    sections = {each.partition(".")[0] for each in paths}
    plain = name.lower().replace("-", "_")
    if meant := find_settings(plain, section):
        return f"did you mean {' or '.join(meant)}?"
    holding = [each for each in paths if plain and plain in each.partition(".")[2]]
    if holding and not section:
        return suggest_names(plain, holding)
    close = difflib.get_close_matches(path, [*paths, *sections], n=1)
    return f"did you mean {close[0]}?" if close else suggest_name(path, sections)


def list_all_settings() -> list[SettingRow]:
    """Return every setting, section by section."""
    from dragoman.config.root_config import SECTIONS, Config
    from dragoman.config.setting_declaration import list_settings

    rows = []
    for section in SECTIONS:
        for each in list_settings(type(getattr(Config(), section))):
            rows.append(
                SettingRow(
                    f"{section}.{each.name}",
                    format_value(each.default),
                    each.allowed(),
                    each.setting.doc,
                )
            )
    return rows


def format_value(value: Any) -> str:
    """Return a value in the syntax of `--set path=value`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def get_setting(config: Config, path: str) -> Any:
    """Return a setting by its path, such as model.width."""
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def changed_settings(config: Config, from_: Config) -> list[tuple[SettingRow, str, str]]:
    """Return the settings in which two configurations differ, with both values."""
    found = []
    for row in list_all_settings():
        values = [format_value(get_setting(each, row.path)) for each in (config, from_)]
        if values[0] != values[1]:
            found.append((row, values[0], values[1]))
    return found
