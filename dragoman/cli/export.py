"""`dragoman export`: a model for other programs, compared with ours before it is handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import BundleArgument, JsonOption
from dragoman.cli.output import print_json, print_note, print_result
from dragoman.cli.progress import progress
from dragoman.config import engine_options
from dragoman.errors import ConfigError, DataError, suggest_name
from dragoman.storage.disk import require_new_directory

TARGETS = ("ctranslate2", "huggingface", "onnx")


def export(
    model: BundleArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to", help="The program: ctranslate2, huggingface or onnx.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="A new directory. Without it, ctranslate2 goes into the model, where translate finds it.",
        ),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(
            "--quantisation",
            "--quantization",
            help="float32, which changes no output; for ctranslate2 also int8 or int8_float32, smaller and inexact, "
            "which translate uses only with --precision int8 or --engine ctranslate2.",
        ),
    ] = "float32",
    check: Annotated[
        Path | None,
        typer.Option(
            help="Sentences to compare greedy outputs on; by default the model's own few."
        ),
    ] = None,
    src: Annotated[
        Path | None,
        typer.Option(help="Source sentences of a test set, to compare outputs and BLEU on."),
    ] = None,
    ref: Annotated[Path | None, typer.Option(help="Reference translations of --src.")] = None,
    json: JsonOption = False,
) -> None:
    """Export a model to CTranslate2, Hugging Face or ONNX, and say how far the export agrees with the model."""
    if to not in TARGETS:
        raise ConfigError(
            [f"--to must be one of {', '.join(TARGETS)}; found {to!r}; {suggest_name(to, TARGETS)}"]
        )
    if out is None and to != "ctranslate2":
        raise ConfigError(
            [
                f"--to {to} writes a directory of its own; found no --out; add one, such as --out {model.name}-{to}"
            ]
        )
    if to != "ctranslate2" and quantization != "float32":
        raise ConfigError(
            [
                f"--to {to} writes float32 alone; found --quantisation {quantization}; {_quantization_hint(to)}"
            ]
        )
    if out is not None:
        require_new_directory(out)
    if to == "ctranslate2":
        engine_options.check_quantization(quantization)
    if (src is None) != (ref is None):
        raise ConfigError([f"--src and --ref go together; found only {src or ref}; give both"])
    if check is not None and src is not None:
        raise ConfigError(
            [
                f"--check and --src both give sentences to compare on; found {check} and {src}; keep one"
            ]
        )

    from dragoman.evaluate.metrics import read_sentences

    place = src or check
    texts = read_sentences(place) if place else []
    if place and not any(text.strip() for text in texts):
        raise DataError(
            "the sentences to compare on must be some",
            found=f"none in {place}",
            fix="give a file with text",
        )
    references = read_sentences(ref) if ref else None

    from dragoman.exchange.export import (
        EXPORTERS,
    )  # here, so that a mistake is found before torch is imported

    more = {"quantization": quantization} if to == "ctranslate2" else {}
    with progress(f"exporting to {to}"):
        made = EXPORTERS[to](model, out, texts=texts, references=references, **more)
    if json:
        print_json({"path": str(made.path), "parity": made.parity.facts()})
        return
    print_result(str(made.path))
    print_result(str(made.parity))
    if made.parity.equal_fraction < made.min_equal_fraction:
        print_note(
            f"fewer than {100 * made.min_equal_fraction:.1f} % of the outputs are equal: compare BLEU with --src and --ref before you rely on it"
        )


def _quantization_hint(to: str) -> str:
    """Suggest how to get a quantised model."""
    others = {
        "onnx": "quantise its graphs by onnxruntime.quantization.quantize_dynamic",
        "huggingface": "load it with torch_dtype or a quantization_config of transformers",
    }
    return f"{others[to]}, or use --to ctranslate2 --quantisation int8"
