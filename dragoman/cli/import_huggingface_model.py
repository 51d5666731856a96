"""`dragoman import`: convert a Hugging Face Marian or Pegasus model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import JsonOption
from dragoman.cli.terminal_output import print_json, print_note, print_result
from dragoman.errors import BundleError
from dragoman.storage.disk_space_and_errors import require_new_directory


def import_(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Hugging Face model directory, Marian (such as OPUS-MT) or Pegasus.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="New model directory to write.", show_default=False)
    ],
    check: Annotated[
        Path | None,
        typer.Option(help="Source sentences to compare greedy outputs on; needs transformers."),
    ] = None,
    src_lang: Annotated[
        str, typer.Option(help="Source language, such as de, for the model card.")
    ] = "",
    tgt_lang: Annotated[
        str, typer.Option(help="Target language, such as en, for the model card and BLEU.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Import a Hugging Face Marian or Pegasus model.

    The outputs are compared with those of the original.
    """
    require_new_directory(out)
    from dragoman.evaluate.translation_metrics import read_sentences

    if not directory.is_dir():
        found = f"the file {directory}" if directory.exists() else f"no directory at {directory}"
        raise BundleError(
            "the model to import must be a directory",
            found=found,
            fix="pass the directory with its config.json",
        )
    texts = read_sentences(check) if check else []

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.exchange.huggingface_import import import_marian

    made = import_marian(directory, out, texts=texts, src_lang=src_lang, tgt_lang=tgt_lang)
    if json:
        parity = made.parity.to_dict() if made.parity else None
        print_json({"path": str(made.path), "parity": parity})
        return
    print_result(str(made.path))
    if made.parity is None:
        print_note(
            "not compared with the original, which needs transformers: pip install 'dragoman[hf]'"
        )
    else:
        print_result(str(made.parity))
