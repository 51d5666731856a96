"""`dragoman tune`: search for the settings of a training within a time budget."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.duration_parser import parse_duration
from dragoman.cli.options import complete_setting_paths
from dragoman.cli.terminal_output import format_count, print_result
from dragoman.cli.train import check_corpus_files
from dragoman.cli.train_and_tune_options import (
    ConfigOption,
    PairsOption,
    RecipeOption,
    SetOption,
    SrcLangOption,
    SrcOption,
    TaskOption,
    TgtLangOption,
    TgtOption,
    TrainDeviceOption,
    TrainFilesOption,
    ValidOption,
    ValidPairsOption,
    ValidSrcOption,
    ValidTgtOption,
    format_overrides,
)
from dragoman.errors import ConfigError, StoppedError

if TYPE_CHECKING:
    from dragoman.config import Config

_SEARCH_PANEL = "Search"


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
        typer.Option(
            min=0,
            help="Maximum number of trials; 0 for no limit.",
            rich_help_panel=_SEARCH_PANEL,
        ),
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
    task: TaskOption = "",
    src: SrcOption = None,
    tgt: TgtOption = None,
    pairs: PairsOption = None,
    train_files: TrainFilesOption = None,
    valid: ValidOption = None,
    valid_src: ValidSrcOption = None,
    valid_tgt: ValidTgtOption = None,
    valid_pairs: ValidPairsOption = None,
    src_lang: SrcLangOption = "",
    tgt_lang: TgtLangOption = "",
    recipe: RecipeOption = "",
    config: ConfigOption = None,
    set_: SetOption = None,
    device: TrainDeviceOption = "",
) -> None:
    """Search for the settings of a training: sizes, rates, vocabulary, or any others.

    Each trial is a training with other settings, sampled by Optuna and compared on validation data.
    The first one has the settings that `dragoman train` would use. The best settings are written to
    best.yaml in --out, for `dragoman train --config`. The same command resumes a search that was
    stopped, or extends it with a larger --budget.
    """
    overrides = format_overrides(
        {
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
    )
    overrides += set_ or []
    seconds = parse_duration(budget)
    trial_seconds = parse_duration(trial_budget) if trial_budget else 0.0

    from dragoman.config import overridden_settings, read_config
    from dragoman.config.loader import recipe_task
    from dragoman.config.root_config import TRANSLATE
    from dragoman.config.unordered_set_input_task import GENERATED_PROBLEMS
    from dragoman.runtime.optional_package_checks import require_packages
    from dragoman.tune.search_space import parse_search

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
    from dragoman.training.progress_display import open_progress
    from dragoman.tune.study import tune as run

    logging.getLogger("dragoman").setLevel(logging.WARNING)  # not each trial's settings
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
    for line in result.table() if result.trials else ():
        print_result(line)
    best = result.best
    if best is not None:
        print_result(f"best settings: {out / 'best.yaml'}; figure: {out / 'trials.png'}")
    if result.stopped:
        ended = sum(each.value is not None for each in result.trials)
        raise StoppedError(
            f"stopped after {format_count(ended, 'trial')}",
            found="",
            fix="run the same command again to resume",
        )
    if best is None and result.trials:
        last = result.trials[-1]
        found, fix = f"trial {last.number}: {last.reason}", "correct the settings or the search"
        if not last.reason:
            found, fix = f"trial {last.number}, which the budget ended", "raise --budget"
        raise ConfigError([f"some trial must be complete; found {found}; {fix}"])
