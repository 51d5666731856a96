"""The translator: text in, translations out; batches run on the chosen engine, with fallbacks."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.bundle import Bundle
from dragoman.bundle.bundle import build_loaded_model
from dragoman.config import Config
from dragoman.data.corpus import ParallelFiles
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.padded_batch import group_by_length
from dragoman.decoding.search import SearchStrategy
from dragoman.errors import ConfigError, DataError, suggest_name
from dragoman.explain import Explanation
from dragoman.explain.attention_maps import align_batch, record_attention
from dragoman.explain.explanation import AttentionWeights
from dragoman.inference.engine import Engine, SearchRequest
from dragoman.inference.engine_selection import open_engines, requires_cpu
from dragoman.inference.input_windows import (
    FIRST_WINDOW_LINES,
    LineWindow,
    LineWindows,
    check_text_iterable,
    iter_texts,
)
from dragoman.inference.native_engine import NativeEngine
from dragoman.inference.pair_scores import PairScore, score_pairs
from dragoman.inference.translation import (
    Segment,
    SegmentedLine,
    Translation,
    find_repetition,
    replace_control_chars,
    split_lines,
)
from dragoman.inference.translation_options import TranslationOptions
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.runtime.device import choose_device, run_with_cpu_fallback
from dragoman.runtime.memory import RETRY_FRACTION, is_out_of_memory, release_memory
from dragoman.runtime.threads import map_in_threads
from dragoman.text.special_tokens import EOS
from dragoman.text.tokenizer import Tokenizers

logger = logging.getLogger(__name__)


class BatchOutputs(NamedTuple):
    """What a search found for a batch."""

    hypotheses: list[list[Hypothesis]]  # of each part, best first
    texts: list[list[str]]  # theirs
    retried: set[int]  # the parts whose first answer was empty


class SearchRunner:
    """Asks an engine for outputs; whatever happens to it is said once, and the outputs are the same."""

    def __init__(
        self, native: NativeEngine, engine: Engine, tokenizers: Tokenizers, config: Config
    ) -> None:
        self.native, self.engine = native, engine
        self._tokenizers, self._config = tokenizers, config
        self._logged = set[str]()
        self._log_lock, self._fallback_lock = threading.Lock(), threading.Lock()
        self._cpu_runner: SearchRunner | None = None
        self._max_batch_tokens = (
            sys.maxsize
        )  # padded places of a batch that fit into the memory, as far as was found out
        # Learned positions end somewhere, and an end takes one as well.
        self._max_positions = (
            config.model.max_positions - 1 if config.model.positions == "learned" else sys.maxsize
        )
        self.longest = min(config.data.max_length, self._max_positions)  # pieces of a part

    def search_segments(
        self, segments: Sequence[Segment], options: TranslationOptions
    ) -> BatchOutputs:
        """Search for a batch; one that does not fit into the memory is halved, and a sentence that does not is left to the CPU."""
        if len(segments) > 1 and _padded_tokens(segments) > self._max_batch_tokens:
            return self._search_halves(segments, options)
        try:
            return self._search_batch(segments, options)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or (
                len(segments) == 1 and self.native.device.type == "cpu"
            ):
                raise
        release_memory()
        if len(segments) == 1:
            self._log_once(
                "out of memory for one sentence alone: the CPU translates what does not fit, and the result is the same"
            )
            return self._cpu_fallback.search_segments(segments, options)
        self._max_batch_tokens = int(RETRY_FRACTION * _padded_tokens(segments))
        self._log_once(
            "out of memory with %d sentences at once: batches that do not fit are translated in halves, and the result is the same",
            len(segments),
        )
        return self._search_halves(segments, options)

    def select_engine(self, strategy: SearchStrategy, longest: int = 0) -> Engine:
        """Choose who does it: the engine, or the native one where that cannot."""
        engine = self.engine
        if engine is not self.native and self.native.has_hooks:
            self.log_native_fallback("shows nothing of its inside")
            return self.native
        reason = engine.unsupported_reason(strategy, longest)
        if not reason:
            return engine
        self.log_native_fallback(reason)
        return self.native

    def log_native_fallback(self, reason: str) -> None:
        """Say, once for each reason, that the native engine stands in."""
        self._log_once(
            f"the engine {self.engine.name} {reason}: the native engine does it", level=logging.INFO
        )

    def build_request(
        self, segments: Sequence[Segment], options: TranslationOptions, min_length: int = 0
    ) -> SearchRequest:
        """Say what is asked of an engine; a prefix is forced on the first part of each line."""
        prefix = (
            self._tokenizers.tgt.encode(options.prefix)
            if options.prefix and options.prefix.strip()
            else []
        )
        return SearchRequest(
            sources=[segment.src for segment in segments],
            limits=[self._max_output_tokens(segment, len(prefix)) for segment in segments],
            prefixes=[prefix if segment.index == 0 else [] for segment in segments],
            strategy=options.strategy(self._config.decode),
            lines=[segment.key for segment in segments],
            min_length=min_length,
            return_scores=options.return_scores,
        )

    def detokenize(self, found: Sequence[Sequence[Hypothesis]]) -> list[list[str]]:
        """Spell hypotheses, whatever bytes the model wrote; all at once, for each call of the tokenizer starts a thread."""
        spelt = iter(
            self._tokenizers.tgt.decode_batch(
                [each.tokens for hypotheses in found for each in hypotheses]
            )
        )
        return [[replace_control_chars(next(spelt)) for _ in hypotheses] for hypotheses in found]

    def _search_halves(
        self, segments: Sequence[Segment], options: TranslationOptions
    ) -> BatchOutputs:
        """Search for a batch in two."""
        half = len(segments) // 2
        first, second = (
            self.search_segments(segments[:half], options),
            self.search_segments(segments[half:], options),
        )
        retried = first.retried | {half + at for at in second.retried}
        return BatchOutputs(
            [*first.hypotheses, *second.hypotheses], [*first.texts, *second.texts], retried
        )

    def _search_batch(
        self, segments: Sequence[Segment], options: TranslationOptions
    ) -> BatchOutputs:
        """Search for a batch; an empty answer to a text that is not empty is asked for once more."""
        found = self._run_engine(self.build_request(segments, options))
        texts = self.detokenize(found)
        empty = [at for at, spelt in enumerate(texts) if not spelt[0].strip()]
        if empty:
            again = self._run_engine(
                self.build_request([segments[at] for at in empty], options, min_length=1)
            )
            for at, hypotheses, spelt in zip(empty, again, self.detokenize(again), strict=True):
                found[at], texts[at] = hypotheses, spelt
        return BatchOutputs(found, texts, set(empty))

    def _run_engine(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Ask the engine for a batch; one of another program's that fails is not asked again."""
        engine = self.select_engine(request.strategy, request.longest)
        try:
            return engine.generate(request)
        except RuntimeError as error:
            if engine is self.native or is_out_of_memory(error):
                raise
            found = next(iter(str(error).splitlines()), "")[:160]
        self._log_once(
            f"the engine {engine.name} failed ({found}): the native engine is used, and the result is the same but for rounding"
        )
        self.engine = self.native
        return self.native.generate(request)

    @property
    def _cpu_fallback(self) -> SearchRunner:
        """The same model on the CPU, for what a GPU has no room for."""
        with self._fallback_lock:
            if self._cpu_runner is None:
                weights = {
                    name: tensor.cpu() for name, tensor in self.native.model.state_dict().items()
                }
                model = build_loaded_model(self._config, self._tokenizers, weights)
                native = NativeEngine(lambda: model)
                self._cpu_runner = SearchRunner(native, native, self._tokenizers, self._config)
        return self._cpu_runner

    def _max_output_tokens(self, segment: Segment, prefix: int) -> int:
        """The most pieces of an output: a matter of its own source alone."""
        return min(
            int(self._config.decode.max_length_ratio * len(segment.src))
            + self._config.decode.max_length_extra
            + prefix,
            self._max_positions,
        )

    def _log_once(self, line: str, *values: object, level: int = logging.WARNING) -> None:
        """Say something once, whichever of the workers meets it first."""
        with self._log_lock:
            if line not in self._logged:
                self._logged.add(line)
                logger.log(level, line, *values)


def _padded_tokens(segments: Sequence[Segment]) -> int:
    """Count the padded places of a batch's sources, their ends included."""
    return len(segments) * (1 + max(len(segment.src) for segment in segments))


class Translator:
    """A trained model that translates, from one directory: `Translator.load("my-model").translate(["Guten Morgen."])`."""

    def __init__(
        self,
        model: EncoderDecoder | NativeEngine,
        tokenizers: Tokenizers,
        config: Config,
        *,
        engine: Engine | None = None,
    ) -> None:
        self._native = model if isinstance(model, NativeEngine) else NativeEngine(lambda: model)
        self.tokenizers, self.config = tokenizers, config
        self._search_runner = SearchRunner(
            self._native, self._native if engine is None else engine, tokenizers, config
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "auto",
        engine: str = "auto",
        precision: str | None = None,
        measure: bool = False,
        shortlist: tuple[str | Path, str | Path] | None = None,
    ) -> Translator:
        """Load a model directory; the device `auto` is a GPU where there is one.

        The precision is `float32`, on a CPU also `int8`, on a GPU also `float16` or `bfloat16`; by default float16 on a GPU that
        multiplies it, else float32. The engine `auto` never changes it: an engine that the directory holds is used on a CPU only if it
        computes in that precision, was made on this machine, and the model's own search is greedy; with `measure`, only if it is the
        quickest. The engine may also be `native`, or one of the directory's by name, such as `ctranslate2`, whatever it computes in;
        one that was made elsewhere is tried in a child process first.

        A `shortlist`, two files of text and its translation such as the model was trained on, keeps each output on a CPU to the pieces
        that go with its source's: quicker where the vocabulary is large, and now and then another output.
        """
        listed = (
            None
            if shortlist is None
            else ParallelFiles(Path(shortlist[0]), Path(shortlist[1]), on_bad_line="skip")
        )

        def on(where: torch.device) -> Translator:
            bundle = Bundle.load(path, device=where)
            by = TranslationOptions().strategy(bundle.config.decode) if measure else None
            native, used = open_engines(
                bundle,
                where,
                requested=engine,
                precision=precision,
                benchmark_strategy=by,
                shortlist=listed,
            )
            return cls(native, bundle.tokenizers, bundle.config, engine=used)

        return run_with_cpu_fallback(
            choose_device(
                "cpu"
                if device == "auto" and (shortlist or requires_cpu(engine, precision))
                else device
            ),
            on,
        )

    def __repr__(self) -> str:
        """Name languages, recipe and engine in one short line, without loading weights that were not needed yet."""
        data, recipe = self.config.data, self.config.recipe or "none"
        languages = (
            f"{data.src_lang:.20} to {data.tgt_lang:.20}, "
            if data.src_lang and data.tgt_lang
            else ""
        )
        return f"Translator({languages}recipe {recipe:.60}, engine {self.engine.name})"

    @property
    def engine(self) -> Engine:
        """What translates; one that fails on the way is replaced by the native one."""
        return self._search_runner.engine

    @property
    def model(self) -> EncoderDecoder:
        """The model itself, whichever engine translates."""
        return self._native.model

    @property
    def device(self) -> torch.device:
        """Say where the model is."""
        return self._native.device

    def translate(self, texts: Iterable[str], **options: Any) -> list[str]:
        """Translate texts, one for one and in order; the options are those of `Options`."""
        chosen = _parse_options({"return_scores": False, **options})
        return [
            each.text
            for each in self._stream(
                check_text_iterable(texts), chosen, first=chosen.window, text_only=True
            )
        ]

    def stream(self, lines: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translate lines as they come, in order, each as soon as it and those before it are ready.

        The first 32 are answered before more are read, unless more are there already: in a list, a regular file, or an object of lines
        with a method `ready` that says so.
        """
        return self._stream(check_text_iterable(lines), _parse_options(options))

    def score(
        self, src_texts: Iterable[str], tgt_texts: Iterable[str], *, batch_size: int | None = None
    ) -> list[PairScore]:
        """Return the log-probability of each target text given its source text, by the model itself and in its own precision."""
        sources, targets = (
            list(iter_texts(check_text_iterable(texts))) for texts in (src_texts, tgt_texts)
        )
        chosen = TranslationOptions(batch_size=batch_size)
        return score_pairs(
            self.model, self.tokenizers, self.config, sources, targets, batch_size=chosen.batch_size
        )

    def explain(self, text: str, **options: Any) -> Explanation:
        """Translate one text and record every attention on the way; a long one is cut to its first part."""
        chosen = _parse_options(options)
        [line] = split_lines(
            list(iter_texts([text])), self.tokenizers.src, longest=self._search_runner.longest
        )
        if not line.segments:
            raise DataError(
                "a text to explain must hold words", found=repr(text), fix="give it some"
            )
        segment = line.segments[0]
        if self.engine is not self._native:
            self._search_runner.log_native_fallback("shows nothing of its inside")
        [[best, *_]] = self._native.generate(self._search_runner.build_request([segment], chosen))
        with self._native.single_threaded():
            seen = record_attention(self.model, segment.src, best.tokens, finished=best.finished)
        return Explanation(
            text=segment.text,
            translation=self._search_runner.detokenize([[best]])[0][0],
            score=best.score,
            src_tokens=self.tokenizers.src.tokens([*segment.src, EOS]),
            tgt_tokens=self.tokenizers.tgt.tokens(
                [*best.tokens, EOS] if best.finished else best.tokens
            ),
            log_probs=seen.log_probs,
            attentions=seen.attentions,
        )

    def _stream(
        self,
        lines: Iterable[Any],
        options: TranslationOptions,
        first: int = FIRST_WINDOW_LINES,
        *,
        text_only: bool = False,
    ) -> Iterator[Translation]:
        """Go through the lines in windows; within one, like lengths are translated together. What is `bare` has only its text."""
        for windows in LineWindows(lines, first=first, max_lines=options.window):
            yield from self._translate_windows(map(self._split_window, windows), options, text_only)

    def _split_window(self, window: LineWindow) -> list[SegmentedLine]:
        """Cut the lines of a window."""
        return split_lines(
            window.texts,
            self.tokenizers.src,
            first=window.first,
            longest=self._search_runner.longest,
        )

    def _translate_windows(
        self,
        windows: Iterable[Sequence[SegmentedLine]],
        options: TranslationOptions,
        text_only: bool,
    ) -> Iterator[Translation]:
        """Translate windows batch by batch, handing on each line when it is its turn and it is whole."""
        engine = self._search_runner.select_engine(options.strategy(self.config.decode))
        pending_lines: deque[SegmentedLine] = deque()
        answers: dict[int, Translation] = {}

        def batches() -> Iterator[list[Segment]]:
            for window in windows:
                pending_lines.extend(window)
                yield from self._batches(window, options, engine)

        def find(
            batch: list[Segment],
        ) -> tuple[list[Segment], BatchOutputs, list[AttentionWeights] | None]:
            found = self._search_runner.search_segments(batch, options)
            return (
                batch,
                found,
                self._align_batch(batch, found) if options.alignment and not text_only else None,
            )

        # A GPU computes the next batch while this thread is busy with the words of the last. Whoever records or edits the model
        # does so in this thread alone, so it does all the work, in order.
        has_hooks = self._native.has_hooks
        run_ahead = engine is self._native and self.device.type == "cuda" and not has_hooks
        for batch, found, aligned in map_in_threads(
            find, batches(), 1 if has_hooks else engine.client_threads, run_ahead=run_ahead
        ):
            answers |= {
                segment.key: answer
                for segment, answer in zip(
                    batch, self._build_translations(batch, found, aligned, text_only), strict=True
                )
            }
            yield from self._pop_complete(pending_lines, answers)
        yield from self._pop_complete(pending_lines, answers)  # lines without words make no batch

    @staticmethod
    def _pop_complete(
        pending_lines: deque[SegmentedLine], answers: dict[int, Translation]
    ) -> Iterator[Translation]:
        """Hand on lines, in order, as long as all of their parts are answered."""
        while pending_lines and all(
            segment.key in answers for segment in pending_lines[0].segments
        ):
            line = pending_lines.popleft()
            yield line.translation([answers.pop(segment.key) for segment in line.segments])

    def _batches(
        self, lines: Sequence[SegmentedLine], options: TranslationOptions, engine: Engine
    ) -> list[list[Segment]]:
        """Put the parts of like lengths together."""
        segments = [segment for line in lines for segment in line.segments]
        lengths, rows_per_sentence = (
            [len(segment.src) + 1 for segment in segments],
            options.rows_per_sentence(self.config.decode),
        )
        groups = group_by_length(
            lengths,
            # No worker should stand by while another has twice its work.
            batch_tokens=min(
                engine.batch_tokens or self.config.decode.batch_tokens,
                -(-rows_per_sentence * sum(lengths) // engine.workers) or 1,
            ),
            rows_per_sentence=rows_per_sentence,
            max_rows=options.batch_size,
        )
        return [[segments[number] for number in group] for group in groups]

    def _align_batch(
        self, segments: Sequence[Segment], found: BatchOutputs
    ) -> list[AttentionWeights] | None:
        """Align the best outputs of a batch with their sources; None if the model has no cross-attention."""
        with self._native.single_threaded():
            return align_batch(
                self.model,
                [segment.src for segment in segments],
                [hypotheses[0].tokens for hypotheses in found.hypotheses],
            )

    def _build_translations(
        self,
        segments: Sequence[Segment],
        found: BatchOutputs,
        aligned: list[AttentionWeights] | None,
        text_only: bool,
    ) -> list[Translation]:
        """Turn what was found for a batch into translations, with their alignments if there are any."""
        if text_only:
            return [Translation(text=texts[0]) for texts in found.texts]
        return [
            self._build_translation(
                segment,
                hypotheses,
                texts,
                retried=at in found.retried,
                alignment=None if aligned is None else aligned[at],
            )
            for at, (segment, hypotheses, texts) in enumerate(
                zip(segments, found.hypotheses, found.texts, strict=True)
            )
        ]

    def _build_translation(
        self,
        segment: Segment,
        hypotheses: Sequence[Hypothesis],
        texts: Sequence[str],
        *,
        retried: bool,
        alignment: Any,
    ) -> Translation:
        """Dress the hypotheses of a part, and their texts, as a translation."""
        src_tokens = self.tokenizers.src.tokens([*segment.src, EOS])

        def build(hypothesis: Hypothesis, text: str, **more: Any) -> Translation:
            return Translation(
                text=text,
                score=hypothesis.score,
                tokens=self.tokenizers.tgt.tokens(hypothesis.tokens),
                log_probs=hypothesis.log_probs,
                src_tokens=src_tokens,
                **more,
            )

        best, notes = hypotheses[0], []
        if retried:
            notes.append("the model's first answer was empty: this is its best answer that is not")
        if not best.finished:
            notes.append(
                f"stopped at {len(best.tokens)} pieces, the limit for this text (decode.max_length_ratio, decode.max_length_extra): its end is missing"
            )
        repetition = find_repetition(best.tokens)
        if repetition and not find_repetition(segment.src):
            pattern = self.tokenizers.tgt.decode(repetition.pattern).strip()
            notes.append(
                f"the output goes round in circles: {pattern!r} comes {repetition.times} times"
            )
        alternatives = [build(*each) for each in zip(hypotheses, texts, strict=True)]
        return build(best, texts[0], alignment=alignment, alternatives=alternatives, notes=notes)


def _parse_options(given: dict[str, Any]) -> TranslationOptions:
    """Check the options' names, and answer a wrong one with the nearest right one."""
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
