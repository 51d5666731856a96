"""`dragoman train`: from text pairs to a model directory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.durations import parse_duration
from dragoman.cli.options import complete_recipe_names, complete_setting_paths
from dragoman.errors import ConfigError, escape_json_controls

if TYPE_CHECKING:
    from dragoman.config import Config
    from dragoman.runs.output_directory import OutputDirectory

_DATA_PANEL, _SETTINGS_PANEL, _RUN_PANEL = "Text", "Settings", "The run"


def train(
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Directory for the model; made if need be.", show_default=False
        ),
    ],
    src: Annotated[
        list[str] | None,
        typer.Option(
            help="Source sentences, one a line; plain, .gz or .xz. May be repeated, with --tgt.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    tgt: Annotated[
        list[str] | None,
        typer.Option(help="Target sentences, aligned with --src.", rich_help_panel=_DATA_PANEL),
    ] = None,
    pairs: Annotated[
        list[str] | None,
        typer.Option(
            help="TSV, CSV or JSONL file with both sides instead. May be repeated.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = None,
    valid_src: Annotated[
        list[str] | None,
        typer.Option(help="Source sentences to validate on.", rich_help_panel=_DATA_PANEL),
    ] = None,
    valid_tgt: Annotated[
        list[str] | None,
        typer.Option(help="Target sentences to validate on.", rich_help_panel=_DATA_PANEL),
    ] = None,
    valid_pairs: Annotated[
        list[str] | None,
        typer.Option(help="File with both sides to validate on.", rich_help_panel=_DATA_PANEL),
    ] = None,
    src_lang: Annotated[
        str, typer.Option(help="Source language, such as de.", rich_help_panel=_DATA_PANEL)
    ] = "",
    tgt_lang: Annotated[
        str,
        typer.Option(
            help="Target language, such as en; decides how BLEU cuts words.",
            rich_help_panel=_DATA_PANEL,
        ),
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(
            help="Start from a recipe; see `dragoman recipes`.",
            rich_help_panel=_SETTINGS_PANEL,
            autocompletion=complete_recipe_names,
        ),
    ] = "",
    mini: Annotated[
        bool,
        typer.Option(
            "--mini",
            help="Scale the recipe down to a toy that trains until it has learnt; by characters.",
            rich_help_panel=_SETTINGS_PANEL,
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(help="Lay a YAML file over the recipe.", rich_help_panel=_SETTINGS_PANEL),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one setting: model.width=256. May be repeated.",
            rich_help_panel=_SETTINGS_PANEL,
            autocompletion=complete_setting_paths,
        ),
    ] = None,
    init_from: Annotated[
        str,
        typer.Option(
            "--init-from",
            help="Fine-tune a model: start from its architecture, tokenizer and weights.",
            metavar="MODEL",
            rich_help_panel=_SETTINGS_PANEL,
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            help="Where to run: auto, cpu, cuda, cuda:1 or mps.", rich_help_panel=_SETTINGS_PANEL
        ),
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            help="Stop in time, and fit the model to it: 90s, 30m, 1h.", rich_help_panel=_RUN_PANEL
        ),
    ] = "",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the run in --out from its newest checkpoint.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything, estimate time and memory, train nothing.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
) -> None:
    """Train a translator from two aligned files, or from one file of pairs.

    With nothing but the text given, size, vocabulary and schedule are fitted to the corpus and the machine.
    `dragoman settings` lists everything that --set and --config can change.
    """
    named: dict[str, list[str] | str | None] = {
        "data.src": src,
        "data.tgt": tgt,
        "data.pairs": pairs,
        "data.valid_src": valid_src,
        "data.valid_tgt": valid_tgt,
        "data.valid_pairs": valid_pairs,
        "data.src_lang": src_lang,
        "data.tgt_lang": tgt_lang,
        "train.device": device,
        "train.init_from": init_from,
    }
    asked = [
        f"{path}={escape_json_controls(json.dumps(value, ensure_ascii=False))}"
        for path, value in named.items()
        if value
    ]
    if budget:
        asked.append(f"train.time_budget={parse_duration(budget)}")
    asked += set_ or []
    data_named = bool(src or tgt or pairs)
    _start_training(
        out,
        recipe=recipe,
        small=mini,
        file=config,
        asked=asked,
        data_named=data_named,
        resume=resume,
        dry_run=dry_run,
    )


def _start_training(
    out: Path,
    *,
    recipe: str,
    small: bool,
    file: Path | None,
    asked: list[str],
    data_named: bool,
    resume: bool,
    dry_run: bool,
) -> None:
    """Read the settings, then begin a run or resume one."""
    from dragoman.config import apply_overrides, overridden_settings, read_config
    from dragoman.recipes.mini import mini
    from dragoman.runs.output_directory import OutputDirectory

    def over(base: Config | None) -> Config:
        return read_config(
            recipe=recipe, file=file, overrides=asked, base=base, scale=mini if small else None
        )

    if small and not recipe:
        raise ConfigError(
            [
                "--mini scales a recipe down and needs its name; found no --recipe; add one of `dragoman recipes`"
            ]
        )
    output_dir = OutputDirectory(out)
    if resume and not (
        output_dir.was_started and data_named
    ):  # a run that was stopped while it prepared is simply started again
        output_dir.require_resumable()
    resolved: Config | None
    if resume and output_dir.has_run and not (data_named or recipe or file):
        # What was begun goes on; only what is asked for now may differ.
        resolved = apply_overrides(output_dir.config(), asked) if asked else None
    elif output_dir.has_run and not (data_named or recipe or file):
        raise ConfigError(
            [
                f"training needs text, or --resume; found neither, and a run in {out}; add --resume to go on with it"
            ]
        )
    else:
        resolved = over(None)
        if resolved.train.init_from:
            resolved = _finetune_settings(
                resolved, output_dir, recipe=recipe, file=file, asked=asked
            )
    if not (output_dir.has_run or (resolved and (resolved.data.src or resolved.data.pairs))):
        raise ConfigError(
            [
                "training needs text; found neither --src and --tgt nor --pairs; see dragoman train --help"
            ]
        )
    is_auto_sized = resolved is not None and not resolved.recipe and not resolved.train.init_from
    if output_dir.has_run:
        output_dir.resume_config(resolved, overridden_settings(file, asked))
    else:
        output_dir.require_usable()
        _check_corpus_files(resolved)

    from dragoman.runs.training_run import (
        train as run,
    )  # here, so that a mistake is found before torch is imported
    from dragoman.training.progress import open_progress

    run(
        resolved,
        out,
        resume=resume,
        dry_run=dry_run,
        override=over if is_auto_sized else None,
        explicit_settings=overridden_settings(file, asked),
        progress=open_progress(sys.stderr),
        spent=time.process_time(),  # importing took this long, and a budget is for the whole command
    )


def _finetune_settings(
    config: Config, output_dir: OutputDirectory, *, recipe: str, file: Path | None, asked: list[str]
) -> Config:
    """Return the settings over those of the model to fine-tune; a run that was begun no longer needs the model itself."""
    from dragoman.config import read_config
    from dragoman.config.loader import read_yaml

    named = recipe or (read_yaml(file).get("recipe") if file else "")
    if named:
        found = f"--init-from {config.train.init_from} and the recipe {named}"
        raise ConfigError(
            [
                f"--init-from takes the architecture from a model; found {found}; leave one of the two out"
            ]
        )
    if output_dir.has_run:
        return read_config(file=file, overrides=asked, base=output_dir.request())
    from dragoman.runs.finetune import finetune_config

    return read_config(file=file, overrides=asked, base=finetune_config(config.train.init_from))


def _check_corpus_files(config: Config | None) -> None:
    """Raise DataError unless every corpus file that the settings name can be opened."""
    from dragoman.data.text_stream import open_input_file

    for name in ("src", "tgt", "pairs", "valid_src", "valid_tgt", "valid_pairs"):
        named = getattr(config.data, name) if config else ""
        for path in [named] if isinstance(named, str) else named:
            if path:
                open_input_file(Path(path)).close()
