"""Options that several commands share, so that each has one name, one sentence and one meaning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from dragoman.config import engine_options


def complete_recipe_names(incomplete: str) -> list[str]:
    """Complete a recipe's name in the shell."""
    from dragoman.registry import catalogue

    return [name for name in catalogue("recipe") if name.startswith(incomplete)]


def complete_setting_paths(incomplete: str) -> list[str]:
    """Complete a setting's path in the shell, up to the sign of equality."""
    from dragoman.cli.settings import list_all_settings

    return [f"{row.path}=" for row in list_all_settings() if row.path.startswith(incomplete)]


# Each check runs while the arguments are parsed, before a command imports torch: a mistake is answered at once.


def check_model(context: typer.Context, path: Path) -> Path:
    """Raise BundleError unless the path is a finished model directory; its files are verified later."""
    from dragoman.bundle.format import require_bundle

    if not context.resilient_parsing:
        require_bundle(path)
    return path


def check_run(context: typer.Context, path: Path) -> Path:
    """Raise BundleError unless the path is a directory with a model or a training run in it."""
    begun = any((path / "training" / name).exists() for name in ("config.json", "status.json"))
    return path if begun else check_model(context, path)


def check_text(context: typer.Context, path: Path | None) -> Path | None:
    """Raise DataError unless a regular file can be opened."""
    from dragoman.data.text_stream import open_input_file

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
    """Make a parser's callback of a check of a name."""

    def callback(context: typer.Context, name: str | None) -> str | None:
        if name and not context.resilient_parsing:
            check(name)
        return name

    return callback


ModelOption = Annotated[
    Path,
    typer.Option(
        "--model", "-m", help="The model's directory.", show_default=False, callback=check_model
    ),
]
BundleArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="The model's directory.", show_default=False, callback=check_model
    ),
]
RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="The model's directory.", show_default=False, callback=check_run
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Where to run: auto, cpu, cuda, cuda:1 or mps.",
        callback=_name_callback(engine_options.check_device),
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="What runs the model: auto (never changes precision or search; else the quickest, measured once), native, "
        "or an exported engine: ctranslate2, ctranslate2-int8.",
        callback=_name_callback(engine_options.check_engine),
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="float32; on a CPU int8, two to three times as fast at a few tenths of a BLEU point less; on a GPU float16 or bfloat16. "
        "By default float16 on a GPU that multiplies it, else float32.",
        show_default=False,
        callback=_name_callback(engine_options.check_precision),
    ),
]
ShortlistOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--shortlist",
        metavar="SRC TGT",
        help="Training text and its translation: on a CPU, score only pieces that go with a sentence's own. Quicker where there are tens "
        "of thousands, and not always the same.",
        show_default=False,
        callback=check_texts,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]
BeamOption = Annotated[
    int | None,
    typer.Option(
        "--beam", min=1, max=256, help="Hypotheses kept; 1 is greedy. By default the model's own."
    ),
]
LengthPenaltyOption = Annotated[
    float | None,
    typer.Option(
        "--length-penalty",
        min=0.0,
        max=5.0,
        help="Exponent of the length penalty of Wu et al. (2016); 0 for none.",
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size", min=1, help="Sentences translated together; never changes the result."
    ),
]
LowercaseOption = Annotated[
    bool,
    typer.Option("--lowercase", help="Score without regard to case, as some published tables do."),
]
TokenizeOption = Annotated[
    str,
    typer.Option(
        "--tokenize",
        help="sacreBLEU's tokenizer, such as 13a, intl, zh, char; by default by language or script.",
    ),
]
TargetLanguageOption = Annotated[
    str,
    typer.Option(
        "--tgt-lang",
        help="Target language, such as zh or ja-JP, for the tokenizer. By default the model's, or by the references' script.",
    ),
]
PairsSrcOption = Annotated[str, typer.Option("--src", help="Source sentences.", show_default=False)]
PairsTgtOption = Annotated[str, typer.Option("--tgt", help="Target sentences.", show_default=False)]
PairsOption = Annotated[
    str,
    typer.Option(
        "--pairs", help="One TSV, CSV or JSONL file with both sides instead.", show_default=False
    ),
]
SrcFieldOption = Annotated[
    str,
    typer.Option(
        "--src-field",
        help="Column of --pairs with the source: a name, or a number from 1.",
        show_default=False,
    ),
]
TgtFieldOption = Annotated[
    str, typer.Option("--tgt-field", help="Column of --pairs with the target.", show_default=False)
]
SrcLangOption = Annotated[
    str,
    typer.Option(
        "--src-lang",
        help="Source language, such as de; also finds its column in --pairs.",
        show_default=False,
    ),
]
TgtLangOption = Annotated[
    str, typer.Option("--tgt-lang", help="Target language, such as en.", show_default=False)
]
