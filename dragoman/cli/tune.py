"""`dragoman tune`: search for the settings of a training within a time budget."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.durations import parse_duration
from dragoman.cli.options import complete_recipe_names, complete_setting_paths
from dragoman.cli.output import print_result
from dragoman.cli.train import check_corpus_files
from dragoman.errors import ConfigError, StoppedError, escape_json_controls

if TYPE_CHECKING:
    from dragoman.config import Config

_DATA_PANEL, _SETTINGS_PANEL, _SEARCH_PANEL = "Data", "Settings", "Search"


def tune(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Directory of the study.", show_default=False),
    ],
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time of the whole search: 30m, 2h.",
            show_default=False,
            rich_help_panel=_SEARCH_PANEL,
        ),
    ],
    trial_budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Training time of each trial; by default a twentieth of --budget, at least 1m, or "
            "as long as train.steps takes, if it is set.",
            rich_help_panel=_SEARCH_PANEL,
        ),
    ] = "",
    trials: Annotated[
        int,
        typer.Option(min=0, help="Most trials; 0 for no limit.", rich_help_panel=_SEARCH_PANEL),
    ] = 0,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Settings to search: names, as in size,dropout, or NAME=low..high, "
            "NAME=low..high:log or NAME=a,b,c. May be repeated. By default "
            "size,dropout,learning_rate,vocab_size.",
            rich_help_panel=_SEARCH_PANEL,
            autocompletion=complete_setting_paths,
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help="Validation metric to compare trials by: loss, bleu, or one of the task's; "
            "by default train.best_metric.",
            rich_help_panel=_SEARCH_PANEL,
        ),
    ] = "",
    pruning: Annotated[
        bool,
        typer.Option(
            "--pruning/--no-pruning",
            help="End trials early that are worse than the median of the others.",
            rich_help_panel=_SEARCH_PANEL,
        ),
    ] = True,
    keep: Annotated[
        int,
        typer.Option(
            min=1, help="How many of the best models are kept.", rich_help_panel=_SEARCH_PANEL
        ),
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Show the search space without training.",
            rich_help_panel=_SEARCH_PANEL,
        ),
    ] = False,
    task: Annotated[
        str,
        typer.Option(
            help="What the model does: translate, language, classify, tag, pairs or sets.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = "",
    src: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Source sentences, one per line. May be repeated, with --tgt.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    tgt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Target sentences, aligned with --src.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="TSV, CSV or JSONL file with both sides instead. May be repeated.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    train_files: Annotated[
        list[str] | None,
        typer.Option(
            "--train",
            metavar="FILE",
            help="Examples of another task. May be repeated.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    valid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Validation examples of another task; held out of --train by default.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    valid_src: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Validation set: source sentences; held out of --src by default.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    valid_tgt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Validation set: target sentences.", rich_help_panel=_DATA_PANEL
        ),
    ] = None,
    valid_pairs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Validation set: file with both sides.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    src_lang: Annotated[
        str, typer.Option(help="Source language, such as de.", rich_help_panel=_DATA_PANEL)
    ] = "",
    tgt_lang: Annotated[
        str,
        typer.Option(help="Target language, such as en.", rich_help_panel=_DATA_PANEL),
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(
            help="Recipe to start from; see `dragoman recipes`.",
            rich_help_panel=_SETTINGS_PANEL,
            autocompletion=complete_recipe_names,
        ),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of settings, applied on top of the recipe.",
            rich_help_panel=_SETTINGS_PANEL,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set one setting of all trials: train.steps=2000. May be repeated.",
            rich_help_panel=_SETTINGS_PANEL,
            autocompletion=complete_setting_paths,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Device: auto, cpu, cuda, cuda:1 or mps.", rich_help_panel=_SETTINGS_PANEL
        ),
    ] = "",
) -> None:
    """Search for the settings of a training: sizes, rates, vocabulary, or any others.

    Each trial is a training with other settings, sampled by Optuna and compared on validation data.
    The first one has the settings that `dragoman train` would use. The best settings are written to
    best.yaml in --out, for `dragoman train --config`. The same command resumes a search that was
    stopped, or extends it with a larger --budget.
    """
    named: dict[str, list[str] | str | None] = {
        "data.src": src,
        "data.tgt": tgt,
        "data.pairs": pairs,
        "data.valid_src": valid_src,
        "data.valid_tgt": valid_tgt,
        "data.valid_pairs": valid_pairs,
        "data.train": train_files,
        "data.valid": valid,
        "data.src_lang": src_lang,
        "data.tgt_lang": tgt_lang,
        "train.device": device,
    }
    overrides = [
        f"{path}={escape_json_controls(json.dumps(value, ensure_ascii=False))}"
        for path, value in named.items()
        if value
    ]
    overrides += set_ or []
    seconds = parse_duration(budget)
    trial_seconds = parse_duration(trial_budget) if trial_budget else 0.0

    from dragoman.config import overridden_settings, read_config
    from dragoman.config.config import TRANSLATE
    from dragoman.config.loader import recipe_task
    from dragoman.config.sets import GENERATED_PROBLEMS
    from dragoman.lab.search_space import parse_search
    from dragoman.runtime.optional_packages import require_packages

    def with_overrides(base: Config | None) -> Config:
        return read_config(
            recipe=recipe,
            file=config,
            overrides=overrides,
            base=base,
            task=task or (recipe_task(recipe) if recipe else ""),
        )

    resolved = with_overrides(None)
    data = resolved.data
    generated = resolved.sets.problem in GENERATED_PROBLEMS and resolved.task == "sets"
    if not (data.src or data.pairs or data.train or generated):
        options = "--src and --tgt, or --pairs" if resolved.task == TRANSLATE else "--train"
        raise ConfigError([f"tuning needs data; found none; name the files by {options}"])
    if resolved.train.time_budget or resolved.train.init_from:
        name = "time_budget" if resolved.train.time_budget else "init_from"
        raise ConfigError(
            [
                f"train.{name} is not for tuning; found {getattr(resolved.train, name)}; "
                f"{'use --trial-budget' if name == 'time_budget' else 'leave it out'}"
            ]
        )
    parse_search(search or (), resolved)
    check_corpus_files(resolved)
    require_packages("optuna")

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.lab.study import tune as run
    from dragoman.training.progress import open_progress

    logging.getLogger("dragoman").setLevel(logging.WARNING)  # no decisions of every trainer
    result = run(
        resolved,
        out,
        budget=seconds,
        trial_budget=trial_seconds,
        trials=trials,
        search=search or (),
        metric=metric,
        keep=keep,
        prune=pruning,
        override=None if resolved.recipe or resolved.task != TRANSLATE else with_overrides,
        explicit_settings=overridden_settings(config, overrides),
        progress=open_progress(sys.stderr),
        dry_run=dry_run,
    )
    if dry_run:
        return
    for line in result.table():
        print_result(line)
    best = result.best
    if best is not None:
        print_result(f"best settings: {out / 'best.yaml'}; figure: {out / 'trials.png'}")
    if result.stopped:
        raise StoppedError(
            f"stopped after {sum(each.value is not None for each in result.trials)} trials",
            found="",
            fix="run the same command again to resume",
        )
