"""The model under test with its tokenizers, test sentences, engines and reference outputs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.bundle import Bundle
from dragoman.bundle import format as layout
from dragoman.bundle.golden_vectors import read_golden_cases
from dragoman.bundle.reader import read_expected_tensors
from dragoman.bundle.translation_bundle_loader import build_loaded_model, expected_weights
from dragoman.config import Config
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import SearchStrategy, search
from dragoman.doctor.check_result import NotApplicableError
from dragoman.doctor.export_directory_opener import open_export
from dragoman.errors import BundleError, DragomanError
from dragoman.inference import Engine, SearchRequest
from dragoman.inference.engine_selection import open_engine
from dragoman.inference.exported_engine_files import list_engine_names
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.runtime.device import choose_device, run_with_cpu_fallback
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import SPECIAL_TOKENS

DEFAULT_SENTENCES = 16
EXTRA_PADDING = 4  # padding columns added by the checks of padding
BEAM_SIZE = 4
BATCH_ROWS = 8  # sentences per batch, of different lengths, so that there is padding
RANDOM_LENGTHS = (1, 2, 5, 9, 3, 13)  # lengths of random source sentences
MIN_DISTINCT_LENGTHS = 4  # with fewer, random sentences are added, so that batches have padding


class ReferenceEngine:
    """The reference for all engines: plain PyTorch modules with our search."""

    name, workers, client_threads, batch_tokens = "plain", 1, 1, None

    def __init__(self, model: EncoderDecoder) -> None:
        self._model = model

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Return "": every search is supported."""
        return ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Encode a batch and search."""
        device = next(self._model.parameters()).device
        with torch.inference_mode():
            memory = self._model.encode(*pad_sources(request.sources, device))
        return search(
            self._model, memory, limits=torch.tensor(request.limits), strategy=request.strategy
        )


class TokenPairs(NamedTuple):
    """A batch of token ids for teacher forcing."""

    sources: list[list[int]]
    targets: list[list[int]]  # random: the checks hold for any target


class ModelUnderTest:
    """A model under test; `load` builds it, and is not called again after it failed."""

    def __init__(
        self,
        load: Callable[[], EncoderDecoder],
        *,
        config: Config,
        tokenizers: Tokenizers,
        golden: Mapping[str, Any] | None = None,
        texts: Sequence[str] = (),
        engines: Mapping[str, Callable[[], Engine]] | None = None,
        sentences: int = DEFAULT_SENTENCES,
    ) -> None:
        self._load, self.config, self.tokenizers = load, config, tokenizers
        self.golden, self.engines = golden, dict(engines or {})
        # Learned positions are limited; the end of sentence and extra padding need some.
        self._max_positions = (
            max(1, config.model.max_positions - 1 - EXTRA_PADDING)
            if config.model.positions == "learned"
            else sys.maxsize
        )
        longest = min(config.data.max_length, self._max_positions)
        first = next(iter(tokenizers.src.tag_ids), "")  # any target language will do
        src = tokenizers.src.tagged(first) if first else tokenizers.src
        given = [text for text in list(texts)[:sentences] if text]
        encoded = [ids[:longest] for ids in src.encode_batch(given) if ids]
        known = encoded or [case["src"][:longest] for case in self.cases()][:sentences]
        lengths = RANDOM_LENGTHS if len(set(map(len, known))) < MIN_DISTINCT_LENGTHS else ()
        more = [
            _random_tokens(min(length, longest), len(tokenizers.src), at)
            for at, length in enumerate(lengths)
        ]
        self.sources = known + more
        self.origin = " and ".join(
            filter(
                None,
                [
                    _count_sentences(len(known), "given" if encoded else "golden"),
                    _count_sentences(len(more), "random"),
                ],
            )
        )

    def cases(self) -> list[dict[str, Any]]:
        """Return the golden cases; none if the file is invalid, which its own check reports."""
        if self.golden is None:
            return []
        try:
            return read_golden_cases(
                self.golden, len(self.tokenizers.src), len(self.tokenizers.tgt), layout.GOLDEN
            )
        except BundleError:
            return []

    @property
    def model(self) -> EncoderDecoder:
        """The model; raise NotApplicableError if it does not load, which its own check reports."""
        loaded_or_error = self.loaded_or_error
        if isinstance(loaded_or_error, DragomanError):
            raise NotApplicableError("the model cannot be built")
        return loaded_or_error

    @functools.cached_property
    def loaded_or_error(self) -> EncoderDecoder | DragomanError:
        """The model, or the error that loading it raised."""
        try:
            return self._load()
        except DragomanError as error:
            return error

    @property
    def reference_engine(self) -> ReferenceEngine:
        """The engine that all others are compared with."""
        return ReferenceEngine(self.model)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @property
    def is_exact(self) -> bool:
        """Whether matrix multiplications have full float32 precision, as on CPUs."""
        return self.device.type == "cpu"

    @functools.cached_property
    def single_outputs(self) -> list[Hypothesis]:
        """The greedy output of every sentence, without batching."""
        return [
            self.search(self.reference_engine, GreedySearch(), [number])[0]
            for number in range(len(self.sources))
        ]

    @functools.cached_property
    def batched_outputs(self) -> list[Hypothesis]:
        """The greedy output of every sentence, in batches."""
        return self.search_all(self.reference_engine, GreedySearch())

    @functools.cached_property
    def beam_outputs(self) -> list[Hypothesis]:
        """The best beam search output of every sentence, in batches."""
        return self.search_all(self.reference_engine, BeamSearch(size=BEAM_SIZE))

    def search_all(
        self, engine: Engine, strategy: SearchStrategy, *, return_scores: bool = True
    ) -> list[Hypothesis]:
        """Return an engine's best output of every sentence, in batches of mixed lengths."""
        numbers = range(len(self.sources))
        groups = [numbers[at : at + BATCH_ROWS] for at in range(0, len(numbers), BATCH_ROWS)]
        return [
            best
            for group in groups
            for best in self.search(engine, strategy, group, return_scores=return_scores)
        ]

    def search(
        self,
        engine: Engine,
        strategy: SearchStrategy,
        numbers: Sequence[int],
        *,
        return_scores: bool = True,
    ) -> list[Hypothesis]:
        """Return an engine's best outputs of some sentences, as one batch."""
        request = replace(self.request(strategy, numbers), return_scores=return_scores)
        return [hypotheses[0] for hypotheses in engine.generate(request)]

    def request(self, strategy: SearchStrategy, numbers: Sequence[int]) -> SearchRequest:
        """Return a search request; outputs are limited, because an untrained model never ends."""
        sources, decode = [self.sources[number] for number in numbers], self.config.decode
        own = [
            int(decode.max_length_ratio * len(source)) + decode.max_length_extra
            for source in sources
        ]
        limits = [
            min(limit, 2 * len(source) + 10, self._max_positions)
            for limit, source in zip(own, sources, strict=True)
        ]
        return SearchRequest(
            sources=sources,
            limits=limits,
            prefixes=[[] for _ in sources],
            strategy=strategy,
            sample_ids=list(numbers),
        )

    def pairs(self) -> Iterator[TokenPairs]:
        """Yield the sentences in batches with random targets of different lengths."""
        for first in range(0, len(self.sources), BATCH_ROWS):
            sources = self.sources[first : first + BATCH_ROWS]
            lengths = [min(3 + 5 * at % 11, self._max_positions) for at in range(len(sources))]
            targets = [
                _random_tokens(length, len(self.tokenizers.tgt), 1000 + first + at)
                for at, length in enumerate(lengths)
            ]
            yield TokenPairs(sources, targets)


def load_model_under_test(
    path: str | Path,
    *,
    texts: Sequence[str] = (),
    sentences: int = DEFAULT_SENTENCES,
    exports: Sequence[Path] = (),
    device: str = "auto",
) -> ModelUnderTest:
    """Open a model directory for the checks; only the integrity of its files is verified here.

    `exports` are export directories outside of it, compared as well.
    """
    chosen = choose_device(device)
    bundle = Bundle.load(path, device=chosen, check_golden=False)

    def load() -> EncoderDecoder:
        # Not `bundle.model`, which raises for non-finite weights: here a check reports them.
        weights = read_expected_tensors(
            bundle.path / layout.WEIGHTS, expected_weights(bundle.config, bundle.tokenizers)
        )
        return run_with_cpu_fallback(
            chosen,
            lambda where: build_loaded_model(bundle.config, bundle.tokenizers, weights).to(where),
        )

    engines: dict[str, Callable[[], Engine]] = {
        name: functools.partial(open_engine, bundle, name)
        for name in list_engine_names(bundle.path)
    }
    for directory in exports:
        name, opened = open_export(directory, bundle)
        engines[f"{directory.name}: {name}" if name in engines else name] = opened
    return ModelUnderTest(
        load,
        config=bundle.config,
        tokenizers=bundle.tokenizers,
        golden=bundle.golden,
        texts=texts,
        engines=engines,
        sentences=sentences,
    )


def _count_sentences(number: int, kind: str) -> str:
    """Return the number of sentences of a kind; empty for none."""
    return f"{number} {kind} sentence{'' if number == 1 else 's'}" if number else ""


def _random_tokens(length: int, vocabulary: int, seed: int) -> list[int]:
    """Return random token ids without special tokens, deterministic by seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(SPECIAL_TOKENS), vocabulary, (length,), generator=generator).tolist()
