"""`dragoman train`: train a model on a parallel corpus, or on the examples of another task."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.duration_parser import parse_duration
from dragoman.cli.train_and_tune_options import (
    DATA_PANEL,
    SETTINGS_PANEL,
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
from dragoman.errors import ConfigError, DataError

if TYPE_CHECKING:
    from dragoman.config import Config
    from dragoman.runs.output_directory_and_resume_checks import OutputDirectory

TRIPLE_OPTIONS = ("pair", "valid_pair")  # options of three values each time
_RUN_PANEL = "Run"


def train(
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Model directory to write.", show_default=False),
    ],
    task: TaskOption = "",
    src: SrcOption = None,
    tgt: TgtOption = None,
    pairs: PairsOption = None,
    pair: Annotated[
        list[str] | None,
        typer.Option(
            "--pair",
            metavar="LANGUAGES FILE FILE",
            help="Two aligned files of a multilingual model and their languages: --pair de-en "
            "text.de text.en. May be repeated.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    valid_pair: Annotated[
        list[str] | None,
        typer.Option(
            "--valid-pair",
            metavar="LANGUAGES FILE FILE",
            help="Validation set of a multilingual model: languages and files.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    both_directions: Annotated[
        bool,
        typer.Option(
            "--both-directions",
            help="Train in both directions of every --pair.",
            rich_help_panel=DATA_PANEL,
        ),
    ] = False,
    train_files: TrainFilesOption = None,
    valid: ValidOption = None,
    valid_src: ValidSrcOption = None,
    valid_tgt: ValidTgtOption = None,
    valid_pairs: ValidPairsOption = None,
    src_lang: SrcLangOption = "",
    tgt_lang: TgtLangOption = "",
    recipe: RecipeOption = "",
    mini: Annotated[
        bool,
        typer.Option(
            "--mini",
            help="Scale the recipe down to a toy model; one for translation reads characters.",
            rich_help_panel=SETTINGS_PANEL,
        ),
    ] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    init_from: Annotated[
        str,
        typer.Option(
            "--init-from",
            help="Fine-tune this model: keep its architecture and tokenizer, start from its "
            "weights.",
            metavar="MODEL",
            rich_help_panel=SETTINGS_PANEL,
        ),
    ] = "",
    extend_vocabulary: Annotated[
        int | None,
        typer.Option(
            "--extend-vocabulary",
            help="With --init-from: add up to N tokens, learnt from the corpus, to its vocabulary.",
            metavar="N",
            rich_help_panel=SETTINGS_PANEL,
        ),
    ] = None,
    device: TrainDeviceOption = "",
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time budget, which also limits the model size: 90s, 30m, 1h.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = "",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume the run in --out from its latest checkpoint.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything and estimate time and memory without training.",
            rich_help_panel=_RUN_PANEL,
        ),
    ] = False,
) -> None:
    """Train a model: a translator on a parallel corpus, or a model of another --task.

    A parallel corpus is two aligned files, or one file of pairs; other tasks read --train.
    Without a recipe, a translator's size, vocabulary and learning-rate schedule are chosen from
    the corpus, the device and the time budget; another task has a default recipe.
    `dragoman settings` lists what --set and --config can change.
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
            "train.init_from": init_from,
        }
    )
    given = {"--src": src, "--tgt": tgt, "--pairs": pairs, "--train": train_files}
    overrides += _pair_overrides(
        pair or [],
        valid_pair or [],
        both_directions=both_directions,
        others=[name for name, value in given.items() if value],
    )
    if extend_vocabulary is not None:
        overrides.append(f"train.extend_vocabulary={extend_vocabulary}")
    if budget:
        overrides.append(f"train.time_budget={parse_duration(budget)}")
    overrides += set_ or []
    data_named = bool(src or tgt or pairs or train_files or pair)
    _start_training(
        out,
        task=task,
        recipe=recipe,
        small=mini,
        file=config,
        overrides=overrides,
        data_named=data_named,
        resume=resume,
        dry_run=dry_run,
    )


def _pair_overrides(
    pair: list[str], valid_pair: list[str], *, both_directions: bool, others: list[str]
) -> list[str]:
    """Return the settings of --pair, --valid-pair and --both-directions, as overrides."""
    from dragoman.config.translation_directions import parse_direction

    if not pair:
        if wrong := "--both-directions" if both_directions else "--valid-pair" * bool(valid_pair):
            raise ConfigError(
                [f"{wrong} goes with --pair; found it alone; name files by --pair de-en FILE FILE"]
            )
        return []
    if others:
        raise ConfigError(
            [
                f"--pair names the files of a multilingual model; found {others[0]} too; pass "
                "every file by --pair"
            ]
        )
    directions = list[str]()
    for languages in pair[::3]:
        parsed = parse_direction(languages)
        if parsed is None:
            raise ConfigError(
                [
                    "--pair must begin with two different languages joined by a hyphen, such as "
                    f"de-en; found {languages!r:.60}; write --pair de-en FILE FILE"
                ]
            )
        directions += [str(parsed), *([str(parsed.reverse)] if both_directions else [])]
    values = {
        "data.src": pair[1::3],
        "data.tgt": pair[2::3],
        "data.languages": pair[::3],
        "data.valid_src": valid_pair[1::3],
        "data.valid_tgt": valid_pair[2::3],
        "data.valid_languages": valid_pair[::3],
        "data.directions": list(dict.fromkeys(directions)),
    }
    return ["text.language_tags=true", *format_overrides(values)]


def _start_training(
    out: Path,
    *,
    task: str,
    recipe: str,
    small: bool,
    file: Path | None,
    overrides: list[str],
    data_named: bool,
    resume: bool,
    dry_run: bool,
) -> None:
    """Read the settings, then start or resume a run."""
    from dragoman.config import apply_overrides, overridden_settings, read_config
    from dragoman.config.loader import recipe_task
    from dragoman.config.root_config import TRANSLATE
    from dragoman.recipes.recipe_miniature import mini
    from dragoman.runs.output_directory_and_resume_checks import OutputDirectory

    def with_overrides(base: Config | None) -> Config:
        return read_config(
            recipe=recipe,
            file=file,
            overrides=overrides,
            base=base,
            scale=mini if small else None,
            task=task or (recipe_task(recipe) if recipe else ""),
        )

    if small and not (recipe or task):
        raise ConfigError(
            [
                "--mini scales a recipe down and needs its name; found no --recipe; "
                "add one of `dragoman recipes`"
            ]
        )
    output_dir = OutputDirectory(out)
    # A run that was stopped during data preparation is started again.
    if resume and not (output_dir.was_started and data_named):
        output_dir.require_resumable()
    if output_dir.has_run and task:
        output_dir.require_same_task(task)
    resolved: Config | None
    if resume and output_dir.has_run and not (data_named or recipe or file):
        resolved = apply_overrides(output_dir.config(), overrides) if overrides else None
    elif output_dir.has_run and not (data_named or recipe or file):
        raise ConfigError(
            [
                f"training needs a corpus, or --resume; found neither, and a run in {out}; "
                "add --resume to resume it"
            ]
        )
    else:
        resolved = with_overrides(None)
        if resolved.train.init_from:
            resolved = _finetune_settings(
                resolved, output_dir, recipe=recipe, file=file, overrides=overrides
            )
    if not output_dir.has_run:
        _require_data(resolved)
    is_auto_sized = (
        resolved is not None
        and resolved.task == TRANSLATE
        and not resolved.recipe
        and not resolved.train.init_from
    )
    if output_dir.has_run:
        output_dir.resume_config(resolved, overridden_settings(file, overrides))
    else:
        output_dir.require_usable()
        check_corpus_files(resolved)

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.runs.training_run import train as run
    from dragoman.training.progress_display import open_progress

    run(
        resolved,
        out,
        resume=resume,
        dry_run=dry_run,
        override=with_overrides if is_auto_sized else None,
        explicit_settings=overridden_settings(file, overrides),
        progress=open_progress(sys.stderr),
        spent=time.process_time(),  # the budget includes the time of the imports
    )


def _require_data(config: Config | None) -> None:
    """Raise ConfigError unless the settings name training data, or a generated problem."""
    from dragoman.config.root_config import TRANSLATE
    from dragoman.config.unordered_set_input_task import GENERATED_PROBLEMS

    if config is not None:
        data = config.data
        if data.src or data.pairs or data.train or config.sets.problem in GENERATED_PROBLEMS:
            return
        if config.task != TRANSLATE:
            generated = (
                f", or generate sets: --set sets.problem={GENERATED_PROBLEMS[0]}"
                if config.task == "sets"
                else ""
            )
            raise ConfigError(
                [
                    f"training needs examples; found no --train for task {config.task}; "
                    f"name a file{generated}"
                ]
            )
    raise ConfigError(
        [
            "training needs a corpus; found neither --src and --tgt nor --pairs nor --pair; "
            "see dragoman train --help"
        ]
    )


def _finetune_settings(
    config: Config,
    output_dir: OutputDirectory,
    *,
    recipe: str,
    file: Path | None,
    overrides: list[str],
) -> Config:
    """Return the settings of a fine-tuning run: those of the pretrained model with the overrides.

    A run that was started has its own copy of the weights and no longer needs the pretrained model.
    """
    from dragoman.config import read_config
    from dragoman.config.loader import read_yaml

    named = recipe or (read_yaml(file).get("recipe") if file else "")
    if named:
        found = f"--init-from {config.train.init_from} and the recipe {named}"
        raise ConfigError(
            [f"--init-from takes the architecture from a model; found {found}; leave one out"]
        )
    if output_dir.has_run:
        return read_config(file=file, overrides=overrides, base=output_dir.request())
    from dragoman.runs.finetune import finetune_config, name_file_languages

    base = name_file_languages(finetune_config(config.train.init_from), config.data)
    return read_config(file=file, overrides=overrides, base=base)


def check_corpus_files(config: Config | None) -> None:
    """Raise DataError unless every corpus file that the settings name can be opened.

    Training files must not all be empty.
    """
    from dragoman.config.root_config import CORPUS_SETTINGS, file_names
    from dragoman.data.compressed_input_streams import open_input_file

    if config is None:
        return
    for name in CORPUS_SETTINGS:
        files = [Path(each) for each in file_names(getattr(config.data, name)) if each]
        for path in files:
            open_input_file(path).close()
        if files and name in ("pairs", "train") and all(map(_is_empty, files)):
            raise DataError(
                f"{' and '.join(map(str, files))} must hold examples to train on",
                found="no line at all",
                fix="check the path, or what wrote the file",
            )


def _is_empty(path: Path) -> bool:
    """Whether a file of at most a megabyte has nothing but blank lines."""
    if not path.is_file() or path.stat().st_size > 1 << 20:
        return False
    return not path.read_bytes().strip()
