"""`dragoman recipes`: the models that can be trained by name."""

from __future__ import annotations

from typing import Annotated

import typer

from dragoman.cli.options import JsonOption
from dragoman.cli.show import as_json, table

app = typer.Typer(name="recipes", help="List the recipes, or show one.")


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context, json: JsonOption = False) -> None:
    """List the recipes, or show one with `dragoman recipes show NAME`."""
    if context.invoked_subcommand is not None:
        return
    from dragoman.registry import catalogue

    rows = [(name, entry.summary) for name, entry in catalogue("recipe").items()]
    if json:
        as_json([{"recipe": name, "summary": summary} for name, summary in rows])
    else:
        table(["recipe", "what it is"], rows)


@app.command()
def show(name: Annotated[str, typer.Argument(help="The recipe's name.")], json: JsonOption = False) -> None:
    """Show a recipe: its stack with shapes and parameters, and every setting it chose."""
