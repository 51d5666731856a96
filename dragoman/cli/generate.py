"""`dragoman generate`: continue a text with a language model."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from typing import Annotated, Any, BinaryIO

import typer

from dragoman.cli.constrained_decoding_options import (
    ConstraintOption,
    ForbidOption,
    RegexOption,
    RequireOption,
    parse_constraint_options,
)
from dragoman.cli.input_lines import decode_lines, drop_partial_char
from dragoman.cli.options import SAMPLING_PANEL, DeviceOption, JsonOption, LanguageModelOption
from dragoman.cli.terminal_output import print_json, print_text
from dragoman.errors import ConfigError

MAX_TOKENS = 1_000_000
_MAX_PROMPT_BYTES = 8 << 20  # more than a language model accepts, which reports it
SEPARATOR = "\n\n"  # between several continuations
_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\t\n"
}


def generate(
    model: LanguageModelOption,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Text to continue; - reads standard input.")
    ] = "",
    max_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            help="Number of tokens to generate; with constraints, the maximum.",
        ),
    ] = 100,
    n: Annotated[int, typer.Option("--n", min=1, max=1024, help="Number of continuations.")] = 1,
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1000.0,
            help="Softmax temperature; below 1 sharpens, 0 takes the most probable token.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sample from the k most probable tokens; 0 for all.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Nucleus sampling: the most probable tokens up to this total probability.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed.", rich_help_panel=SAMPLING_PANEL)
    ] = 1,
    constraint: ConstraintOption = None,
    require: RequireOption = None,
    forbid: ForbidOption = None,
    regex: RegexOption = None,
    json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Continue a text with a language model; the text appears as it is written.

    With constraints the continuation is one line that ends within --max-tokens.
    """
    if not top_p > 0:
        raise ConfigError([f"--top-p must be more than 0 and at most 1; found {top_p}; try 0.95"])

    constraints = parse_constraint_options(constraint, require, forbid, regex)
    text = _read_prompt(sys.stdin.buffer) if prompt == "-" else prompt

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.inference.predictors.language_model import LanguageModel

    language_model = LanguageModel.load(model, device=device)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "constraints": constraints,
    }
    if json:
        for continuation in language_model.complete(text, n=n, **options):
            print_json(continuation.to_dict())
    elif n > 1:
        found = language_model.complete(text, n=n, **options)
        print_text(SEPARATOR.join(_printable(text + each.text) for each in found))
    else:
        _print_stream(text, language_model.generate(text, **options))


def _read_prompt(stream: BinaryIO) -> str:
    """Return a stream as one text; raise DataError for what is not UTF-8 text.

    Of a text that is too long only the beginning is read: the language model raises an error.
    """
    data = stream.read(_MAX_PROMPT_BYTES)
    if len(data) == _MAX_PROMPT_BYTES:
        data = drop_partial_char(data)
    lines = "\n".join(decode_lines(io.BytesIO(data)))
    return f"{lines}\n" if data.endswith(b"\n") else lines


def _print_stream(prompt: str, chunks: Iterable[str]) -> None:
    """Print the prompt, then each chunk as it comes; Ctrl-C ends the line."""
    try:
        sys.stdout.write(_printable(prompt))
        for chunk in chunks:
            sys.stdout.write(_printable(chunk))
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _printable(text: str) -> str:
    """Replace control characters but line breaks and tabs: a model may write any byte."""
    return text.translate(_CONTROLS)
