"""`dragoman recipes`: list the predefined architectures and show their settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import JsonOption, complete_recipe_names
from dragoman.cli.settings_reference import format_value, get_setting, list_all_settings
from dragoman.cli.terminal_output import print_json, print_result, print_table
from dragoman.errors import ConfigError, suggest_name

if TYPE_CHECKING:
    from dragoman.config import Config

app = typer.Typer(name="recipes", help="List the recipes, or show one.")


TASK_TITLES = {
    "translate": "Translation",
    "language": "Language models",
    "classify": "Classification",
    "tag": "Tagging",
    "pairs": "Sentence pairs",
    "sets": "Sets",
}


@app.callback(invoke_without_command=True)
def recipes(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help=f"List those of one task: {', '.join(TASK_TITLES)}.",
            show_default=False,
        ),
    ] = "",
    json: JsonOption = False,
) -> None:
    """List the recipes by task and family; `dragoman recipes show NAME` shows one."""
    if context.invoked_subcommand is not None:
        return
    from dragoman.registry import catalogue

    if task and task not in TASK_TITLES:
        raise ConfigError(
            [f"--task must name a task; found {task!r:.60}; {suggest_name(task, TASK_TITLES)}"]
        )
    found = {name: entry for name, entry in catalogue("recipe").items() if task in ("", entry.task)}
    if json:
        print_json(
            [
                {
                    "recipe": name,
                    "task": entry.task,
                    "family": entry.family,
                    "summary": entry.summary,
                }
                for name, entry in found.items()
            ]
        )
        return
    families: dict[str, list[tuple[str, str]]] = {}
    for each, title in TASK_TITLES.items():
        for name, entry in found.items():
            if entry.task == each:
                heading = title if each != "translate" else entry.family or "other"
                families.setdefault(heading, []).append((f"  {name}", entry.summary))
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
    from dragoman.cli.layer_diagram import format_stack
    from dragoman.config import read_config, to_dict
    from dragoman.registry import catalogue

    config = read_config(recipe=name)
    if config.task != "translate":
        _show_task_recipe(name, config, json=json)
        return

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
    _print_settings(config)
    print_result(
        f"\nTo train it: dragoman train --recipe {name} --src ... --tgt ... --out my-model"
    )


def _show_task_recipe(name: str, config: Config, *, json: bool) -> None:
    """Show the settings of a recipe of another task, whose sizes depend on the data."""
    from dragoman.config import to_dict
    from dragoman.registry import catalogue

    if json:
        print_json({"recipe": name, "task": config.task, "config": to_dict(config)})
        return
    print_result(f"{name}: {catalogue('recipe')[name].summary}")
    print_result(f"task {config.task}: {TASK_TITLES[config.task].lower()}\n")
    _print_settings(config)
    print_result(
        f"\nTo train it: dragoman train --task {config.task} --recipe {name} --train ... "
        "--valid ... --out my-model"
    )


def _print_settings(config: Config) -> None:
    """Print the settings of a recipe, those of the data left out."""
    print_table(
        ["setting", "value", "meaning"],
        [
            (row.path, format_value(get_setting(config, row.path)), row.sentence)
            for row in list_all_settings()
            if row.path.partition(".")[0] in config.sections and not row.path.startswith("data.")
        ],
    )
