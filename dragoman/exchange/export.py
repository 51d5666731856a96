"""Export a bundle atomically, and compare it with the native engine before it is published."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.bundle import Bundle, write_bundle
from dragoman.bundle.format import require_bundle
from dragoman.bundle.translation_bundle_loader import build_loaded_model
from dragoman.config.device_engine_and_precision_names import (
    check_bundle_quantization,
    check_quantization,
)
from dragoman.config.translation_directions import parse_directions
from dragoman.errors import ConfigError, CorruptError
from dragoman.evaluate.translation_metrics import check_aligned
from dragoman.exchange.ctranslate2_export import position_table_rows, save_ctranslate2
from dragoman.exchange.export_parity import Parity, compare_engine, compare_texts
from dragoman.exchange.export_readme import write_readme
from dragoman.exchange.huggingface_export import save_hugging_face
from dragoman.exchange.huggingface_runner import TransformersRunner
from dragoman.exchange.onnx_export import raising_export_errors, save_onnx
from dragoman.inference import NativeEngine
from dragoman.inference.exported_engine_files import (
    ENGINES_DIRECTORY,
    MANIFEST_KIND,
    model_digest,
    publish_engine,
    require_replaceable,
)
from dragoman.runtime.optional_package_checks import require_packages
from dragoman.storage.disk_space_and_errors import require_disk_space, require_new_directory
from dragoman.storage.int8_quantization import dequantize_tensors, quantize_tensors

MIN_EQUAL_FLOAT32, MIN_EQUAL_QUANTIZED = (
    0.995,
    0.8,
)  # fraction of equal outputs below which a warning is shown
MIN_EQUAL_FRACTION = 0.9  # fraction of equal outputs below which the export fails
_INT8_SECTION = """## Storage

The weights are stored in int8, with a float32 scale for each row of a matrix. Scores and the
calibration of the confidence above are those of the model before this.
"""
LOG_PROB_TOLERANCE = 1e-3  # of log-probabilities: rounding of float32 in two programs


class ExportResult(NamedTuple):
    """The result of an export, and its parity with the native engine."""

    path: Path
    parity: Parity
    min_equal_fraction: float = MIN_EQUAL_FLOAT32  # expected fraction of equal outputs


def export_ctranslate2(
    model: str | Path,
    out: str | Path | None = None,
    *,
    quantization: str = "float32",
    texts: Sequence[str] = (),
    references: Sequence[str] | None = None,
    target_language: str | None = None,
) -> ExportResult:
    """Export a model to CTranslate2: into its own directory, or to a new directory `out`.

    An int8 export is used only if the precision int8 or that engine is requested.
    """
    require_packages("ctranslate2")
    from ctranslate2 import __version__ as release

    from dragoman.inference.ctranslate2_engine import CTranslate2Engine

    check_quantization(quantization)
    name = f"ctranslate2-{quantization}"
    final = Path(model) / ENGINES_DIRECTORY / name if out is None else new_directory_path(out)
    if out is None:
        require_bundle(Path(model))
        require_replaceable(final)
    bundle = Bundle.load(model)
    target = check_sentences(bundle, texts, references, target_language)
    require_space(bundle, final)
    facts: dict[str, Any] = {
        "kind": MANIFEST_KIND,
        "engine": "ctranslate2",
        "quantisation": quantization,
        "made_with": f"ctranslate2 {release}",
    }
    facts |= {"model_sha256": model_digest(bundle), "longest": exported_positions(bundle)}
    with publish_engine(final, facts, replace=out is None) as folder:
        save_ctranslate2(
            bundle.model, bundle.tokenizers, bundle.config, folder, quantization=quantization
        )
        engine = CTranslate2Engine(
            folder,
            bundle.tokenizers,
            name=name,
            longest=facts["longest"],
            workers=torch.get_num_threads(),
        )
        facts["golden_error"] = require_close_log_probs(
            bundle.golden_error(engine.log_probs), exact=quantization == "float32"
        )
        parity = compare_engine(bundle, engine, texts or golden_texts(bundle), references, target)
        if quantization == "float32":
            require_parity(parity)
        facts["parity"] = parity.to_dict()
        if out is not None:
            copy_tokenizers(bundle, folder)
            write_readme(bundle, folder, "ctranslate2", precision=quantization)
    return ExportResult(
        final,
        parity,
        min_equal_fraction=MIN_EQUAL_FLOAT32 if quantization == "float32" else MIN_EQUAL_QUANTIZED,
    )


def golden_texts(bundle: Bundle) -> list[str]:
    """Return the golden sentences of a bundle: few, but always there."""
    return [case["input"] for case in bundle.golden["cases"]]


def exported_positions(bundle: Bundle) -> int:
    """Return the number of exported positions; schemes without a table get the same limit."""
    model = bundle.config.model
    return (
        model.max_positions if model.positions == "learned" else position_table_rows(bundle.config)
    )


def require_close_log_probs(error: float, *, exact: bool) -> float:
    """Raise if log-probabilities differ by more than rounding."""
    most = LOG_PROB_TOLERANCE if exact else 1e3 * LOG_PROB_TOLERANCE
    if not error <= most:
        raise CorruptError(
            f"an export must reproduce the golden log-probabilities within {most:g}",
            found=f"{error:.4f} off",
            fix="nothing was kept; use the native engine, and please report the model's settings",
        )
    return error


def require_parity(parity: Parity) -> None:
    """Raise if outputs or log-probabilities of an exact export differ."""
    require_close_log_probs(parity.difference, exact=True)
    if parity.equal_fraction < MIN_EQUAL_FRACTION:
        raise CorruptError(
            "an export must produce the same output as the model "
            f"for at least {100 * MIN_EQUAL_FRACTION:.0f} % of the sentences",
            found=f"{parity.equal} of {parity.sentences} equal",
            fix="nothing was kept; use the native engine, and please report the model's settings",
        )


def new_directory_path(out: str | Path) -> Path:
    """Return the path of a new directory; raise if it exists or cannot be created."""
    require_new_directory(Path(out))
    return Path(out)


def require_space(bundle: Bundle, final: Path) -> None:
    """Raise DiskFullError if an export would not fit on the disk."""
    existing = next(each for each in final.absolute().parents if each.exists())
    require_disk_space(existing, 6 * bundle.parameters, "an export")


def copy_tokenizers(bundle: Bundle, folder: Path) -> None:
    """Copy the SentencePiece models into an export outside the bundle."""
    for tokenizer, name in (
        (bundle.tokenizers.src, "source.spm"),
        (bundle.tokenizers.tgt, "target.spm"),
    ):
        (folder / name).write_bytes(tokenizer.model)


def export_hugging_face(
    model: str | Path,
    out: str | Path,
    *,
    texts: Sequence[str] = (),
    references: Sequence[str] | None = None,
    target_language: str | None = None,
) -> ExportResult:
    """Export to a directory for `transformers`: Marian for post-norm, Pegasus for pre-norm."""
    require_packages("transformers")
    from transformers import __version__ as release

    final, bundle = new_directory_path(out), Bundle.load(model)
    target = check_sentences(bundle, texts, references, target_language)
    require_space(bundle, final)
    facts: dict[str, Any] = {
        "kind": "dragoman export",
        "program": "huggingface",
        "made_with": f"transformers {release}",
    }
    with publish_engine(final, facts) as folder:
        save_hugging_face(bundle.model, bundle.tokenizers, bundle.config, folder)
        translate = TransformersRunner(folder).translate
        parity = compare_texts(
            bundle, "huggingface", translate, texts or golden_texts(bundle), references, target
        )
        require_parity(parity)
        write_readme(bundle, folder, "huggingface")
        facts |= {"model_sha256": model_digest(bundle), "parity": parity.to_dict()}
    return ExportResult(final, parity)


def export_onnx(
    model: str | Path,
    out: str | Path,
    *,
    texts: Sequence[str] = (),
    references: Sequence[str] | None = None,
    target_language: str | None = None,
) -> ExportResult:
    """Export to a new directory as two ONNX graphs, encoder and decoder step, with tokenizers."""
    require_packages("onnx", "onnxscript", "onnxruntime")
    from dragoman.exchange.onnx_runner import OnnxRuntimeEngine

    final, bundle = new_directory_path(out), Bundle.load(model)
    target = check_sentences(bundle, texts, references, target_language)
    require_space(bundle, final)
    facts: dict[str, Any] = {
        "kind": "dragoman export",
        "program": "onnx",
        "made_with": f"torch {torch.__version__}",
    }
    with publish_engine(final, facts) as folder:
        save_onnx(bundle.model, bundle.config, folder)
        with raising_export_errors(bundle.config):
            parity = compare_engine(
                bundle, OnnxRuntimeEngine(folder), texts or golden_texts(bundle), references, target
            )
        require_parity(parity)
        copy_tokenizers(bundle, folder)
        for name, tokenizer in (
            ("source", bundle.tokenizers.src),
            ("target", bundle.tokenizers.tgt),
        ):
            tokens = json.dumps(
                tokenizer.tokens(range(len(tokenizer))), ensure_ascii=False, indent=0
            )
            (folder / f"{name}_vocabulary.json").write_text(tokens, encoding="utf-8")
        write_readme(bundle, folder, "onnx")
        facts |= {"model_sha256": model_digest(bundle), "parity": parity.to_dict()}
    return ExportResult(final, parity)


def export_bundle(
    model: str | Path,
    out: str | Path,
    *,
    quantization: str = "float32",
    texts: Sequence[str] = (),
    references: Sequence[str] | None = None,
    target_language: str | None = None,
) -> ExportResult:
    """Write a model to a new directory without its training run and engines.

    In int8 it takes a quarter of the space; its weights are float32 again once it is loaded.
    """
    check_bundle_quantization(quantization)
    final, bundle = new_directory_path(out), Bundle.load(model)
    target = check_sentences(bundle, texts, references, target_language)
    require_space(bundle, final)
    weights, card = dict(bundle.model.state_dict()), bundle.card
    if quantization == "int8":
        weights = dequantize_tensors(quantize_tensors(weights), weights)
        card = f"{card.rstrip()}\n\n{_INT8_SECTION}"
    written = build_loaded_model(bundle.config, bundle.tokenizers, weights)
    parity = compare_engine(
        bundle, NativeEngine(lambda: written), texts or golden_texts(bundle), references, target
    )
    parity = dataclasses.replace(parity, program=quantization)
    if quantization == "float32":
        require_parity(parity)
    write_bundle(
        final,
        config=bundle.config,
        tokenizers=bundle.tokenizers,
        weights=weights,
        card=card,
        golden=bundle.golden_inputs(),
        identifier=bundle.identifier,
        manifest_fields=bundle.manifest_fields(),
        calibration=bundle.calibration,
        quantization=quantization,
    )
    return ExportResult(
        final,
        parity,
        min_equal_fraction=MIN_EQUAL_FLOAT32 if quantization == "float32" else MIN_EQUAL_QUANTIZED,
    )


def check_sentences(
    bundle: Bundle,
    texts: Sequence[str],
    references: Sequence[str] | None,
    target_language: str | None,
) -> str | None:
    """Return the language to compare translations into; None for a model of one direction.

    Raise, before any work, unless there is one reference per sentence and their language is known.
    """
    directions = parse_directions(bundle.config.data.directions)
    targets = list(dict.fromkeys(each.target for each in directions))
    choices = " or ".join(targets)
    if target_language and target_language not in targets:
        raise ConfigError(
            [
                "--tgt-lang must be a target language of a model of several directions; found "
                f"{target_language!r:.40}; {f'choose {choices}' if targets else 'leave it out'}"
            ]
        )
    if references is not None:
        check_aligned(texts, references)
        if not target_language and len(targets) > 1:
            raise ConfigError(
                [
                    "references of a model of several target languages need --tgt-lang; found "
                    f"none; choose {choices}"
                ]
            )
    return target_language or bundle.default_target


EXPORTERS: dict[str, Callable[..., ExportResult]] = {
    "dragoman": export_bundle,
    "ctranslate2": export_ctranslate2,
    "huggingface": export_hugging_face,
    "onnx": export_onnx,
}
