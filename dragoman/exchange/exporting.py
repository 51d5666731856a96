"""Exporting a bundle: whole or not at all, and compared with the native engine before anybody relies on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.bundle import Bundle
from dragoman.bundle.format import require_bundle
from dragoman.config.names import check_quantisation
from dragoman.engines.choosing import golden_error
from dragoman.engines.folder import FOLDER, KIND, model_digest, publish_folder, require_replaceable
from dragoman.engines.installed import require
from dragoman.errors import CorruptError
from dragoman.evaluate.scoring import check_aligned
from dragoman.exchange.ctranslate2 import save_ctranslate2, table_rows
from dragoman.exchange.huggingface import save_hugging_face
from dragoman.exchange.onnx import refusing, save_onnx
from dragoman.exchange.parity import Parity, compare, compare_texts
from dragoman.exchange.readme import write_readme
from dragoman.exchange.transformers_side import Transformers
from dragoman.files.disk import require_new, require_room

EXACT, QUANTISED = 0.995, 0.8  # shares of equal outputs below which something may be wrong
LEAST = 0.9  # the share of equal outputs below which it is another model
CLOSE = 1e-3  # of log-probability: what float32 may differ by between two programs that mean the same


class Exported(NamedTuple):
    """What was made, and how it compares."""

    path: Path
    parity: Parity
    enough: float = EXACT  # the share of equal outputs that may be expected of it


def export_ctranslate2(
    model: str | Path,
    out: str | Path | None = None,
    *,
    quantisation: str = "float32",
    texts: Sequence[str] = (),
    references: Sequence[str] | None = None,
) -> Exported:
    """Export a model to CTranslate2: into its own directory, where translating finds it, or to a new directory `out`.

    Quantised to int8, translating uses it only where the precision int8 or that engine is asked for.
    """
    require("ctranslate2")
    from ctranslate2 import __version__ as release

    from dragoman.engines.ctranslate2 import CTranslate2

    check_quantisation(quantisation)
    name = f"ctranslate2-{quantisation}"
    final = Path(model) / FOLDER / name if out is None else new_directory(out)
    if out is None:
        require_bundle(Path(model))
        require_replaceable(final)
    bundle = Bundle.load(model)
    require_aligned(texts, references)
    require_room(bundle.path, 6 * bundle.parameters, "an export")
    facts: dict[str, Any] = {"kind": KIND, "engine": "ctranslate2", "quantisation": quantisation, "made_with": f"ctranslate2 {release}"}
    facts |= {"model_sha256": model_digest(bundle), "longest": longest(bundle)}
    with publish_folder(final, facts, replace=out is None) as folder:
        save_ctranslate2(bundle.model, bundle.tokenizers, bundle.config, folder, quantisation=quantisation)
        engine = CTranslate2(folder, bundle.tokenizers, name=name, longest=facts["longest"], workers=torch.get_num_threads())
        facts["golden_error"] = require_close(golden_error(engine.log_probs, bundle), exact=quantisation == "float32")
        parity = compare(bundle, engine, texts or golden_texts(bundle), references)
        if quantisation == "float32":
            require_same(parity)
        facts["parity"] = parity.facts()
        if out is not None:
            copy_tokenizers(bundle, folder)
            write_readme(bundle, folder, "ctranslate2", precision=quantisation)
    return Exported(final, parity, enough=EXACT if quantisation == "float32" else QUANTISED)


def golden_texts(bundle: Bundle) -> list[str]:
    """Give the sentences that a bundle carries: few, but always there."""
    return [case["input"] for case in bundle.golden["cases"]]


def longest(bundle: Bundle) -> int:
    """Count the positions that an exported table has room for; schemes without a table are held to as many."""
    model = bundle.config.model
    return model.max_positions if model.positions == "learned" else table_rows(bundle.config)


def require_close(error: float, *, exact: bool) -> float:
    """Refuse an export that computes something else: not a rounding, but a misunderstanding."""
    most = CLOSE if exact else 1e3 * CLOSE
    if not error <= most:
        raise CorruptError(
            f"an export must give the log-probabilities of the golden sentences within {most:g}",
            found=f"{error:.4f} off",
            fix="nothing was kept; use the native engine, and please report the model's settings",
        )
    return error


def require_same(parity: Parity) -> None:
    """Refuse an exact export whose outputs, or what it thinks of them, are others."""
    require_close(parity.difference, exact=True)
    if parity.share < LEAST:
        raise CorruptError(
            f"an export must write what the model writes, in {100 * LEAST:.0f} % of the sentences at least",
            found=f"{parity.equal} of {parity.sentences} equal",
            fix="nothing was kept; use the native engine, and please report the model's settings",
        )


def new_directory(out: str | Path) -> Path:
    """Return a path at which nothing is and that can be made; raise an error otherwise, before any work."""
    require_new(Path(out))
    return Path(out)


def copy_tokenizers(bundle: Bundle, folder: Path) -> None:
    """Put the SentencePiece models beside an export that leaves home, under the names that other programs use."""
    for tokenizer, name in ((bundle.tokenizers.src, "source.spm"), (bundle.tokenizers.tgt, "target.spm")):
        (folder / name).write_bytes(tokenizer.model)


def export_hugging_face(
    model: str | Path, out: str | Path, *, texts: Sequence[str] = (), references: Sequence[str] | None = None
) -> Exported:
    """Export a model to a new directory that `transformers` loads: Marian's for a post-norm Transformer, Pegasus's for pre-norm."""
    require("transformers")
    from transformers import __version__ as release

    final, bundle = new_directory(out), Bundle.load(model)
    require_aligned(texts, references)
    facts: dict[str, Any] = {"kind": "dragoman export", "program": "huggingface", "made_with": f"transformers {release}"}
    with publish_folder(final, facts) as folder:
        save_hugging_face(bundle.model, bundle.tokenizers, bundle.config, folder)
        translate = Transformers(folder).translate
        parity = compare_texts(bundle, "huggingface", translate, texts or golden_texts(bundle), references)
        require_same(parity)
        write_readme(bundle, folder, "huggingface")
        facts |= {"model_sha256": model_digest(bundle), "parity": parity.facts()}
    return Exported(final, parity)


def export_onnx(model: str | Path, out: str | Path, *, texts: Sequence[str] = (), references: Sequence[str] | None = None) -> Exported:
    """Export a model to a new directory as two ONNX graphs, encoder and decoder step, with the SentencePiece models beside them."""
    require("onnx", "onnxscript", "onnxruntime")
    from dragoman.exchange.onnx_side import OnnxRuntime

    final, bundle = new_directory(out), Bundle.load(model)
    require_aligned(texts, references)
    facts: dict[str, Any] = {"kind": "dragoman export", "program": "onnx", "made_with": f"torch {torch.__version__}"}
    with publish_folder(final, facts) as folder:
        save_onnx(bundle.model, bundle.config, folder)
        with refusing(bundle.config):
            parity = compare(bundle, OnnxRuntime(folder), texts or golden_texts(bundle), references)
        require_same(parity)
        copy_tokenizers(bundle, folder)
        for name, tokenizer in (("source", bundle.tokenizers.src), ("target", bundle.tokenizers.tgt)):
            tokens = json.dumps(tokenizer.pieces(range(len(tokenizer))), ensure_ascii=False, indent=0)
            (folder / f"{name}_vocabulary.json").write_text(tokens, encoding="utf-8")
        write_readme(bundle, folder, "onnx")
        facts |= {"model_sha256": model_digest(bundle), "parity": parity.facts()}
    return Exported(final, parity)


def require_aligned(texts: Sequence[str], references: Sequence[str] | None) -> None:
    """Refuse references that are not one a sentence, before an hour of work."""
    if references is not None:
        check_aligned(texts, references)


EXPORTS: dict[str, Callable[..., Exported]] = {"ctranslate2": export_ctranslate2, "huggingface": export_hugging_face, "onnx": export_onnx}
