"""Batches of segments on an engine: search, detokenization, alignment, and the fallbacks."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dragoman.config import Config
from dragoman.data.inference_batches import group_by_length
from dragoman.decoding.beam_trace import BeamObserver
from dragoman.decoding.constraint_automaton import (
    CompiledConstraints,
    NotBlank,
    SentenceConstraints,
    check_constraints,
)
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.no_repeat_ngram import NoRepeatNgram
from dragoman.decoding.output_constraint_definitions import Constraint
from dragoman.decoding.search_interface import (
    SearchRequest,
    SearchStrategy,
    TokenConstraints,
)
from dragoman.decoding.token_surface_forms import TokenCharacters
from dragoman.errors import ConfigError, DataError
from dragoman.explain.attention_and_logit_capture import align_batch
from dragoman.explain.explanation import AttentionWeights
from dragoman.explain.translation_explanation_builder import TracedSearch
from dragoman.inference.dragoman_model_engine import NativeEngine
from dragoman.inference.engine_protocol import Engine
from dragoman.inference.ensemble_engine import EnsembleEngine
from dragoman.inference.long_line_segments import Segment
from dragoman.inference.minimum_bayes_risk_ranking import rank_candidates
from dragoman.inference.translation_options import TranslationOptions
from dragoman.inference.translation_result import Translation
from dragoman.runtime.out_of_memory import BatchHalving, is_out_of_memory
from dragoman.text.sentencepiece_tokenizer import Tokenizers, normalize, replace_control_chars
from dragoman.text.special_tokens import EOS, UNK

if TYPE_CHECKING:
    from dragoman.evaluate.minimum_bayes_risk_utility import PairwiseMetric

_MAX_PATTERN_TOKENS = 8
_MIN_REPEATS = 5  # in a row: more than in any sentence
_MIN_REPEATED_TOKENS = 12  # in total, so that "ha ha ha ha ha" is not reported
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
        self._halving = BatchHalving()
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

        def search_on_cpu(segments: Sequence[Segment]) -> list[Translation]:
            self._log_once(
                "out of memory for a single sentence: sentences that do not fit are translated "
                "on the CPU, and the result is the same"
            )
            return self._cpu_fallback.translate_batch(
                segments, options, strategy, text_only=text_only
            )

        def log_halving(count: int) -> None:
            self._log_once(
                "out of memory with a batch of %d sentences: batches that do not fit are "
                "translated in halves, and the result is the same",
                count,
            )

        return self._halving.run(
            segments,
            lambda part: self._search_batch(part, options, strategy, text_only=text_only),
            padded_tokens=_padded_tokens,
            fallback=search_on_cpu,
            can_fall_back=lambda: self.native.device.type != "cpu",  # loads the native model
            on_halving=log_halving,
        )

    def select_engine(
        self, strategy: SearchStrategy, longest: int = 0, *, constrained: bool = False
    ) -> Engine:
        """Return the engine, or the native one for requests that the engine does not support."""
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
        """Return the forced tokens; raise DataError for tokens outside the model's vocabulary."""
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
                self._compiled_constraints[key] = CompiledConstraints(key, self._token_characters)
            return self._compiled_constraints[key]

    @functools.cached_property
    def _token_characters(self) -> TokenCharacters:
        return TokenCharacters.of(self._tokenizers.tgt)

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
        languages = [segment.target_language or self._config.data.tgt_lang for segment in segments]
        ranked = [
            rank_candidates(
                hypotheses,
                row_texts,
                self._pairwise_metric(options.mbr, language),
                sampled=options.draws_samples,
            )
            for hypotheses, row_texts, language in zip(found, texts, languages, strict=True)
        ]
        return _SearchedBatch(
            [each.hypotheses[: options.nbest] for each in ranked],
            [each.texts[: options.nbest] for each in ranked],
            [each.utilities[: options.nbest] for each in ranked],
        )

    def _pairwise_metric(self, name: str, language: str) -> PairwiseMetric:
        """Return the utility of minimum Bayes risk decoding into a language."""
        from dragoman.evaluate.minimum_bayes_risk_utility import (
            build_pairwise_metric,  # imports sacreBLEU
        )

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


class Repetition(NamedTuple):
    """A pattern of tokens that an output repeats."""

    pattern: tuple[int, ...]
    times: int


def find_repetition(tokens: Sequence[int]) -> Repetition | None:
    """Return the first short pattern repeated many times in a row; None if there is none."""
    if len(tokens) - len(set(tokens)) < _MIN_REPEATED_TOKENS - 2:  # a quick test first
        return None
    for length in range(1, _MAX_PATTERN_TOKENS + 1):
        run = 0
        for at in range(length, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - length] else 0
            times = run // length + 1
            if times >= _MIN_REPEATS and run + length >= _MIN_REPEATED_TOKENS:
                start = at - run - length + 1
                while at + 1 < len(tokens) and tokens[at + 1] == tokens[at + 1 - length]:
                    at, run = at + 1, run + 1
                return Repetition(tuple(tokens[start : start + length]), run // length + 1)
    return None
