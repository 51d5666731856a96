"""Translator: text in, translations, scores and explanations out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dragoman.bundle import Bundle
from dragoman.bundle.format import model_paths
from dragoman.config import Config, DecodeConfig
from dragoman.config.translation_directions import Direction
from dragoman.data.inference_batches import group_by_length
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.decoding.search_interface import SearchStrategy
from dragoman.errors import ConfigError, DataError
from dragoman.evaluate.confidence_calibration import ConfidenceMap
from dragoman.inference.capitals_and_final_stops import add_final_stops, recase_capitals
from dragoman.inference.dragoman_model_engine import NativeEngine
from dragoman.inference.engine_protocol import Engine
from dragoman.inference.engine_selection import open_engines, requires_cpu
from dragoman.inference.ensemble_engine import EnsembleEngine
from dragoman.inference.explainable_translator import TranslationExplainer
from dragoman.inference.input_line_buffer import FIRST_BUFFER_LINES, LineBuffers
from dragoman.inference.long_line_segments import (
    Segment,
    SegmentedLine,
    check_text_iterable,
    is_foreign,
    iter_texts,
    mark_adapted,
    split_lines,
)
from dragoman.inference.single_batch_translator import BatchTranslator
from dragoman.inference.translation_direction_choice import DirectionChooser
from dragoman.inference.translation_log_probabilities import PairScore, score_pairs
from dragoman.inference.translation_options import TranslationOptions, parse_options
from dragoman.inference.translation_result import Translation, add_confidence
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.runtime.device import choose_device, run_with_cpu_fallback
from dragoman.runtime.thread_pool_map import map_in_threads
from dragoman.text.language_identification import LanguageIdentifier
from dragoman.text.sentencepiece_tokenizer import Tokenizers


class Translator(TranslationExplainer):
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
        self._chooser = DirectionChooser(
            config,
            identifier,
            is_foreign=lambda text: is_foreign(tokenizers.src.encode(text), tokenizers.src),
        )
        self.target_language = target_language  # of calls that name none
        self._native = model if isinstance(model, NativeEngine) else NativeEngine(lambda: model)
        self.tokenizers, self.config = tokenizers, config
        self._batch_translator = BatchTranslator(
            self._native, self._native if engine is None else engine, tokenizers, config
        )

    @classmethod
    def load(
        cls,
        path: str | Path | Sequence[str | Path] | None = None,
        *,
        device: str | torch.device = "auto",
        engine: str = "auto",
        precision: str | None = None,
        measure: bool = False,
        shortlist: tuple[str | Path, str | Path] | None = None,
        target_language: str | None = None,
    ) -> Translator:
        """Load a model directory, or several as an ensemble that decodes by their mean.

        Without a path it is the built-in model. The device `auto` is a GPU if there is one.

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

        paths = model_paths(path)
        if len(paths) != 1:
            return cls._load_ensemble(
                paths,
                device,
                engine=engine,
                precision=precision,
                shortlist=shortlist,
                target_language=target_language,
            )

        def load_on(where: torch.device) -> Translator:
            bundle = Bundle.load(paths[0], device=where)
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
        given = list(iter_texts(check_text_iterable(texts)))
        given = [*recase_capitals(given, self.config.decode)]
        return [self._chooser.identify(text) for text in given]

    def _choose_directions(
        self, texts: Sequence[str], options: TranslationOptions
    ) -> list[Direction] | None:
        """Return the direction of each text; None for a model without language tags."""
        target = options.target_language or self.target_language
        chosen = self._chooser.choose(texts, options.source_language, target)
        return chosen if self._chooser.has_tags else None

    def _check_language(
        self, line: SegmentedLine, text: str, direction: Direction
    ) -> SegmentedLine:
        """Return a line with what is known of its language beyond the one identified for it."""
        if line.is_foreign:  # whatever was identified, it is not
            return replace(line, direction=direction._replace(source=""))
        return replace(line, other_language=self._chooser.other_language(text, direction))

    def misplaced_lines(
        self,
        texts: Sequence[str],
        *,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> list[int]:
        """Return the indices of texts in another language than that to translate from."""
        named = TranslationOptions(source_language=source_language, target_language=target_language)
        texts = recase_capitals(texts, self.config.decode)
        directions = self._choose_directions(texts, named)
        lines = split_lines(
            texts,
            self.tokenizers.src,
            longest=self._batch_translator.max_segment_tokens,
            directions=directions,
        )
        if directions is not None:
            lines = [*map(self._check_language, lines, texts, directions)]
        return [at for at, line in enumerate(lines) if line.is_foreign or line.other_language]

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of source texts, with the tags of their target languages."""
        rows = self.tokenizers.src.encode_batch([text.strip() for text in texts])
        directions = self._choose_directions(texts, TranslationOptions())
        if directions is None:
            return rows
        tag_ids = self.tokenizers.src.tag_ids
        return [[tag_ids[each.target], *row] for each, row in zip(directions, rows, strict=True)]

    def translate(self, texts: Iterable[str], **options: Any) -> list[str]:
        """Translate texts, in order; the options are the fields of `TranslationOptions`."""
        chosen = parse_options({"return_scores": False, **options})
        given = list(iter_texts(check_text_iterable(texts)))
        size = chosen.buffer_size
        buffers = (given[at : at + size] for at in range(0, len(given), size))
        return [each.text for each in self._translate_buffers(buffers, chosen, text_only=True)]

    def stream(self, lines: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translate lines as they come, in order, each as soon as it and those before it are ready.

        No line waits for others in a list, a regular file, or an iterable with a method `ready`,
        which returns whether another is available. Of other iterables the first 32 are translated
        together.
        """
        chosen = parse_options(options)
        buffers: LineBuffers[str] = LineBuffers(
            check_text_iterable(lines), first=FIRST_BUFFER_LINES, max_lines=chosen.buffer_size
        )
        return self._stream(buffers, chosen)

    def _stream(
        self, buffers: LineBuffers[str], options: TranslationOptions
    ) -> Iterator[Translation]:
        """Translate buffers of lines; those available together share the engine's queue."""
        line_numbers = itertools.count()
        # Samples, and the choice among them, are less probable than a search's outputs.
        searched = not options.sample and options.mbr is None
        calibration = self.calibration if searched else None
        for available in buffers:
            for each in self._translate_buffers(available, options, line_numbers=line_numbers):
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

    def _translate_buffers(
        self,
        buffers: Iterable[Sequence[str]],
        options: TranslationOptions,
        *,
        line_numbers: Iterator[int] | None = None,
        text_only: bool = False,
    ) -> Iterator[Translation]:
        """Translate buffers of texts by batches; yield lines in order once complete."""
        strategy = options.strategy(self.config.decode)
        engine = self._batch_translator.select_engine(
            strategy,
            constrained=bool(options.constraints or options.no_repeat_ngram_size),
        )
        pending_lines: deque[SegmentedLine] = deque()
        translations: dict[int, Translation] = {}  # by sample id
        numbers = itertools.count() if line_numbers is None else line_numbers

        # Constraints and forced prefixes are those of a whole line.
        is_whole = bool(options.constraints or options.prefix or options.prefix_ids)

        def batches() -> Iterator[list[Segment]]:
            for given in buffers:
                decode = DecodeConfig() if is_whole else self.config.decode
                texts = recase_capitals(given, decode)
                directions = self._choose_directions(texts, options)
                texts = add_final_stops(texts, decode)
                lines = split_lines(
                    texts,
                    self.tokenizers.src,
                    line_numbers=numbers,
                    longest=self._batch_translator.max_segment_tokens,
                    by_sentence=decode.split_sentences,
                    directions=directions,
                )
                if directions is not None and not (text_only or options.source_language):
                    lines = [*map(self._check_language, lines, texts, directions)]
                lines = mark_adapted(lines, given, decode)
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
