"""Translator: text in, translations out; batches run on the chosen engine, with fallbacks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dragoman.bundle import Bundle
from dragoman.config import Config
from dragoman.config.directions import Direction
from dragoman.data.corpus import ParallelFiles
from dragoman.decoding.beam_trace import BeamObserver
from dragoman.decoding.constraint_automaton import (
    CompiledConstraints,
    NotBlank,
    OutputVocabulary,
    SentenceConstraints,
    check_constraints,
)
from dragoman.decoding.constraints import Constraint
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.no_repeat import NoRepeatNgram
from dragoman.decoding.padded_batch import group_by_length
from dragoman.decoding.search import SearchRequest, SearchStrategy, TokenConstraints
from dragoman.errors import ConfigError, DataError, suggest_name
from dragoman.evaluate.confidence import ConfidenceMap
from dragoman.explain import Explanation
from dragoman.explain.attention_heads import (
    ablate_heads,
    head_batches,
    heads_switched_off,
    measure_head_batch,
    select_heads,
)
from dragoman.explain.attention_maps import align_batch, locate_sites
from dragoman.explain.attribution import attribute_tokens, attribution_fields
from dragoman.explain.explanation import Ablation, Array, AttentionWeights, Attribution
from dragoman.explain.explanation_builder import (
    ExplainedTarget,
    TracedSearch,
    add_search,
    build_score,
    build_steps,
    explain_pair,
    model_digest,
    plain_logits,
)
from dragoman.explain.teacher_forcing import ForcedTarget
from dragoman.explain.token_spans import tokenize_text
from dragoman.inference.branches import branch_prefix, compute_branches, list_branches
from dragoman.inference.direction_choice import DirectionChooser
from dragoman.inference.engine import Engine
from dragoman.inference.engine_selection import open_engines, requires_cpu
from dragoman.inference.ensemble_engine import EnsembleEngine
from dragoman.inference.input_windows import FIRST_WINDOW_LINES, LineWindows
from dragoman.inference.minimum_bayes_risk import rank_candidates
from dragoman.inference.native_engine import NativeEngine
from dragoman.inference.pair_scores import PairScore, score_pairs
from dragoman.inference.translation import (
    Segment,
    SegmentedLine,
    Translation,
    add_confidence,
    check_text_iterable,
    find_repetition,
    iter_texts,
    replace_control_chars,
    split_lines,
)
from dragoman.inference.translation_options import TranslationOptions
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.runtime.device import choose_device, run_with_cpu_fallback
from dragoman.runtime.memory import RETRY_FRACTION, is_out_of_memory, release_memory
from dragoman.runtime.threads import map_in_threads
from dragoman.text.language_id import LanguageIdentifier
from dragoman.text.special_tokens import EOS, UNK
from dragoman.text.tokenizer import Tokenizers, normalize

if TYPE_CHECKING:
    from dragoman.evaluate.pairwise_scores import PairwiseMetric

logger = logging.getLogger(__name__)

MAX_COMPILED_CONSTRAINTS = 16  # different sets of them kept by a translator


class _SearchedBatch(NamedTuple):
    """Hypotheses, texts and expected utilities of each segment, best first."""

    hypotheses: list[list[Hypothesis]]
    texts: list[list[str]]
    utilities: list[list[float]]  # empty lists without minimum Bayes risk decoding


class BatchTranslator:
    """Translates batches of segments on an engine, with fallbacks.

    A batch that does not fit in memory is halved, an engine that fails is replaced by the native
    one, and an empty output is searched again. Each fallback is logged once; results stay the same.
    """

    def __init__(
        self, native: NativeEngine, engine: Engine, tokenizers: Tokenizers, config: Config
    ) -> None:
        self.native, self.engine = native, engine
        self._tokenizers, self._config = tokenizers, config
        self._logged = set[str]()
        self._log_lock, self._fallback_lock = threading.Lock(), threading.Lock()
        self._cpu_translator: BatchTranslator | None = None
        self._max_batch_tokens = sys.maxsize  # padded source tokens known to fit in memory
        # One of the learned positions is for EOS.
        configs = native.configs if isinstance(native, EnsembleEngine) else (config,)
        self._max_positions = min(
            each.model.max_positions - 1 if each.model.positions == "learned" else sys.maxsize
            for each in configs
        )
        self.max_segment_tokens = min(
            *(each.data.max_length for each in configs), self._max_positions
        )
        self._compiled_constraints: dict[tuple[Constraint, ...], CompiledConstraints] = {}
        self._compile_lock = threading.Lock()
        self._pairwise_metrics: dict[tuple[str, str], PairwiseMetric] = {}

    def translate_batch(
        self,
        segments: Sequence[Segment],
        options: TranslationOptions,
        strategy: SearchStrategy,
        *,
        text_only: bool = False,
    ) -> list[Translation]:
        """Translate a batch; if it does not fit in memory, in halves or finally on the CPU."""
        count, max_batch_tokens = len(segments), self._max_batch_tokens
        if count == 1 or _padded_tokens(segments) <= max_batch_tokens:
            try:
                return self._search_batch(segments, options, strategy, text_only=text_only)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or (count == 1 and self.native.device.type == "cpu"):
                    raise
            release_memory()
            if count == 1:
                self._log_once(
                    "out of memory for a single sentence: sentences that do not fit are translated "
                    "on the CPU, and the result is the same"
                )
                return self._cpu_fallback.translate_batch(
                    segments, options, strategy, text_only=text_only
                )
            self._max_batch_tokens = int(RETRY_FRACTION * _padded_tokens(segments))
            self._log_once(
                "out of memory with a batch of %d sentences: batches that do not fit are "
                "translated in halves, and the result is the same",
                count,
            )
        return [
            translation
            for half in (segments[: count // 2], segments[count // 2 :])
            for translation in self.translate_batch(half, options, strategy, text_only=text_only)
        ]

    def select_engine(
        self, strategy: SearchStrategy, longest: int = 0, *, constrained: bool = False
    ) -> Engine:
        """Return the engine, or the native one for what the engine does not support."""
        engine = self.engine
        if engine is self.native:
            return engine
        if constrained:
            self.log_native_fallback("has no constrained decoding")
            return self.native
        if self.native.has_hooks:
            self.log_native_fallback("cannot record or edit attention")
            return self.native
        reason = engine.unsupported_reason(strategy, longest)
        if not reason:
            return engine
        self.log_native_fallback(reason)
        return self.native

    def log_native_fallback(self, reason: str) -> None:
        """Log, once for each reason, that the native engine is used instead."""
        self._log_once(
            f"the engine {self.engine.name} {reason}: the native engine is used",
            level=logging.INFO,
        )

    def build_request(
        self,
        segments: Sequence[Segment],
        options: TranslationOptions,
        strategy: SearchStrategy,
        *,
        min_length: int = 0,
    ) -> SearchRequest:
        """Build the request to an engine; a prefix is forced on the first segment of each line.

        Raise ConstraintError for a segment whose constraints no output fulfils.
        """
        prefix = self.encode_prefix(options)
        constraints = list[TokenConstraints]()
        if options.no_repeat_ngram_size:
            size, vocab_size = options.no_repeat_ngram_size, len(self._tokenizers.tgt)
            constraints += [
                NoRepeatNgram(size, vocab_size, prefix=prefix if segment.index == 0 else [])
                for segment in segments
            ]
        if options.constraints:
            compiled = self._compile_constraints(options.constraints)
            for segment in segments:
                bound = self._bind_constraints(compiled, segment)
                constraints.append(bound)
                limit = max(self._max_length(segment, prefix), 1, len(prefix))
                check_constraints(compiled, bound, limit, prefix, line=segment.line + 1)
        return SearchRequest(
            strategy=strategy,
            sources=[segment.src for segment in segments],
            limits=[self._max_length(segment, prefix) for segment in segments],
            prefixes=[prefix if segment.index == 0 else [] for segment in segments],
            sample_ids=[segment.sample_id for segment in segments],
            min_length=min_length,
            return_scores=options.return_scores,
            constraints=constraints,
        )

    def encode_prefix(self, options: TranslationOptions) -> list[int]:
        """Return the forced tokens; raise DataError for what the model cannot read or write."""
        prefix = list(options.prefix_ids or ())
        if options.prefix and options.prefix.strip():
            prefix = self._tokenizers.tgt.encode(options.prefix)
        size = len(self._tokenizers.tgt)
        wrong = [
            each
            for at, each in enumerate(prefix)
            if not (UNK <= each < size or (each == EOS and at == len(prefix) - 1))
        ]
        if wrong:
            raise DataError(
                f"prefix_ids must be tokens of the target, {UNK} to {size - 1}, or end with {EOS}",
                found=f"{wrong[0]}",
                fix="take them from the tokens of an explanation",
            )
        if len(prefix) > self._max_positions:
            raise DataError(
                f"a prefix must have at most {self._max_positions} tokens, the positions that "
                "the model has",
                found=f"{len(prefix):,}",
                fix="shorten it",
            )
        return prefix

    def encode_reference(self, reference: str, options: TranslationOptions) -> Hypothesis:
        """Return a reference as a finished hypothesis that has no scores yet."""
        if not isinstance(reference, str) or not reference.strip():
            raise DataError(
                "a reference must be a text with words", found=repr(reference), fix="leave it out"
            )
        if options.prefix_ids or (options.prefix and options.prefix.strip()):
            raise ConfigError(
                [
                    "prefix and reference exclude each other; "
                    f"found both, with reference={reference!r:.60}; keep one"
                ]
            )
        tokens = self._tokenizers.tgt.encode(reference)
        if len(tokens) > self._max_positions:
            raise DataError(
                f"a reference must have at most {self._max_positions} tokens, the positions that "
                "the model has",
                found=f"{len(tokens):,}",
                fix="shorten it",
            )
        return Hypothesis(tokens, [], 0.0, finished=True)

    def trace_search(
        self, segment: Segment, options: TranslationOptions, strategy: SearchStrategy
    ) -> TracedSearch:
        """Search one segment on the native engine with a trace, as `translate_batch` does."""

        def run(options: TranslationOptions, min_length: int) -> TracedSearch:
            observer = BeamObserver()
            request = self.build_request([segment], options, strategy, min_length=min_length)
            found = self.native.generate(dataclasses.replace(request, observer=observer))
            return TracedSearch(
                found[0],
                self.detokenize(found)[0],
                next(iter(observer.traces), None),
                next(iter(observer.masked), []),
                int(request.max_lengths[0]),
                request.prefixes[0],
            )

        searched = run(options, 0)
        again = None if searched.texts[0].strip() else self._retry_options(segment, options)
        return searched if again is None else run(*again)

    def search_prefixes(
        self, segment: Segment, prefixes: Sequence[Sequence[int]], strategy: SearchStrategy
    ) -> list[tuple[Hypothesis, str]]:
        """Search one segment with each of several forced prefixes; return the best of each."""
        groups = group_by_length(
            [len(segment.src) + 1 + len(prefix) for prefix in prefixes],
            batch_tokens=self._config.decode.batch_tokens,
            rows_per_sentence=strategy.rows_per_sentence,
        )
        found = dict[int, tuple[Hypothesis, str]]()
        for group in groups:
            request = SearchRequest(
                strategy=strategy,
                sources=[segment.src] * len(group),
                limits=[self._max_length(segment, prefixes[number]) for number in group],
                prefixes=[prefixes[number] for number in group],
                sample_ids=[segment.sample_id] * len(group),
            )
            best = [hypotheses[0] for hypotheses in self.native.generate(request)]
            [texts] = self.detokenize([best])
            found |= dict(zip(group, zip(best, texts, strict=True), strict=True))
        return [found[number] for number in range(len(prefixes))]

    def _max_length(self, segment: Segment, prefix: Sequence[int]) -> int:
        """Return the most tokens of a segment's translation."""
        decode = self._config.decode
        return min(
            int(decode.max_length_ratio * len(segment.src)) + decode.max_length_extra + len(prefix),
            self._max_positions,
        )

    def _compile_constraints(self, constraints: Sequence[Constraint]) -> CompiledConstraints:
        """Compile constraints for the target vocabulary; those of the last call are kept."""
        form = self._tokenizers.tgt.normalization
        key = tuple(each.normalized(lambda text: normalize(text, form)) for each in constraints)
        with self._compile_lock:
            if key not in self._compiled_constraints:
                if len(self._compiled_constraints) >= MAX_COMPILED_CONSTRAINTS:
                    self._compiled_constraints.clear()
                self._compiled_constraints[key] = CompiledConstraints(key, self._output_vocabulary)
            return self._compiled_constraints[key]

    @functools.cached_property
    def _output_vocabulary(self) -> OutputVocabulary:
        return OutputVocabulary.of(self._tokenizers.tgt)

    def _bind_constraints(
        self, compiled: CompiledConstraints, segment: Segment
    ) -> SentenceConstraints:
        return compiled.bind(normalize(segment.text, self._tokenizers.tgt.normalization))

    def detokenize(self, found: Sequence[Sequence[Hypothesis]]) -> list[list[str]]:
        """Decode hypotheses to text, in one call: each call of the tokenizer starts a thread."""
        texts = iter(
            self._tokenizers.tgt.decode_batch(
                [each.tokens for hypotheses in found for each in hypotheses]
            )
        )
        return [[replace_control_chars(next(texts)) for _ in hypotheses] for hypotheses in found]

    def _search_batch(
        self,
        segments: Sequence[Segment],
        options: TranslationOptions,
        strategy: SearchStrategy,
        *,
        text_only: bool,
    ) -> list[Translation]:
        """Search and detokenize; search again, with at least one token, where the best is empty."""
        found, texts, utilities = self._search_candidates(segments, options, strategy)
        retries = {
            at: retry
            for at, row_texts in enumerate(texts)
            if not row_texts[0].strip() and (retry := self._retry_options(segments[at], options))
        }
        empty = list(retries)
        if empty:
            retry_options, min_length = retries[empty[0]]  # the same for all
            retried = [segments[at] for at in empty]
            again = self._search_candidates(retried, retry_options, strategy, min_length=min_length)
            for row, at in enumerate(empty):
                found[at], texts[at] = again.hypotheses[row], again.texts[row]
                utilities[at] = again.utilities[row]
        if text_only:
            return [Translation(text=row_texts[0]) for row_texts in texts]
        labels = [each.label for each in options.constraints]
        alignments = self._align_batch(segments, found) if options.alignment else None
        return [
            self._build_translation(
                segment,
                found[at],
                texts[at],
                utilities[at],
                retried=at in empty,
                constraints=labels,
                alignment=None if alignments is None else alignments[at],
            )
            for at, segment in enumerate(segments)
        ]

    def _search_candidates(
        self,
        segments: Sequence[Segment],
        options: TranslationOptions,
        strategy: SearchStrategy,
        *,
        min_length: int = 0,
    ) -> _SearchedBatch:
        """Search and detokenize; with minimum Bayes risk decoding rank by expected utility."""
        found = self._run_engine(
            self.build_request(segments, options, strategy, min_length=min_length)
        )
        texts = self.detokenize(found)
        if options.mbr is None:
            return _SearchedBatch(found, texts, [[] for _ in segments])
        language = options.target_language or self._config.data.tgt_lang
        utility, sampled = self._pairwise_metric(options.mbr, language), options.draws_samples
        ranked = [
            rank_candidates(*each, utility, sampled=sampled)
            for each in zip(found, texts, strict=True)
        ]
        return _SearchedBatch(
            [each.hypotheses[: options.nbest] for each in ranked],
            [each.texts[: options.nbest] for each in ranked],
            [each.utilities[: options.nbest] for each in ranked],
        )

    def _pairwise_metric(self, name: str, language: str) -> PairwiseMetric:
        """Return the utility of minimum Bayes risk decoding into a language."""
        from dragoman.evaluate.pairwise_scores import build_pairwise_metric  # imports sacreBLEU

        with self._compile_lock:
            key = (name, language)
            if key not in self._pairwise_metrics:
                self._pairwise_metrics[key] = build_pairwise_metric(name, language)
            return self._pairwise_metrics[key]

    def _retry_options(
        self, segment: Segment, options: TranslationOptions
    ) -> tuple[TranslationOptions, int] | None:
        """Return options and minimum length to search again where the best output is empty.

        None if the constraints allow no other output.
        """
        if not options.constraints:
            return options, 1
        constraints = (*options.constraints, NotBlank())
        bound = self._bind_constraints(self._compile_constraints(constraints), segment)
        if not bound.is_possible(self._max_length(segment, ())):
            return None
        return dataclasses.replace(options, constraints=constraints), 0

    def _run_engine(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Run a request; replace an engine that fails by the native one for good."""
        engine = self.engine
        if engine is self.native:
            return engine.generate(request)
        engine = self.select_engine(
            request.strategy, request.longest, constrained=bool(request.constraints)
        )
        try:
            return engine.generate(request)
        except RuntimeError as error:
            if engine is self.native or is_out_of_memory(error):
                raise
            found = next(iter(str(error).splitlines()), "")[:160]
        self._log_once(
            f"the engine {engine.name} failed ({found}): the native engine is used, "
            "and the result is the same but for rounding"
        )
        self.engine = self.native
        return self.native.generate(request)

    @property
    def _cpu_fallback(self) -> BatchTranslator:
        """The same model on the CPU, for sentences that do not fit in GPU memory."""
        with self._fallback_lock:
            if self._cpu_translator is None:
                native = self.native.copy_to_cpu(self._config, self._tokenizers)
                self._cpu_translator = BatchTranslator(
                    native, native, self._tokenizers, self._config
                )
        return self._cpu_translator

    def _align_batch(
        self, segments: Sequence[Segment], found: Sequence[Sequence[Hypothesis]]
    ) -> list[AttentionWeights] | None:
        """Align the best outputs with their sources; None if a model has no cross-attention.

        The alignment of an ensemble is the mean of its models'.
        """
        sources = [segment.src for segment in segments]
        targets = [hypotheses[0].tokens for hypotheses in found]
        alignments = list[list[AttentionWeights]]()
        with self.native.single_threaded():
            for model in self.native.models:
                aligned = align_batch(model, sources, targets)
                if aligned is None:
                    return None
                alignments.append(aligned)
        if len(alignments) == 1:
            return alignments[0]
        return [np.mean(rows, axis=0) for rows in zip(*alignments, strict=True)]

    def _build_translation(
        self,
        segment: Segment,
        hypotheses: Sequence[Hypothesis],
        texts: Sequence[str],
        utilities: Sequence[float],
        *,
        retried: bool,
        constraints: Sequence[str],
        alignment: Any,
    ) -> Translation:
        """Return the translation of a segment with its alternatives and notes."""
        src_tokens = self._tokenizers.src.tokens([*segment.src, EOS])

        def build(
            hypothesis: Hypothesis, text: str, utility: float | None, **more: Any
        ) -> Translation:
            return Translation(
                text=text,
                utility=utility,
                score=hypothesis.score,
                tokens=self._tokenizers.tgt.tokens(hypothesis.tokens),
                log_probs=hypothesis.log_probs,
                src_tokens=src_tokens,
                **more,
            )

        best, notes = hypotheses[0], []
        if retried:
            notes.append("the first output was empty: this is the best one that is not")
        if not best.finished:
            notes.append(
                f"stopped at {len(best.tokens)} tokens, the limit for this text "
                "(decode.max_length_ratio, decode.max_length_extra): its end is missing"
            )
        repetition = find_repetition(best.tokens)
        if repetition and not find_repetition(segment.src):
            pattern = self._tokenizers.tgt.decode(repetition.pattern).strip()
            notes.append(f"the output repeats itself: {pattern!r} occurs {repetition.times} times")
        known: Sequence[float | None] = utilities or [None] * len(texts)
        alternatives = [build(*each) for each in zip(hypotheses, texts, known, strict=True)]
        return build(
            best,
            texts[0],
            known[0],
            alignment=alignment,
            alternatives=alternatives,
            notes=notes,
            constraints=constraints,
        )

    def _log_once(self, line: str, *values: object, level: int = logging.WARNING) -> None:
        """Log a message once, whichever thread comes first."""
        with self._log_lock:
            if line not in self._logged:
                self._logged.add(line)
                logger.log(level, line, *values)


def _padded_tokens(segments: Sequence[Segment]) -> int:
    """Return the padded size of a batch of sources, EOS included."""
    return len(segments) * (1 + max(len(segment.src) for segment in segments))


class Translator:
    """Translates with a trained model.

    `Translator.load("my-model").translate(["Guten Morgen."])`
    """

    def __init__(
        self,
        model: EncoderDecoder | NativeEngine,
        tokenizers: Tokenizers,
        config: Config,
        *,
        engine: Engine | None = None,
        calibration: ConfidenceMap | None = None,
        identifier: LanguageIdentifier | None = None,
        target_language: str | None = None,
    ) -> None:
        self.calibration = calibration
        self._chooser = DirectionChooser(config, identifier)
        self.target_language = target_language  # of calls that name none
        self._native = model if isinstance(model, NativeEngine) else NativeEngine(lambda: model)
        self.tokenizers, self.config = tokenizers, config
        self._batch_translator = BatchTranslator(
            self._native, self._native if engine is None else engine, tokenizers, config
        )

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path],
        *,
        device: str | torch.device = "auto",
        engine: str = "auto",
        precision: str | None = None,
        measure: bool = False,
        shortlist: tuple[str | Path, str | Path] | None = None,
        target_language: str | None = None,
    ) -> Translator:
        """Load a model directory, or several as an ensemble that decodes by their mean.

        The device `auto` is a GPU if there is one.

        The precision is `float32`, on a CPU also `int8`, on a GPU also `float16` or `bfloat16`; the
        default is float16 on a GPU with tensor cores, else float32.

        The engine `auto` never changes the precision. It uses an engine of the directory on a CPU
        if that has the same precision, was exported on this machine, and the model decodes
        greedily; with `measure`, if it is the fastest. The engine may also be `native` or the name
        of an exported one, such as `ctranslate2`. One that was exported elsewhere is tried in a
        child process first.

        A `shortlist` is two files, text and its translation, as in training. On a CPU it restricts
        each output to the tokens that occurred with those of its source: faster with a large
        vocabulary, and occasionally a different output.

        A `target_language` is that of calls which name none, for a model of several directions.
        """
        shortlist_files = (
            None
            if shortlist is None
            else ParallelFiles(Path(shortlist[0]), Path(shortlist[1]), on_bad_line="skip")
        )

        if not isinstance(path, (str, Path)) and len(path) != 1:
            return cls._load_ensemble(
                path,
                device,
                engine=engine,
                precision=precision,
                shortlist=shortlist,
                target_language=target_language,
            )
        path = path if isinstance(path, (str, Path)) else path[0]

        def load_on(where: torch.device) -> Translator:
            bundle = Bundle.load(path, device=where)
            strategy = TranslationOptions().strategy(bundle.config.decode) if measure else None
            native, used = open_engines(
                bundle,
                where,
                requested=engine,
                precision=precision,
                benchmark_strategy=strategy,
                shortlist=shortlist_files,
            )
            return cls(
                native,
                bundle.tokenizers,
                bundle.config,
                engine=used,
                calibration=bundle.calibration,
                identifier=bundle.identifier,
                target_language=target_language,
            )

        return run_with_cpu_fallback(
            choose_device(
                "cpu"
                if device == "auto" and (shortlist or requires_cpu(engine, precision))
                else device
            ),
            load_on,
        )

    @classmethod
    def _load_ensemble(
        cls,
        paths: Sequence[str | Path],
        device: str | torch.device,
        *,
        engine: str,
        precision: str | None,
        shortlist: object,
        target_language: str | None,
    ) -> Translator:
        """Load several models as one; the search settings are those of the first."""
        if not paths:
            raise ConfigError(["an ensemble needs at least one model; found none; name two"])
        if engine not in ("auto", "native") or shortlist is not None:
            found = "a shortlist" if shortlist is not None else f"the engine {engine}"
            raise ConfigError(
                [f"an ensemble runs on the native engine as it is; found {found}; leave it out"]
            )

        def load_on(where: torch.device) -> Translator:
            ensemble, first = EnsembleEngine.load(paths, where, precision=precision)
            return cls(
                ensemble,
                first.tokenizers,
                first.config,
                identifier=first.identifier,
                target_language=target_language,
            )

        is_on_cpu = device == "auto" and requires_cpu(engine, precision)
        return run_with_cpu_fallback(choose_device("cpu" if is_on_cpu else device), load_on)

    def __repr__(self) -> str:
        """Return languages, recipe and engine in one line, without loading weights."""
        data, recipe = self.config.data, self.config.recipe or "none"
        languages = (
            f"{', '.join(data.directions):.80}, "
            if data.directions
            else f"{data.src_lang:.20} to {data.tgt_lang:.20}, "
            if data.src_lang and data.tgt_lang
            else ""
        )
        return f"Translator({languages}recipe {recipe:.60}, engine {self.engine.name})"

    @property
    def engine(self) -> Engine:
        """The engine in use; one that fails is replaced by the native engine."""
        return self._batch_translator.engine

    @property
    def model(self) -> EncoderDecoder:
        """The PyTorch model, whichever engine translates; an ensemble has none: ConfigError."""
        return self._native.model

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._native.device

    @property
    def directions(self) -> list[str]:
        """The directions of a multilingual model, such as de-en; empty for other models."""
        return [str(each) for each in self._chooser.directions]

    def identify_languages(self, texts: Iterable[str]) -> list[str]:
        """Return the most probable source language of each text, of those of the model."""
        if not self._chooser.has_tags:
            raise ConfigError(
                [
                    "languages are identified by models of several directions; found a model of "
                    "one; use a model trained with --pair"
                ]
            )
        given = iter_texts(check_text_iterable(texts))
        return [self._chooser.identify(text) for text in given]

    def _choose_directions(
        self, texts: Sequence[str], options: TranslationOptions
    ) -> list[Direction] | None:
        """Return the direction of each text; None for a model without language tags."""
        target = options.target_language or self.target_language
        chosen = self._chooser.choose(texts, options.source_language, target)
        return chosen if self._chooser.has_tags else None

    def translate(self, texts: Iterable[str], **options: Any) -> list[str]:
        """Translate texts, in order; the options are the fields of `TranslationOptions`."""
        chosen = _parse_options({"return_scores": False, **options})
        given = list(iter_texts(check_text_iterable(texts)))
        windows = (given[at : at + chosen.window] for at in range(0, len(given), chosen.window))
        return [each.text for each in self._translate_windows(windows, chosen, text_only=True)]

    def stream(self, lines: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translate lines as they come, in order, each as soon as it and those before it are ready.

        The first 32 are translated before more are read, unless more are available already: in a
        list, a regular file, or an iterable with a method `ready` that returns True.
        """
        chosen = _parse_options(options)
        windows: LineWindows[str] = LineWindows(
            check_text_iterable(lines), first=FIRST_WINDOW_LINES, max_lines=chosen.window
        )
        return self._stream(windows, chosen)

    def _stream(
        self, windows: LineWindows[str], options: TranslationOptions
    ) -> Iterator[Translation]:
        """Translate windows of lines; those available together share the engine's queue."""
        line_numbers = itertools.count()
        # Samples, and what is chosen from them, are less probable than what a search finds.
        searched = not options.sample and options.mbr is None
        calibration = self.calibration if searched else None
        for available in windows:
            for each in self._translate_windows(available, options, line_numbers=line_numbers):
                yield each if calibration is None else add_confidence(each, calibration)

    def score(
        self,
        src_texts: Iterable[str],
        tgt_texts: Iterable[str],
        *,
        batch_size: int | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> list[PairScore]:
        """Return the model's log-probability of each target text given its source text."""
        sources, targets = (
            list(iter_texts(check_text_iterable(texts))) for texts in (src_texts, tgt_texts)
        )
        chosen = TranslationOptions(
            batch_size=batch_size, source_language=source_language, target_language=target_language
        )
        return score_pairs(
            self.model,
            self.tokenizers,
            self.config,
            sources,
            targets,
            batch_size=chosen.batch_size,
            directions=self._choose_directions(sources, chosen),
        )

    def explain(
        self,
        text: str,
        *,
        reference: str | None = None,
        off: Sequence[str] = (),
        attribution: str | None = "input_x_gradient",
        **options: Any,
    ) -> Explanation:
        """Translate one text and record all attention weights; a long text is cut to a segment.

        With a `reference` the target is that text instead, and its score is compared with that of
        the translation. `off` are heads that are switched off, such as ["x3.2"]; `attribution` is
        a method, or None for none. The other options are the fields of `TranslationOptions`; by
        default the second best is searched for too, so that it can be seen why it lost.
        """
        chosen, model = _parse_options(options), self.model
        if chosen.mbr is not None:
            raise ConfigError(
                [
                    "an explanation is of one search, not of minimum Bayes risk decoding; "
                    f"found mbr={chosen.mbr!r}; leave it out, or explain its output as reference"
                ]
            )
        if "nbest" not in options:
            chosen = chosen.with_runner_up(self.config.decode)
        batches = self._batch_translator
        segment, config = self._first_segment(text, chosen)
        if self.engine is not self._native:
            batches.log_native_fallback("cannot record or edit attention")
        strategy = chosen.strategy(self.config.decode)
        given = None if reference is None else batches.encode_reference(reference, chosen)
        with self._heads_off(off, len(segment.src) + 1):
            searched = batches.trace_search(segment, chosen, strategy)
            best = searched.best if given is None else given
            tokens = [*best.tokens, EOS] if best.finished else best.tokens
            target = ExplainedTarget(
                tokens=tokens,
                text=batches.detokenize([[best]])[0][0],
                forced=len(searched.prefix) if given is None else len(tokens),
                masked=searched.masked if given is None else (),
                search_sum=best.total if given is None else None,
            )
            with self._native.single_threaded():
                explanation = explain_pair(
                    model,
                    self.tokenizers,
                    config,
                    text=segment.text,
                    source=segment.src,
                    target=target,
                    penalty=strategy.penalty,
                    attribution=attribution,
                    request={
                        "text": text,
                        "source_lang": config.data.src_lang,
                        "target_lang": config.data.tgt_lang,
                        "strategy": strategy.name,
                        "beam": strategy.beam_size,
                        "length_penalty": getattr(strategy.penalty, "alpha", None),
                        "nbest": strategy.nbest,
                        "max_len": searched.max_length,
                        "prefix": list(searched.prefix),
                        "reference": reference,
                        "off": list(off),
                        "seed": chosen.seed if chosen.sample else None,
                    },
                )
        return add_search(
            explanation, searched, self.tokenizers.tgt, has_reference=given is not None
        )

    def ablate(self, explanation: Explanation, heads: Sequence[str], **options: Any) -> Ablation:
        """Return what changes when heads such as "x3.2" are switched off.

        `effect` is the change of each target token's log-probability under teacher forcing. The
        new translation is a search with the explanation's beam, length penalty and prefix; options
        that it does not state, such as constraints, are given again as `options`.
        """
        forced, before = self._forced_target(explanation), explanation.request.get("off", ())
        off = list(dict.fromkeys([*before, *heads]))
        chosen = _parse_options(self._repeat_options(explanation.request) | options)
        segment, config = self._first_segment(explanation.request["text"], chosen)
        strategy = chosen.strategy(self.config.decode)
        with self._native.single_threaded(), self._heads_off(before, forced.src_length):
            selected = select_heads(explanation.sites, [head for head in off if head not in before])
            effect = ablate_heads(forced, selected)
        with self._heads_off(off, forced.src_length):
            searched = self._batch_translator.trace_search(segment, chosen, strategy)
            best = searched.best
            tokens = [*best.tokens, EOS] if best.finished else best.tokens
            target = ExplainedTarget(
                tokens, searched.texts[0], len(searched.prefix), searched.masked, best.total
            )
            with self._native.single_threaded():
                logits = plain_logits(self.model, segment.src, tokens)
        steps = build_steps(logits, target, self.tokenizers.tgt)
        return Ablation(
            off=list(heads),
            effect=[float(each) for each in effect],
            sum_change=float(effect.sum()),
            target=tokenize_text(
                self.tokenizers.tgt, target.text, tokens, lang=config.data.tgt_lang
            ),
            steps=steps,
            score=build_score(steps, strategy.penalty),
        )

    def attribute(
        self, explanation: Explanation, method: str
    ) -> tuple[Attribution, dict[str, Array]]:
        """Return the attribution of an explanation's target by a method, and its arrays.

        The methods are input_x_gradient, integrated_gradients, value_zeroing and occlusion.
        """
        forced, off = self._forced_target(explanation), explanation.request.get("off", ())
        with self._native.single_threaded(), self._heads_off(off, forced.src_length):
            return attribution_fields(attribute_tokens(forced, method))

    def head_effects(self, explanation: Explanation) -> Iterator[tuple[str, float]]:
        """Yield each head with the change of the target's log-probability without it.

        Heads of the decoder come first; they come in batches, as they are computed.
        """
        forced, off = self._forced_target(explanation), explanation.request.get("off", ())
        ids = {site.path: site.id for site in explanation.sites}
        # Switched off and run within `next`, not between: a generator's context is its caller's.
        for batch in head_batches(forced):
            with self._native.single_threaded(), self._heads_off(off, forced.src_length):
                effects = measure_head_batch(forced, batch)
            yield from ((f"{ids[each.path]}.{each.head}", each.total) for each in effects)

    def _first_segment(self, text: str, options: TranslationOptions) -> tuple[Segment, Config]:
        """Return the first segment of a text to explain, and the settings with its languages.

        Raise DataError if it has none.
        """
        texts = list(iter_texts([text]))
        directions = self._choose_directions(texts, options)
        [line] = split_lines(
            texts,
            self.tokenizers.src,
            longest=self._batch_translator.max_segment_tokens,
            directions=directions,
        )
        if not line.segments:
            raise DataError(
                "a text to explain must hold words", found=repr(text), fix="pass a text with words"
            )
        if directions is None:
            return line.segments[0], self.config
        [(source, target)] = directions
        return line.segments[0], self.config.replace(data={"src_lang": source, "tgt_lang": target})

    def _repeat_options(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of an explanation's search, its languages included."""
        options = _repeat_options(request)
        if self._chooser.has_tags:
            named = {name: request.get(f"{name}_lang") for name in ("source", "target")}
            options |= {f"{name}_language": value for name, value in named.items() if value}
        return options

    @contextlib.contextmanager
    def _heads_off(self, names: Sequence[str], sources: int) -> Iterator[None]:
        """Switch heads off within the block, for this thread, if there are any."""
        if not names:
            yield
            return
        sites = [each.site for each in locate_sites(self.model)]
        with heads_switched_off(self.model, select_heads(sites, names), sources=sources):
            yield

    def _forced_target(self, explanation: Explanation) -> ForcedTarget:
        """Return an explanation's source and target; raise DataError if they are not ours."""
        source, target = (
            [token.id for token in side.tokens] for side in (explanation.source, explanation.target)
        )
        digest = model_digest(self.model, self.tokenizers)
        if explanation.model.get("digest", digest) != digest:
            raise DataError(
                "an explanation must be of this model",
                found=f"one of another, {explanation.model.get('name') or 'without a name'}",
                fix="explain the text with this model first",
            )
        return ForcedTarget.build(self.model, source, target)

    def branch(
        self, explanation: Explanation, step: int, token: int, **options: Any
    ) -> Explanation:
        """Explain what follows if another token stands at a step; the tokens before it stay.

        It is a search with the explanation's beam and length penalty, and with the same heads off.
        """
        request = explanation.request
        repeated = self._repeat_options(request) | {"off": request.get("off", ())}
        forced = {"prefix_ids": branch_prefix(explanation, step, token)}
        return self.explain(request["text"], **(repeated | options | forced))

    def add_branches(self, explanation: Explanation, per_step: int = 2) -> Explanation:
        """Return the explanation with branches to the best alternatives of each step.

        A page that was written to a file shows these; a served one asks for any.
        """
        chosen = list_branches(explanation, per_step)
        forced, off = self._forced_target(explanation), explanation.request.get("off", ())
        with self._heads_off(off, forced.src_length), self._native.single_threaded():
            branches = compute_branches(self, explanation, chosen) if chosen else {}
        return dataclasses.replace(explanation, branches={**explanation.branches, **branches})

    def search_prefixes(
        self, explanation: Explanation, prefixes: Sequence[Sequence[int]]
    ) -> list[tuple[Hypothesis, str]]:
        """Search the source of an explanation once with each prefix; return the best of each."""
        chosen = _parse_options(self._repeat_options(explanation.request) | {"prefix_ids": None})
        segment, _ = self._first_segment(explanation.request["text"], chosen)
        return self._batch_translator.search_prefixes(
            segment, prefixes, chosen.strategy(self.config.decode)
        )

    def _translate_windows(
        self,
        windows: Iterable[Sequence[str]],
        options: TranslationOptions,
        *,
        line_numbers: Iterator[int] | None = None,
        text_only: bool = False,
    ) -> Iterator[Translation]:
        """Translate windows of texts by batches; yield lines in order once complete."""
        strategy = options.strategy(self.config.decode)
        engine = self._batch_translator.select_engine(
            strategy,
            constrained=bool(options.constraints or options.no_repeat_ngram_size),
        )
        pending_lines: deque[SegmentedLine] = deque()
        translations: dict[int, Translation] = {}  # by sample id
        numbers = itertools.count() if line_numbers is None else line_numbers

        def batches() -> Iterator[list[Segment]]:
            for texts in windows:
                lines = split_lines(
                    texts,
                    self.tokenizers.src,
                    line_numbers=numbers,
                    longest=self._batch_translator.max_segment_tokens,
                    directions=self._choose_directions(texts, options),
                )
                if options.constraints:
                    _check_unsplit(lines)
                pending_lines.extend(lines)
                yield from self._group_batches(lines, options, strategy, engine)

        def translate(batch: list[Segment]) -> tuple[list[Segment], list[Translation]]:
            return batch, self._batch_translator.translate_batch(
                batch, options, strategy, text_only=text_only
            )

        # A GPU computes the next batch while this thread detokenizes the last one. A thread that
        # records or edits the model must run it itself, batch by batch.
        has_hooks = self._native.has_hooks
        run_ahead = engine is self._native and self._native.overlaps_host and not has_hooks
        threads = 1 if has_hooks else engine.client_threads
        if threads > 1 or run_ahead:
            results = map_in_threads(translate, batches(), threads, run_ahead=run_ahead)
        else:
            results = map(translate, batches())
        for batch, translated in results:
            translations |= {
                segment.sample_id: translation
                for segment, translation in zip(batch, translated, strict=True)
            }
            yield from _pop_complete(pending_lines, translations)
        yield from _pop_complete(pending_lines, translations)  # blank lines are in no batch

    def _group_batches(
        self,
        lines: Sequence[SegmentedLine],
        options: TranslationOptions,
        strategy: SearchStrategy,
        engine: Engine,
    ) -> list[list[Segment]]:
        """Group segments of similar lengths into batches that suit the engine."""
        segments = [segment for line in lines for segment in line.segments]
        lengths = [len(segment.src) + 1 for segment in segments]
        rows_per_sentence = strategy.rows_per_sentence
        # At most an equal part for each worker: none should wait while another has twice its work.
        tokens_per_worker = -(-rows_per_sentence * sum(lengths) // engine.workers) or 1
        groups = group_by_length(
            lengths,
            batch_tokens=min(
                engine.batch_tokens or self.config.decode.batch_tokens, tokens_per_worker
            ),
            rows_per_sentence=rows_per_sentence,
            max_rows=options.batch_size,
        )
        return [[segments[number] for number in group] for group in groups]


def _repeat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an explanation's search, as far as its request states them."""
    options = {name: request.get(name) for name in ("length_penalty", "nbest")}
    options["prefix_ids"] = request.get("prefix") or None
    if request.get("strategy") == "sampling":
        options |= {"sample": True, "seed": request.get("seed")}
    else:
        options["beam"] = request.get("beam")
    return {name: value for name, value in options.items() if value is not None}


def _check_unsplit(lines: Sequence[SegmentedLine]) -> None:
    """Raise DataError for a line in several segments: constraints are on whole lines."""
    for line in lines:
        if len(line.segments) > 1:
            tokens = sum(len(segment.src) for segment in line.segments)
            raise DataError(
                "constraints need lines that are translated whole",
                found=f"{tokens:,} tokens in {len(line.segments)} segments "
                f"on line {line.segments[0].line + 1}",
                fix="shorten or split the line, or leave the constraints out",
            )


def _pop_complete(
    pending_lines: deque[SegmentedLine], translations: dict[int, Translation]
) -> Iterator[Translation]:
    """Yield lines, in order, as long as all of their segments are translated."""
    while pending_lines and all(
        segment.sample_id in translations for segment in pending_lines[0].segments
    ):
        line = pending_lines.popleft()
        yield line.translation([translations.pop(each.sample_id) for each in line.segments])


def _parse_options(given: dict[str, Any]) -> TranslationOptions:
    """Return the options; raise ConfigError for unknown names, with the nearest known one."""
    known = list(TranslationOptions.__dataclass_fields__)
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError(
            [
                f"there is no option {name!r} for translating; {suggest_name(name, known)}"
                for name in wrong
            ]
        )
    return TranslationOptions(**given)
