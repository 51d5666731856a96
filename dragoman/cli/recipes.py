"""`dragoman recipes`: list the predefined architectures and show their settings."""

from __future__ import annotations

from typing import Annotated

import typer

from dragoman.cli.options import JsonOption, complete_recipe_names
from dragoman.cli.output import print_json, print_result, print_table
from dragoman.cli.settings import format_value, get_setting, list_all_settings

app = typer.Typer(name="recipes", help="List the recipes, or show one.")


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context, json: JsonOption = False) -> None:
    """List the recipes by family; `dragoman recipes show NAME` shows one."""
    if context.invoked_subcommand is not None:
        return
    from dragoman.registry import catalogue

    found = catalogue("recipe")
    if json:
        print_json(
            [
                {"recipe": name, "family": entry.family, "summary": entry.summary}
                for name, entry in found.items()
            ]
        )
        return
    families: dict[str, list[tuple[str, str]]] = {}
    for name, entry in found.items():
        families.setdefault(entry.family or "other", []).append((f"  {name}", entry.summary))
    # One table for all families, so that the summaries are aligned.
    print_table(
        ["recipe", "summary"],
        [row for family, rows in families.items() for row in ((f"{family}:", ""), *rows)],
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Recipe name.", autocompletion=complete_recipe_names)],
    json: JsonOption = False,
) -> None:
    """Show a recipe: its layers with shapes and parameter counts, and its settings."""
    from dragoman.cli.stack_diagram import format_stack
    from dragoman.config import read_config, to_dict
    from dragoman.registry import catalogue

    config = read_config(recipe=name)

    # Imported here, so that an unknown recipe is reported before torch is imported.
    from dragoman.models.factory import summarize_model

    size = config.text.vocab_size
    rows = summarize_model(config.model, src_vocab_size=size, tgt_vocab_size=size)
    total = sum(row.parameters for row in rows)
    if json:
        print_json(
            {
                "recipe": name,
                "config": to_dict(config),
                "parameters": total,
                "stack": [row._asdict() for row in rows],
            }
        )
        return
    print_result(f"{name}: {catalogue('recipe')[name].summary}")
    print_result(f"{total:,} parameters with a vocabulary size of {size:,}\n")
    for line in format_stack(rows, config.model):
        print_result(line)
    print_result()
    chosen = [row for row in list_all_settings() if not row.path.startswith("data.")]
    print_table(
        ["setting", "value", "meaning"],
        [(row.path, format_value(get_setting(config, row.path)), row.sentence) for row in chosen],
    )
    print_result(
        f"\nTo train it: dragoman train --recipe {name} --src ... --tgt ... --out my-model"
    )
