"""`dragoman translate`: raw text in, raw text out, line by line, in order."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.options import (
    BatchSizeOption,
    BeamOption,
    DeviceOption,
    EngineOption,
    JsonOption,
    LengthPenaltyOption,
    PrecisionOption,
    ShortlistOption,
)
from dragoman.cli.reading import open_lines, read_lines
from dragoman.cli.show import as_json, count, note, result
from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.translator import Translation

NOTES_SHOWN = 3
_SAMPLING = "Sampling"


def translate(
    model: Annotated[Path, typer.Option("--model", "-m", help="The model's directory.", show_default=False)],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to translate; standard input when there are none.")] = None,
    beam: BeamOption = None,
    nbest: Annotated[int, typer.Option(min=1, max=256, help="Translations of each line: `line TAB score TAB text`, best first.")] = 1,
    length_penalty: LengthPenaltyOption = None,
    batch_size: BatchSizeOption = None,
    prefix: Annotated[str, typer.Option(help="Text that every translation must begin with.")] = "",
    json: JsonOption = False,
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = None,
    shortlist: ShortlistOption = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw translations by chance.", rich_help_panel=_SAMPLING)] = False,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="Below 1 is safer.", rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k best pieces only.", rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from the best pieces that make up this share.", rich_help_panel=_SAMPLING)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Where chance starts; the same seed draws the same.", rich_help_panel=_SAMPLING)] = None,
) -> None:
    """Translate texts, or standard input, one line each; order and empty lines are kept.

    With --json each line is an object: text, score, pieces, log_probs (one a piece, and one for the end), and
    alignment (a row for each target piece, a column for each source piece; null for a model without cross-attention).
    """
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and not sample:
        name = next(iter(given))
        raise ConfigError([f"--{name.replace('_', '-')} belongs to --sample; found it alone; add --sample"])
    if sample and beam is not None:
        raise ConfigError([f"--sample draws and --beam searches; found both, with --beam {beam}; keep one"])
    options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "batch_size": batch_size, "nbest": nbest}
    options |= {"prefix": prefix or None, "alignment": json, "scored": json or nbest > 1, "sample": sample, **given}

    from dragoman.translator import Translator  # here, so that --help stays quick

    translator = Translator.load(model, device=device, engine=engine, precision=precision, measure=True, shortlist=shortlist)
    lines: Iterable[str] = texts or ()
    if not texts and sys.stdin.isatty():
        note("type or paste text, a line at a time; end with Ctrl-D")
        options["window"] = 1  # whoever types wants an answer to each line
        lines = read_lines(sys.stdin.buffer)
    elif not texts:
        lines = open_lines(sys.stdin.buffer)
    show(translator.stream(lines, **{name: value for name, value in options.items() if value is not None}), nbest=nbest, json=json)


def show(translations: Iterable[Translation], *, nbest: int, json: bool) -> None:
    """Write translations as they come, and say what was out of the ordinary: the first few at once, all of it counted at the end."""
    noted = 0
    for number, each in enumerate(translations, start=1):
        if json:
            as_json({"line": number, **plain(each)})
        elif nbest > 1:
            for one in each.alternatives or (each,):
                result(f"{number}\t{one.score:.4f}\t{one.text}")
        else:
            result(each.text)
        noted += bool(each.notes)
        if each.notes and noted <= NOTES_SHOWN:
            note(f"line {number}: {'; '.join(each.notes)}")
    if noted > NOTES_SHOWN:
        note(f"{count(noted, 'line')} had such notes in all; --json writes them with each line")


def plain(translation: Translation) -> dict[str, Any]:
    """Turn a translation into plain values; numbers are rounded to what means something."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(translation):
        value = getattr(translation, field.name)
        if field.name == "alternatives":
            values[field.name] = [plain(each) for each in value or ()]
        else:
            values[field.name] = _rounded(value)
    return values


def _rounded(value: Any) -> Any:
    """Round the numbers in nested lists, tensors and arrays to six decimals."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value
