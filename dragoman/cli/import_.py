"""`dragoman import`: another program's model becomes one of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import JsonOption
from dragoman.cli.output import print_json, print_note, print_result
from dragoman.errors import BundleError
from dragoman.storage.disk import require_new_directory


def import_(
    directory: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face directory of a Marian model, such as OPUS-MT, or a Pegasus one.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="A new directory for the model.", show_default=False)
    ],
    check: Annotated[
        Path | None,
        typer.Option(
            help="Sentences to compare greedy outputs on, where transformers is installed."
        ),
    ] = None,
    src_lang: Annotated[
        str, typer.Option(help="Source language, such as de, for the model's card.")
    ] = "",
    tgt_lang: Annotated[
        str, typer.Option(help="Target language, such as en, for the card and the scorer.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Turn a Hugging Face Marian or Pegasus model into one of ours, and print how far the two agree."""
    require_new_directory(out)
    from dragoman.evaluate.metrics import read_sentences

    if not directory.is_dir():
        found = f"the file {directory}" if directory.exists() else f"no directory at {directory}"
        raise BundleError(
            "a model to import must be a directory",
            found=found,
            fix="give the directory with its config.json",
        )
    texts = read_sentences(check) if check else []

    from dragoman.exchange.marian_import import (
        import_marian,
    )  # here, so that a mistake is found before torch is imported

    made = import_marian(directory, out, texts=texts, src_lang=src_lang, tgt_lang=tgt_lang)
    if json:
        print_json({"path": str(made.path), "parity": made.parity.facts() if made.parity else None})
        return
    print_result(str(made.path))
    if made.parity is None:
        print_note(
            "not compared with the original, which needs transformers: pip install 'dragoman[hf]'"
        )
    else:
        print_result(str(made.parity))
