"""`dragoman recipes`: the models that can be trained by name."""

from __future__ import annotations

from typing import Annotated

import typer

from dragoman.cli.options import JsonOption, recipe_names
from dragoman.cli.settings import config_value, every_setting, say_value
from dragoman.cli.show import as_json, result, table

app = typer.Typer(name="recipes", help="List the recipes, or show one with `recipes show NAME`.")


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context, json: JsonOption = False) -> None:
    """List the recipes by family, or show one with `dragoman recipes show NAME`."""
    if context.invoked_subcommand is not None:
        return
    from dragoman.registry import catalogue

    found = catalogue("recipe")
    if json:
        as_json([{"recipe": name, "family": entry.family, "summary": entry.summary} for name, entry in found.items()])
        return
    families: dict[str, list[tuple[str, str]]] = {}
    for name, entry in found.items():
        families.setdefault(entry.family or "other", []).append((f"  {name}", entry.summary))
    # One table for all, so that the summaries stand in one column.
    table(["recipe", "what it is"], [row for family, rows in families.items() for row in ((f"{family}:", ""), *rows)])


@app.command()
def show(name: Annotated[str, typer.Argument(help="The recipe's name.", autocompletion=recipe_names)], json: JsonOption = False) -> None:
    """Show a recipe: its stack with shapes and parameters, and every setting that it chose."""
    from dragoman.cli.drawing import draw_stack
    from dragoman.config import read_config, to_dict
    from dragoman.registry import catalogue

    config = read_config(recipe=name)

    from dragoman.models.build import describe  # here, so that a mistyped name is found before torch is imported

    size = config.text.vocabulary
    rows = describe(config.model, src_vocabulary=size, tgt_vocabulary=size)
    total = sum(row.parameters for row in rows)
    if json:
        as_json({"recipe": name, "config": to_dict(config), "parameters": total, "stack": [row._asdict() for row in rows]})
        return
    result(f"{name}: {catalogue('recipe')[name].summary}")
    result(f"{total:,} weights with a vocabulary of {size:,}\n")
    for line in draw_stack(rows, config.model):
        result(line)
    result()
    chosen = [row for row in every_setting() if not row.path.startswith("data.")]
    table(["setting", "value", "meaning"], [(row.path, say_value(config_value(config, row.path)), row.sentence) for row in chosen])
    result(f"\nTo train it: dragoman train --recipe {name} --src ... --tgt ... --out my-model")
