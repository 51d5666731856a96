"""Options that `train` and `tune` share: the data of a run, and its settings.

Hyperparameters are settings (`config/`), given by `--set` or a file, not options of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import complete_recipe_names, complete_setting_paths
from dragoman.errors import escape_json_controls

DATA_PANEL, SETTINGS_PANEL = "Data", "Settings"

Files = list[str] | None


def format_overrides(values: Mapping[str, Sequence[str] | str | None]) -> list[str]:
    """Return options as overrides of settings, `NAME=VALUE`; those not given are left out."""
    return [
        f"{path}={escape_json_controls(json.dumps(value, ensure_ascii=False))}"
        for path, value in values.items()
        if value
    ]


TaskOption = Annotated[
    str,
    typer.Option(
        "--task",
        help="What the model does: translate, language, classify, tag, pairs or sets.",
        rich_help_panel=DATA_PANEL,
    ),
]
SrcOption = Annotated[
    Files,
    typer.Option(
        "--src",
        metavar="FILE",
        help="Source sentences, one per line; plain, .gz or .xz. May be repeated, with --tgt.",
        rich_help_panel=DATA_PANEL,
    ),
]
TgtOption = Annotated[
    Files,
    typer.Option(
        "--tgt",
        metavar="FILE",
        help="Target sentences, aligned with --src.",
        rich_help_panel=DATA_PANEL,
    ),
]
PairsOption = Annotated[
    Files,
    typer.Option(
        "--pairs",
        metavar="FILE",
        help="TSV, CSV or JSONL file with both sides instead. May be repeated.",
        rich_help_panel=DATA_PANEL,
    ),
]
TrainFilesOption = Annotated[
    Files,
    typer.Option(
        "--train",
        metavar="FILE",
        help="Examples of another task: JSONL, CSV, TSV, CoNLL or text. May be repeated.",
        rich_help_panel=DATA_PANEL,
    ),
]
ValidOption = Annotated[
    Files,
    typer.Option(
        "--valid",
        metavar="FILE",
        help="Validation examples of another task; held out of --train by default.",
        rich_help_panel=DATA_PANEL,
    ),
]
ValidSrcOption = Annotated[
    Files,
    typer.Option(
        "--valid-src",
        metavar="FILE",
        help="Validation set: source sentences; held out of --src by default.",
        rich_help_panel=DATA_PANEL,
    ),
]
ValidTgtOption = Annotated[
    Files,
    typer.Option(
        "--valid-tgt",
        metavar="FILE",
        help="Validation set: target sentences.",
        rich_help_panel=DATA_PANEL,
    ),
]
ValidPairsOption = Annotated[
    Files,
    typer.Option(
        "--valid-pairs",
        metavar="FILE",
        help="Validation set: file with both sides.",
        rich_help_panel=DATA_PANEL,
    ),
]
SrcLangOption = Annotated[
    str,
    typer.Option("--src-lang", help="Source language, such as de.", rich_help_panel=DATA_PANEL),
]
TgtLangOption = Annotated[
    str,
    typer.Option(
        "--tgt-lang",
        help="Target language, such as en; selects BLEU's tokenizer.",
        rich_help_panel=DATA_PANEL,
    ),
]
RecipeOption = Annotated[
    str,
    typer.Option(
        "--recipe",
        help="Recipe to start from; see `dragoman recipes`.",
        rich_help_panel=SETTINGS_PANEL,
        autocompletion=complete_recipe_names,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of settings, applied on top of the recipe.",
        rich_help_panel=SETTINGS_PANEL,
    ),
]
SetOption = Annotated[
    Files,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Override one setting: model.width=256. May be repeated.",
        rich_help_panel=SETTINGS_PANEL,
        autocompletion=complete_setting_paths,
    ),
]
TrainDeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device: auto, cpu, cuda, cuda:1 or mps.",
        rich_help_panel=SETTINGS_PANEL,
    ),
]
