"""Exports that lie outside of a model's directory, opened as engines so that they are compared like the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dragoman.bundle import Bundle
from dragoman.decoding.greedy import Greedy
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.stepping import Strategy
from dragoman.engines import Engine, Request
from dragoman.engines.choosing import search_golden
from dragoman.engines.folder import model_digest
from dragoman.engines.installed import require
from dragoman.engines.trust import is_trusted, record_trust, try_in_child
from dragoman.errors import BundleError, CorruptError
from dragoman.exchange.transformers_side import Transformers, quietly
from dragoman.files import manifest
from dragoman.text.specials import UNK
from dragoman.text.tokenizer import Tokenizers


class HuggingFace:
    """A directory for `transformers`, asked piece by piece: its numbers for our pieces come from its own vocabulary."""

    name, workers, callers, slots = "huggingface", 1, 1, None

    def __init__(self, directory: Path, tokenizers: Tokenizers) -> None:
        self._theirs, self._src = Transformers(directory), tokenizers.src
        self._ids = {piece: number for number, piece in enumerate(tokenizers.tgt.pieces(range(len(tokenizers.tgt))))}

    def refusal(self, strategy: Strategy, longest: int = 0) -> str:
        """Only greedy search, within its positions."""
        if not isinstance(strategy, Greedy):
            return f"is run without {type(strategy).__name__.lower()}"
        most = int(self._theirs.model.config.max_position_embeddings)
        return f"was exported for {most} positions" if longest >= most else ""

    @torch.inference_mode()
    def generate(self, request: Request) -> list[list[Hypothesis]]:
        """Let `transformers` take the likeliest piece at each step; padding stays behind its attention mask."""
        tokenizer, model = self._theirs.tokenizer, self._theirs.model
        rows = [[*tokenizer.convert_tokens_to_ids(self._src.pieces(source)), tokenizer.eos_token_id] for source in request.sources]
        given = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        options: dict[str, Any] = {"num_beams": 1, "do_sample": False, "max_length": None, "forced_eos_token_id": None}
        with quietly():
            made = model.generate(
                **given, **options, max_new_tokens=max(request.limits) + 1, output_logits=True, return_dict_in_generate=True
            )
        log_probs = torch.stack(made.logits, dim=1).log_softmax(-1)
        return [[self._hypothesis(made.sequences[row, 1:].tolist(), log_probs[row], limit)] for row, limit in enumerate(request.limits)]

    def _hypothesis(self, ids: Sequence[int], log_probs: torch.Tensor, limit: int) -> Hypothesis:
        """Cut an output at its end or its limit, and number its pieces as we do."""
        end = self._theirs.tokenizer.eos_token_id
        finished = end in ids[: limit + 1]
        kept = list(ids[: ids.index(end)] if finished else ids[:limit])
        numbers = [float(log_probs[place, token]) for place, token in enumerate([*kept, end] if finished else kept)]
        pieces = self._theirs.tokenizer.convert_ids_to_tokens(kept)
        return Hypothesis([self._ids.get(piece, UNK) for piece in pieces], numbers, sum(numbers), finished)


def try_export(path: str, directory: str) -> None:
    """Load an export and search with it: a trial, to be run in a child process."""
    bundle = Bundle.load(path)
    search_golden(open_export(Path(directory), bundle, trial=False)[1](), bundle)


def open_export(directory: Path, bundle: Bundle, *, trial: bool = True) -> tuple[str, Callable[[], Engine]]:
    """Read what an export is; return its name and how to open it, after a trial in a child if it was not made here."""
    facts = manifest.read_manifest(directory)
    program = str(facts.get("program") or facts.get("engine"))
    if program not in _OPEN:
        raise BundleError(f"{directory} must be an export", found=f"kind {facts.get('kind')!r:.80}", fix="make one: dragoman export")

    def opened() -> Engine:
        for check in manifest.check_files(directory):
            if not check.ok:
                raise CorruptError(f"{directory / check.name} must be as it was written", found=check.problem, fix="export it again")
        if facts.get("model_sha256") != model_digest(bundle):
            raise BundleError(f"{directory} must be made from this model", found="one made from other weights", fix="export it again")
        digest = manifest.manifest_digest(facts)
        if trial and not is_trusted(digest):
            size = sum(record["bytes"] for record in facts["files"].values())
            arguments = [str(bundle.path), str(directory)]
            try_in_child("dragoman.doctor.exports:try_export", arguments, what=str(directory), bytes=size)
            record_trust(digest)
        return _OPEN[program](directory, bundle, facts)

    return f"{program}-{facts['quantisation']}" if "quantisation" in facts else program, opened


def _onnx(directory: Path, bundle: Bundle, facts: dict[str, Any]) -> Engine:
    """Open two graphs."""
    require("onnxruntime")
    from dragoman.exchange.onnx_side import OnnxRuntime

    return OnnxRuntime(directory)


def _hugging_face(directory: Path, bundle: Bundle, facts: dict[str, Any]) -> Engine:
    """Open a directory for `transformers`."""
    require("transformers")
    return HuggingFace(directory, bundle.tokenizers)


def _ctranslate2(directory: Path, bundle: Bundle, facts: dict[str, Any]) -> Engine:
    """Open a directory for CTranslate2."""
    require("ctranslate2")
    from dragoman.engines.ctranslate2 import CTranslate2

    return CTranslate2(directory, bundle.tokenizers, name="ctranslate2", longest=int(facts["longest"]), workers=torch.get_num_threads())


_OPEN: dict[str, Callable[[Path, Bundle, dict[str, Any]], Engine]] = {
    "onnx": _onnx,
    "huggingface": _hugging_face,
    "ctranslate2": _ctranslate2,
}
