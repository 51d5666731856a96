"""The help of commands: flags without a type, and paragraphs that fill the width of the terminal."""

from __future__ import annotations

import inspect
from typing import Any

import typer


def build_command(app: typer.Typer) -> Any:
    """Return the command of an app, with every help text put in shape."""
    command = typer.main.get_command(app)
    _shape(command)
    return command


def _shape(command: Any) -> None:
    """Shape the help of a command and of those below it."""
    if command.help:
        # typer keeps line breaks after the first paragraph, where a terminal of 80 columns breaks lines once more.
        command.help = "\n\n".join(" ".join(each.split()) for each in inspect.cleandoc(command.help).split("\n\n"))
    params = command.get_params

    def plain_params(context: Any) -> list[Any]:
        found: list[Any] = params(context)
        for each in found:
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""  # newer typers write <bool>, as if a flag took a value
        return found

    command.get_params = plain_params
    for each in getattr(command, "commands", {}).values():
        _shape(each)
