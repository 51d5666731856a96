"""`dragoman data`: look at a corpus before training on it."""

from __future__ import annotations

from typing import Annotated

import typer

from dragoman.cli.options import JsonOption

app = typer.Typer(name="data", help="Look at a corpus before training on it.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Look at a corpus before training on it."""


@app.command()
def check(
    src: Annotated[str, typer.Option(help="Source sentences.")] = "",
    tgt: Annotated[str, typer.Option(help="Target sentences.")] = "",
    pairs: Annotated[str, typer.Option(help="One TSV, CSV or JSONL file with both sides instead.")] = "",
    test_src: Annotated[str, typer.Option(help="Source sentences of a test set, to look for leakage.")] = "",
    test_tgt: Annotated[str, typer.Option(help="Target sentences of a test set.")] = "",
    test_pairs: Annotated[str, typer.Option(help="A test set in one file.")] = "",
    json: JsonOption = False,
) -> None:
    """Find misaligned files, empty lines, duplicates, odd lengths, invalid UTF-8 and leakage between train and test."""
