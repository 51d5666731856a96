"""Options and arguments that several commands share (--beam, --device, …), with their checks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman.cli.command_progress_bar import is_terminal
from dragoman.cli.terminal_output import print_note, show_notes
from dragoman.config import device_engine_and_precision_names
from dragoman.errors import BundleError, ConfigError

SAMPLING_PANEL = "Sampling"


def complete_recipe_names(incomplete: str) -> list[str]:
    """Return recipe names for shell completion."""
    from dragoman.registry import catalogue

    return [name for name in catalogue("recipe") if name.startswith(incomplete)]


def complete_setting_paths(incomplete: str) -> list[str]:
    """Return setting paths, such as `model.width=`, for shell completion."""
    from dragoman.cli.settings_reference import list_all_settings

    return [f"{row.path}=" for row in list_all_settings() if row.path.startswith(incomplete)]


_DEFAULT_HELP = "; by default the built-in one"

# These checks run while the arguments are parsed, before a command imports torch.


def check_model(context: typer.Context, path: Path) -> Path:
    """Raise BundleError unless the path is a finished model directory; files are verified later."""
    from dragoman.bundle.format import require_bundle

    if not context.resilient_parsing:
        require_bundle(path)
    return path


def _check_optional_model(context: typer.Context, path: Path | None) -> Path | None:
    """Raise BundleError unless there is no path or it is a finished model directory."""
    return path if path is None else check_model(context, path)


def built_in_model() -> Path:
    """Return the built-in model; raise BundleError if there is none."""
    from dragoman.bundle.format import box_path

    return box_path()


def default_model() -> Path:
    """Return the built-in model for a command that names none, with a note on a terminal."""
    path = built_in_model()
    if is_terminal(sys.stderr):
        print_note("using the built-in model, as no other is named; see `dragoman info`")
    return path


def _set_quiet(context: typer.Context, quiet: bool) -> bool:
    """Leave out notes from now on."""
    if quiet and not context.resilient_parsing:
        show_notes(False)
    return quiet


def require_command(path: Path, command: str, runs: str = "") -> None:
    """Raise BundleError unless a model's task is run by a command, by default this one.

    The message names the command that runs it.
    """
    from dragoman.bundle.format import check_config, read_command, read_task, require_bundle

    require_bundle(path)
    task, found = read_task(path), read_command(path)
    wanted = runs or command
    if found != wanted:
        check_config(path)  # a damaged one may name any task
        what = {"translate": "a translation model", "generate": "a language model"}
        raise BundleError(
            f"`dragoman {command}` needs "
            f"{what.get(wanted, 'a model that predicts labels, tags or values')}",
            found=f"{path}, a model of the task {task:.40}",
            fix=f"use `dragoman {found} -m {path}`" if found else "check its config.json",
        )


def _command_callback(command: str, runs: str = "") -> Callable[[typer.Context, Path], Path]:
    """Return a parser callback that requires a model that a command can run."""

    def callback(context: typer.Context, path: Path) -> Path:
        if not context.resilient_parsing:
            require_command(path, command or str(context.info_name), runs)
        return path

    return callback


def _check_models(context: typer.Context, paths: list[Path]) -> list[Path]:
    """Raise BundleError unless all paths are translation models."""
    for path in [] if context.resilient_parsing else paths:
        require_command(path, str(context.info_name), "translate")
    return paths


def check_run(context: typer.Context, path: Path) -> Path:
    """Raise BundleError unless the path is a directory with a model or a training run in it."""
    begun = any((path / "training" / name).exists() for name in ("config.json", "status.json"))
    return path if begun else check_model(context, path)


def check_text(context: typer.Context, path: Path | None) -> Path | None:
    """Raise DataError unless a regular file can be opened."""
    from dragoman.data.compressed_input_streams import open_input_file

    if path is not None and not context.resilient_parsing:
        open_input_file(path).close()
    return path


def check_texts(
    context: typer.Context, paths: tuple[Path, Path] | None
) -> tuple[Path, Path] | None:
    """Raise DataError unless both text files can be opened."""
    for path in paths or ():
        check_text(context, path)
    return paths


def _name_callback(
    check: Callable[[str], None],
) -> Callable[[typer.Context, str | None], str | None]:
    """Return a parser callback that validates a name."""

    def callback(context: typer.Context, name: str | None) -> str | None:
        if name and not context.resilient_parsing:
            check(name)
        return name

    return callback


def _model_option(command: str, runs: str = "", **options: Any) -> Any:
    """Return the option --model of a command."""
    return typer.Option(
        "--model",
        "-m",
        help=f"Model directory{_DEFAULT_HELP if options else ''}.",
        show_default=False,
        callback=_command_callback(command, runs),
        **options,
    )


def _model_argument(callback: Any, **options: Any) -> Any:
    """Return the argument MODEL of a command; without `options` it is required."""
    return typer.Argument(
        metavar="MODEL",
        help=f"Model directory{_DEFAULT_HELP if options else ''}.",
        show_default=False,
        callback=callback,
        **options,
    )


ModelOption = Annotated[Path, _model_option("", "translate")]  # a translation model
DefaultModelOption = Annotated[  # a translation model
    Path, _model_option("", "translate", default_factory=default_model)
]
DefaultModelsOption = Annotated[
    list[Path],
    typer.Option(
        "--model",
        "-m",
        help=f"Model directory{_DEFAULT_HELP}. Repeated: an ensemble, which decodes by the mean "
        "of the models' log-probabilities.",
        show_default=False,
        default_factory=lambda: [default_model()],
        callback=_check_models,
    ),
]
PredictorOption = Annotated[Path, _model_option("predict")]
LanguageModelOption = Annotated[Path, _model_option("generate")]
TranslatorArgument = Annotated[Path, _model_argument(_command_callback("", "translate"))]
DefaultBundleOption = Annotated[
    Path,
    typer.Option(
        "--model",
        "-m",
        help=f"Model directory{_DEFAULT_HELP}.",
        show_default=False,
        default_factory=default_model,
        callback=check_model,
    ),
]
DefaultBundleArgument = Annotated[Path, _model_argument(check_model, default_factory=default_model)]
OptionalBundleArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Model directory; without one the installation is checked.",
        show_default=False,
        callback=_check_optional_model,
    ),
]
DefaultRunArgument = Annotated[Path, _model_argument(check_run, default_factory=built_in_model)]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print no notes to stderr; warnings and errors stay.",
        is_eager=True,
        callback=_set_quiet,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device: auto, cpu, cuda, cuda:1 or mps.",
        callback=_name_callback(device_engine_and_precision_names.check_device),
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Inference engine: auto (the fastest one with the same precision and search, measured "
        "once), native, ctranslate2 or ctranslate2-int8.",
        callback=_name_callback(device_engine_and_precision_names.check_engine),
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="float32; on a CPU int8 (two to three times as fast, a few tenths of a BLEU point "
        "lower); "
        "on a GPU float16 or bfloat16. Default: float16 on GPUs that support it, else float32.",
        show_default=False,
        callback=_name_callback(device_engine_and_precision_names.check_precision),
    ),
]
ShortlistOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--shortlist",
        metavar="SRC TGT",
        help="Parallel training text, to build a lexical shortlist: on a CPU, only target tokens "
        "that co-occur with the source tokens are scored. Faster for large vocabularies; outputs "
        "may differ.",
        show_default=False,
        callback=check_texts,
    ),
]


def check_value(
    context: typer.Context, option: typer.CallbackParam, value: str | None
) -> str | None:
    """Raise ConfigError for an option with an empty value, which would be ignored."""
    if value is not None and not value.strip():
        raise ConfigError(
            [f"{option.opts[0]} must have a value; found {value!r:.40}; leave it out"]
        )
    return value


ToOption = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="LANGUAGE",
        help="Target language, such as en, of a model of several directions.",
        show_default=False,
        callback=check_value,
    ),
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="LANGUAGE",
        help="Source language of a model of several directions; detected by default.",
        show_default=False,
        callback=check_value,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
BeamOption = Annotated[
    int | None,
    typer.Option(
        "--beam",
        min=1,
        max=256,
        help="Beam size; 1 is greedy search. By default decode.beam of the model.",
    ),
]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--length-penalty",
        min=0.0,
        max=5.0,
        help="Length penalty exponent (Wu et al., 2016); 0 disables it.",
    ),
]
BranchesOption = Annotated[
    int,
    typer.Option(
        "--branches",
        min=0,
        max=8,
        help="Alternatives of each token to continue from in the file of --html or --json; each is "
        "a search of its own.",
        rich_help_panel="Files",
    ),
]
AblationsOption = Annotated[
    str,
    typer.Option(
        "--ablations",
        metavar="HEADS",
        help="Heads that can be switched off in the file of --html or --json: top8 for the eight "
        "of the largest estimated effect, or names such as x3.2,d0.1; each is a search of its own.",
        rich_help_panel="Files",
        show_default=False,
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option("--batch-size", min=1, help="Sentences per batch; does not change the outputs."),
]
LowercaseOption = Annotated[
    bool,
    typer.Option("--lowercase", help="Case-insensitive scores."),
]
TokenizeOption = Annotated[
    str,
    typer.Option(
        "--tokenize",
        help="sacreBLEU tokenizer, such as 13a, intl, zh, char; by default chosen by language or "
        "script.",
    ),
]
TargetLanguageOption = Annotated[
    str,
    typer.Option(
        "--tgt-lang",
        help="Target language, such as zh or ja-JP, for BLEU's tokenizer; by default the model's, "
        "or "
        "that of the references' script.",
    ),
]
PairsSrcOption = Annotated[
    str, typer.Option("--src", help="Source sentences.", metavar="FILE", show_default=False)
]
PairsTgtOption = Annotated[
    str, typer.Option("--tgt", help="Target sentences.", metavar="FILE", show_default=False)
]
PairsOption = Annotated[
    str,
    typer.Option(
        "--pairs",
        help="One TSV, CSV or JSONL file with both sides instead.",
        metavar="FILE",
        show_default=False,
    ),
]
SrcFieldOption = Annotated[
    str,
    typer.Option(
        "--src-field",
        help="Source column of --pairs: a name, or a number from 1.",
        show_default=False,
    ),
]
TgtFieldOption = Annotated[
    str, typer.Option("--tgt-field", help="Target column of --pairs.", show_default=False)
]
TextFieldOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text-field",
        metavar="NAME",
        help="Column with the text: a name, or a number from 1; by default its usual names. Given "
        "twice for the two sentences of a pair.",
        show_default=False,
    ),
]
SrcLangOption = Annotated[
    str,
    typer.Option(
        "--src-lang",
        help="Source language, such as de; also selects the column of --pairs.",
        show_default=False,
    ),
]
TgtLangOption = Annotated[
    str, typer.Option("--tgt-lang", help="Target language, such as en.", show_default=False)
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        min=0.01,
        help="Softmax temperature; below 1 sharpens the distribution.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        min=1,
        help="Sample from the k most probable tokens.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
SampleSeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Random seed.", rich_help_panel=SAMPLING_PANEL),
]
