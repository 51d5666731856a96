"""Ensembles: several models decoded as one, by the mean of their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.bundle import Bundle
from dragoman.config import Config
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import REFERENCE_BACKEND, SearchRequest
from dragoman.errors import BundleError, ConfigError, DivergedError
from dragoman.inference.cuda.cuda_backend import EagerSearchBackend
from dragoman.inference.dragoman_model_engine import NativeEngine
from dragoman.inference.engine_selection import open_engines
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.sentencepiece_tokenizer import Tokenizers


@dataclass(frozen=True, slots=True)
class EnsembleState:
    """The decoder states of the members, row by row of the same hypotheses."""

    members: tuple[Any, ...]

    @property
    def device(self) -> torch.device:
        """The device of the first member; tokens and logits are there."""
        device: torch.device = self.members[0].device
        return device

    def select(self, rows: Tensor) -> EnsembleState:
        """Return the state of these rows, in this order."""
        return EnsembleState(tuple(each.select(rows) for each in self.members))

    def reorder(self, rows: Tensor) -> EnsembleState:
        """Return the state of these rows, each of the same sentence as the row that it replaces."""
        return EnsembleState(tuple(each.reorder(rows) for each in self.members))

    def keep(self, sentences: Tensor) -> EnsembleState:
        """Return the state of these sentences."""
        return EnsembleState(tuple(each.keep(sentences) for each in self.members))


class EnsembleDecoder:
    r"""Models with the same vocabularies that a search sees as one.

    .. math:: \log p(y_t) = \frac{1}{N} \sum_n \log p_n(y_t) - \log Z_t

    The searches normalize: this is the geometric mean of the members' distributions. The members
    may be of different architectures.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = tuple(models)

    def encode(self, src: Tensor, mask: Tensor | None = None) -> tuple[Any, ...]:
        """Return each member's memory of the sources (B, S)."""
        return tuple(model.encode(src, mask) for model in self.models)

    def start(self, memory: Sequence[Any]) -> EnsembleState:
        """Return the state before the first token."""
        return EnsembleState(
            tuple(model.start(each) for model, each in zip(self.models, memory, strict=True))
        )

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """Append one token per row (B,); return the mean log-probabilities (B, V) and the state."""
        total, states = None, list[Any]()
        for model, member_state in zip(self.models, state.members, strict=True):
            logits, new_state = model.step(tokens, member_state)
            log_probs = logits.float().log_softmax(dim=-1)
            total = log_probs if total is None else total.add_(log_probs)
            states.append(new_state)
        assert total is not None, "an ensemble has members"
        return total.div_(len(self.models)), EnsembleState(tuple(states))


class LoadedEnsemble(NamedTuple):
    """The engine of an ensemble, and the first of its models, whose tokenizers all share."""

    engine: EnsembleEngine
    first: Bundle


class EnsembleEngine(NativeEngine):
    """Runs several models as one search, each in the form that its native engine has on a CPU.

    On a GPU they run as they are, in float32 and without CUDA graphs.
    """

    def __init__(self, members: Sequence[NativeEngine], configs: Sequence[Config]) -> None:
        super().__init__(
            self._raise_no_single_model, precision=members[0].precision, workers=members[0].workers
        )
        self.members, self.configs = tuple(members), tuple(configs)

    @classmethod
    def load(
        cls, paths: Sequence[str | Path], device: torch.device, *, precision: str | None
    ) -> LoadedEnsemble:
        """Load models of the same languages and vocabularies; raise BundleError if they differ."""
        if precision is not None and device.type == "cuda" and precision != "float32":
            raise ConfigError(
                [
                    "an ensemble runs in float32 on a GPU; "
                    f"found the precision {precision}; leave it out"
                ]
            )
        bundles = [Bundle.load(path, device=device) for path in paths]
        first = bundles[0]
        for other in bundles[1:]:
            _check_members(first, other)
        engines = [
            open_engines(bundle, device, requested="native", precision=precision)[0]
            for bundle in bundles
        ]
        return LoadedEnsemble(cls(engines, [bundle.config for bundle in bundles]), first)

    @property
    def name(self) -> str:
        """The name of the engine: `native ensemble of 2`."""
        return f"{super().name} ensemble of {len(self.members)}"

    @property
    def models(self) -> list[EncoderDecoder]:
        """The models of all members."""
        return [member.model for member in self.members]

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.members[0].device

    @property
    def has_hooks(self) -> bool:
        """Whether the calling thread records or edits one of the models."""
        return any(member.has_hooks for member in self.members)

    def copy_to_cpu(self, config: Config, tokenizers: Tokenizers) -> EnsembleEngine:
        """Return the same models on the CPU."""
        copies = [
            member.copy_to_cpu(own, tokenizers)
            for member, own in zip(self.members, self.configs, strict=True)
        ]
        return EnsembleEngine(copies, self.configs)

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Encode a batch with every model and search; return the hypotheses, best first."""
        with self.single_threaded(), torch.inference_mode():
            fast = [member.inference_model(request.strategy).model for member in self.members]
            try:
                return self._search_with(fast, request)
            except DivergedError:
                if all(form is model for form, model in zip(fast, self.models, strict=True)):
                    raise
            # Packed or quantized weights may overflow where the models do not.
            return self._search_with(self.models, request)

    def _search_with(
        self, models: Sequence[object], request: SearchRequest
    ) -> list[list[Hypothesis]]:
        """Run the request's strategy over models in some form."""
        decoder = EnsembleDecoder(models)
        memory = decoder.encode(*pad_sources(request.sources, self.device))
        on_cuda = self.device.type == "cuda"
        backend = EagerSearchBackend() if on_cuda else REFERENCE_BACKEND
        return request.strategy.run(decoder, decoder.start(memory), request, backend)

    def _raise_no_single_model(self) -> EncoderDecoder:
        """Raise ConfigError: an ensemble translates, and has no model to look into."""
        raise ConfigError(
            [
                "only a single model can be explained, scored with or recorded; "
                f"found an ensemble of {len(self.members)}; load one of them"
            ]
        )


def _check_members(first: Bundle, other: Bundle) -> None:
    """Raise BundleError unless two models can decode together."""
    languages = [_languages(bundle.config) for bundle in (first, other)]
    if all(languages) and languages[0] != languages[1]:
        raise BundleError(
            "models of an ensemble must translate between the same languages",
            found=f"{first.path} from {languages[0]} and {other.path} from {languages[1]}",
            fix="leave one out",
        )
    sides = zip(("source", "target"), first.tokenizers, other.tokenizers, strict=True)
    for side, ours, theirs in sides:
        if ours.digest != theirs.digest:
            raise BundleError(
                f"models of an ensemble must have the same {side} vocabulary",
                found=f"{first.path} with {len(ours):,} tokens and {other.path} with "
                f"{len(theirs):,} others",
                fix="train both from the same files, or one by --init-from the other",
            )


def _languages(config: Config) -> str:
    """Return the directions of a model, such as de-en; empty if it names none."""
    data = config.data
    pair = f"{data.src_lang}-{data.tgt_lang}" if data.src_lang and data.tgt_lang else ""
    return ", ".join(data.directions) or pair
