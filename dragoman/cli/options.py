"""Options that several commands share, so that each has one name, one sentence and one meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def recipe_names(incomplete: str) -> list[str]:
    """Complete a recipe's name in the shell."""
    from dragoman.registry import catalogue

    return [name for name in catalogue("recipe") if name.startswith(incomplete)]


def setting_paths(incomplete: str) -> list[str]:
    """Complete a setting's path in the shell, up to the sign of equality."""
    from dragoman.cli.settings import every_setting

    return [f"{row.path}=" for row in every_setting() if row.path.startswith(incomplete)]


BundleArgument = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's directory.", show_default=False)]
ModelOption = Annotated[Path, typer.Option("--model", "-m", help="The model's directory.", show_default=False)]
DeviceOption = Annotated[str, typer.Option("--device", help="Where to run: auto, cpu, cuda, cuda:1 or mps.")]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="What runs the model: auto (never changes precision or search; else the quickest, measured once), native, "
        "or an exported engine: ctranslate2, ctranslate2-int8.",
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="float32; on a CPU int8, two to three times as fast at a few tenths of a BLEU point less; on a GPU float16 or bfloat16. "
        "By default float16 on a GPU that multiplies it, else float32.",
        show_default=False,
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
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]
BeamOption = Annotated[int | None, typer.Option("--beam", min=1, max=256, help="Hypotheses kept; 1 is greedy. By default the model's own.")]
LengthPenaltyOption = Annotated[
    float | None, typer.Option("--length-penalty", min=0.0, max=5.0, help="Exponent of the length penalty of Wu et al. (2016); 0 for none.")
]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Sentences translated together; never changes the result.")
]
LowercaseOption = Annotated[bool, typer.Option("--lowercase", help="Score without regard to case, as some published tables do.")]
TokenizeOption = Annotated[
    str,
    typer.Option("--tokenize", help="sacreBLEU's tokenizer, such as 13a, intl, zh, char; by default by language or script."),
]
TargetLanguageOption = Annotated[
    str,
    typer.Option(
        "--tgt-lang", help="Target language, such as zh or ja-JP, for the tokenizer. By default the model's, or by the references' script."
    ),
]
PairsSrcOption = Annotated[str, typer.Option("--src", help="Source sentences.", show_default=False)]
PairsTgtOption = Annotated[str, typer.Option("--tgt", help="Target sentences.", show_default=False)]
PairsOption = Annotated[str, typer.Option("--pairs", help="One TSV, CSV or JSONL file with both sides instead.", show_default=False)]
SrcFieldOption = Annotated[
    str, typer.Option("--src-field", help="Column of --pairs with the source: a name, or a number from 1.", show_default=False)
]
TgtFieldOption = Annotated[str, typer.Option("--tgt-field", help="Column of --pairs with the target.", show_default=False)]
SrcLangOption = Annotated[
    str, typer.Option("--src-lang", help="Source language, such as de; also finds its column in --pairs.", show_default=False)
]
TgtLangOption = Annotated[str, typer.Option("--tgt-lang", help="Target language, such as en.", show_default=False)]
