"""Engines of export directories outside the model directory, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dragoman.bundle import Bundle
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import SearchStrategy
from dragoman.errors import BundleError
from dragoman.exchange.huggingface_runner import TransformersRunner, quiet_transformers
from dragoman.inference import Engine, SearchRequest
from dragoman.inference.engine_selection import decode_golden
from dragoman.inference.exported_engine_files import check_engine_files
from dragoman.inference.untrusted_engine_trial import require_trial
from dragoman.runtime.optional_package_checks import require_packages
from dragoman.storage import manifest
from dragoman.text.imported_tokenizer import marian_language_code
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import UNK


class HuggingFaceEngine:
    """A Hugging Face directory run by `transformers`; tokens are mapped by its own vocabulary."""

    name, workers, client_threads, batch_tokens = "huggingface", 1, 1, None

    def __init__(self, directory: Path, tokenizers: Tokenizers) -> None:
        self._runner = TransformersRunner(directory)
        codes = {
            number: marian_language_code(language)
            for language, number in tokenizers.src.tag_ids.items()
        }
        tokens = tokenizers.src.tokens(range(len(tokenizers.src)))
        self._src_tokens = [codes.get(number, token) for number, token in enumerate(tokens)]
        self._ids = {
            token: index
            for index, token in enumerate(tokenizers.tgt.tokens(range(len(tokenizers.tgt))))
        }

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Return why a search is not supported: only greedy search, up to the maximum length."""
        if strategy.beam_size != 1:
            return f"does not support {strategy.name}"
        most = int(self._runner.model.config.max_position_embeddings)
        return f"was exported for {most} positions" if longest >= most else ""

    @torch.inference_mode()
    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Run greedy search in `transformers` on a padded batch."""
        tokenizer, model = self._runner.tokenizer, self._runner.model
        rows = [
            [
                *tokenizer.convert_tokens_to_ids([self._src_tokens[each] for each in source]),
                tokenizer.eos_token_id,
            ]
            for source in request.sources
        ]
        inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        options: dict[str, Any] = {
            "num_beams": 1,
            "do_sample": False,
            "max_length": None,
            "forced_eos_token_id": None,
        }
        with quiet_transformers():
            generated = model.generate(
                **inputs,
                **options,
                max_new_tokens=max(request.limits) + 1,
                output_logits=True,
                return_dict_in_generate=True,
            )
        log_probs = torch.stack(generated.logits, dim=1).log_softmax(-1)
        return [
            [self._hypothesis(generated.sequences[row, 1:].tolist(), log_probs[row], limit)]
            for row, limit in enumerate(request.limits)
        ]

    def _hypothesis(self, ids: Sequence[int], log_probs: torch.Tensor, limit: int) -> Hypothesis:
        """Return an output up to its end or limit, with the ids of our vocabulary."""
        end = self._runner.tokenizer.eos_token_id
        finished = end in ids[: limit + 1]
        kept = list(ids[: ids.index(end)] if finished else ids[:limit])
        numbers = [
            float(log_probs[position, token])
            for position, token in enumerate([*kept, end] if finished else kept)
        ]
        tokens = self._runner.tokenizer.convert_ids_to_tokens(kept)
        return Hypothesis(
            [self._ids.get(token, UNK) for token in tokens], numbers, sum(numbers), finished
        )


def run_export_trial(path: str, directory: str) -> None:
    """Load an export and decode with it; run in a child process."""
    bundle = Bundle.load(path)
    decode_golden(open_export(Path(directory), bundle, trial=False)[1](), bundle)


def open_export(
    directory: Path, bundle: Bundle, *, trial: bool = True
) -> tuple[str, Callable[[], Engine]]:
    """Return an export's name and a function that opens it.

    Unless it was written on this machine, it is first tried in a child process.
    """
    fields = manifest.read_manifest(directory)
    program = str(fields.get("program") or fields.get("engine"))
    if program not in _OPENERS:
        raise BundleError(
            f"{directory} must be an export",
            found=f"kind {fields.get('kind')!r:.80}",
            fix="write one with dragoman export",
        )

    def opened() -> Engine:
        check_engine_files(directory, fields, bundle)
        if trial:
            require_trial(
                fields,
                "dragoman.doctor.export_directory_opener:run_export_trial",
                [str(bundle.path), str(directory)],
                label=str(directory),
            )
        return _OPENERS[program](directory, bundle, fields)

    return f"{program}-{fields['quantisation']}" if "quantisation" in fields else program, opened


def _open_onnx(directory: Path, bundle: Bundle, fields: dict[str, Any]) -> Engine:
    """Open an ONNX export."""
    require_packages("onnxruntime")
    from dragoman.exchange.onnx_runner import OnnxRuntimeEngine

    return OnnxRuntimeEngine(directory)


def _open_hugging_face(directory: Path, bundle: Bundle, fields: dict[str, Any]) -> Engine:
    """Open a Hugging Face export."""
    require_packages("transformers")
    return HuggingFaceEngine(directory, bundle.tokenizers)


def _open_ctranslate2(directory: Path, bundle: Bundle, fields: dict[str, Any]) -> Engine:
    """Open a CTranslate2 export."""
    require_packages("ctranslate2")
    from dragoman.inference.ctranslate2_engine import CTranslate2Engine

    return CTranslate2Engine(
        directory,
        bundle.tokenizers,
        name="ctranslate2",
        longest=int(fields["longest"]),
        workers=torch.get_num_threads(),
    )


_OPENERS: dict[str, Callable[[Path, Bundle, dict[str, Any]], Engine]] = {
    "onnx": _open_onnx,
    "huggingface": _open_hugging_face,
    "ctranslate2": _open_ctranslate2,
}
