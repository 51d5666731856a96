"""`dragoman export`: write a model for another program, or in int8, and compare outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.command_progress_bar import progress
from dragoman.cli.options import JsonOption, TranslatorArgument
from dragoman.cli.terminal_output import print_json, print_note, print_result
from dragoman.config import device_engine_and_precision_names
from dragoman.errors import ConfigError, DataError, suggest_name
from dragoman.storage.disk_space_and_errors import require_new_directory, require_parent_directory

TARGETS = ("dragoman", "ctranslate2", "huggingface", "onnx")


def export(
    model: TranslatorArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Target format: ctranslate2, huggingface or onnx; dragoman for a model directory "
            "without its training run, smaller with --quantization int8.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="New directory. Without it, ctranslate2 is written into the model directory, "
            "where translate finds it.",
        ),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(
            "--quantization",
            help="Weight format: float32; for dragoman also int8; for ctranslate2 also int8 or "
            "int8_float32, which translate uses only with --precision int8 or --engine "
            "ctranslate2.",
        ),
    ] = "float32",
    quantisation: Annotated[str, typer.Option("--quantisation", hidden=True)] = "",
    check: Annotated[
        Path | None,
        typer.Option(
            help="Source sentences to compare greedy outputs on; by default the golden sentences."
        ),
    ] = None,
    src: Annotated[
        Path | None,
        typer.Option(help="Source sentences of a test set, to compare outputs and BLEU."),
    ] = None,
    ref: Annotated[Path | None, typer.Option(help="Reference translations of --src.")] = None,
    tgt_lang: Annotated[
        str | None,
        typer.Option(
            metavar="LANGUAGE",
            help="Language to translate --src or --check into, for a model of several directions.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Export a model to CTranslate2, Hugging Face or ONNX, or store it in int8.

    The outputs of the export are compared with the model's.
    """
    quantization = quantisation or quantization  # the British spelling is a hidden alias
    if to not in TARGETS:
        raise ConfigError(
            [
                f"--to must be one of {', '.join(TARGETS)}; found {to!r}; "
                f"{suggest_name(to, TARGETS, listed=True)}"
            ]
        )
    if out is None and to != "ctranslate2":
        raise ConfigError(
            [f"--to {to} needs --out; found no --out; add one, such as --out {model.name}-{to}"]
        )
    if to not in ("ctranslate2", "dragoman") and quantization != "float32":
        raise ConfigError(
            [
                f"--to {to} writes float32 only; found --quantization {quantization}; "
                f"{_quantization_hint(to)}"
            ]
        )
    if out is not None:
        require_parent_directory(out)
        require_new_directory(out)
    if to == "dragoman":
        device_engine_and_precision_names.check_bundle_quantization(quantization)
    elif to == "ctranslate2":
        device_engine_and_precision_names.check_quantization(quantization)
    if (src is None) != (ref is None):
        raise ConfigError([f"--src and --ref go together; found only {src or ref}; pass both"])
    if check is not None and src is not None:
        raise ConfigError(
            [
                f"--check and --src both name sentences to compare on; found {check} and {src}; "
                "keep one"
            ]
        )

    from dragoman.evaluate.translation_metrics import read_sentences

    path = src or check
    texts = read_sentences(path) if path else []
    if path and not any(text.strip() for text in texts):
        raise DataError(
            "the file to compare outputs on must hold at least one sentence",
            found=f"none in {path}",
            fix="pass a file with text",
        )
    references = read_sentences(ref) if ref else None

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.exchange.export import EXPORTERS

    more = {"quantization": quantization} if to in ("ctranslate2", "dragoman") else {}
    more |= {} if tgt_lang is None else {"target_language": tgt_lang}
    with progress(f"exporting to {to}"):
        made = EXPORTERS[to](model, out, texts=texts, references=references, **more)
    if json:
        print_json({"path": str(made.path), "parity": made.parity.to_dict()})
        return
    print_result(str(made.path))
    print_result(str(made.parity))
    if made.parity.equal_fraction < made.min_equal_fraction:
        print_note(
            f"fewer than {100 * made.min_equal_fraction:.1f} % of the outputs are equal: compare "
            "BLEU "
            "with --src and --ref before using the export"
        )


def _quantization_hint(to: str) -> str:
    """Return how to get a quantized model."""
    others = {
        "onnx": "quantize its graphs with onnxruntime.quantization.quantize_dynamic",
        "huggingface": "load it with torch_dtype or a quantization_config of transformers",
    }
    return f"{others[to]}, or use --to ctranslate2 --quantization int8"
