"""`dragoman settings`: every setting with its default, range and description."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dragoman.cli.options import JsonOption
from dragoman.cli.terminal_output import print_json, print_table
from dragoman.errors import ConfigError, suggest_name

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
        sections = {row.path.partition(".")[0] for row in rows}
        close = difflib.get_close_matches(path, [*(row.path for row in rows), *sections], n=1)
        hint = f"did you mean {close[0]}?" if close else suggest_name(path, sections)
        raise ConfigError([f"there is no setting or section {path!r}; {hint}"])
    if json:
        print_json([row._asdict() for row in chosen])
    else:
        print_table(["setting", "default", "values", "meaning"], chosen)


def list_all_settings() -> list[SettingRow]:
    """Return every setting, section by section."""
    from dragoman.config.config import SECTIONS, Config
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
