"""The translator: raw text in, raw text out."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dragoman.bundle import Bundle
from dragoman.config import Config
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.packing import batches_by_length
from dragoman.decoding.stepping import Strategy
from dragoman.engines import Engine, Native, Request
from dragoman.engines.opening import open_engines
from dragoman.engines.spreading import spread
from dragoman.errors import ConfigError, DataError, nearest
from dragoman.explain import Explanation
from dragoman.explain.watching import align, watch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import EOS
from dragoman.text.tokenizer import Tokenizers
from dragoman.translator.checks import circle, without_controls
from dragoman.translator.device import choose_device
from dragoman.translator.lines import Line, Part, cut_lines
from dragoman.translator.options import Options
from dragoman.translator.translation import Translation

logger = logging.getLogger(__name__)

_FIRST_WINDOW = 32  # lines; each window doubles up to `Options.window`, so that the first answers come soon


class Translator:
    """A trained model that translates, from one directory: `Translator.load("my-model").translate(["Guten Morgen."])`."""

    def __init__(self, model: EncoderDecoder | Native, tokenizers: Tokenizers, config: Config, *, engine: Engine | None = None) -> None:
        self._native = model if isinstance(model, Native) else Native(lambda: model)
        self.engine: Engine = self._native if engine is None else engine
        self.tokenizers, self.config = tokenizers, config
        self._halved = False  # whether it was said that a batch did not fit
        self._told = set[str]()  # what was said already of an engine that could not do what was asked
        # Learned positions end somewhere, and an end takes one as well.
        self._most = config.model.max_positions - 1 if config.model.positions == "learned" else sys.maxsize
        self._longest = min(config.data.max_length, self._most)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "auto",
        engine: str = "auto",
        precision: str | None = None,
        measure: bool = False,
    ) -> Translator:
        """Load a model directory; `auto` takes a GPU where there is one, and on a CPU an engine that the directory holds.

        The engine may also be `native`, or one of the directory's by name, such as `ctranslate2`. The precision is `float32`, on a CPU
        also `int8`, on a GPU also `float16` or `bfloat16`; by default float16 on a GPU that multiplies it, else float32, or that of
        the directory's engine. With `measure`, `auto` takes whichever is the quickest here.
        """
        chosen = choose_device(device)
        bundle = Bundle.load(path, device=chosen)
        by = Options().strategy(bundle.config.decode) if measure else None
        native, used = open_engines(bundle, chosen, wanted=engine, precision=precision, measured_by=by)
        return cls(native, bundle.tokenizers, bundle.config, engine=used)

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
        chosen = _options({"scored": False, **options})
        return [each.text for each in self._stream(_texts(_given(texts)), chosen, first=chosen.window, bare=True)]

    def stream(self, lines: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translate lines as they come, in order, each as soon as it and those before it are ready."""
        return self._stream(_texts(_given(lines)), _options(options))

    def explain(self, text: str, **options: Any) -> Explanation:
        """Translate one text and record every attention on the way; a long one is cut to its first part."""
        chosen = _options(options)
        [line] = cut_lines(list(_texts([text])), self.tokenizers.src, longest=self._longest)
        if not line.parts:
            raise DataError("a text to explain must hold words", found=repr(text), fix="give it some")
        part = line.parts[0]
        if self.engine is not self._native:
            self._tell("shows nothing of its inside")
        [[best, *_]] = self._native.generate(self._request([part], chosen))
        seen = watch(self.model, part.src, best.tokens, finished=best.finished)
        return Explanation(
            text=part.text,
            translation=self._spell([[best]])[0][0],
            score=best.score,
            src_pieces=self.tokenizers.src.pieces([*part.src, EOS]),
            tgt_pieces=self.tokenizers.tgt.pieces([*best.tokens, EOS] if best.finished else best.tokens),
            log_probs=seen.log_probs,
            attentions=seen.attentions,
        )

    def _stream(self, lines: Iterable[str], options: Options, first: int = _FIRST_WINDOW, *, bare: bool = False) -> Iterator[Translation]:
        """Go through the lines in windows; within one, like lengths are translated together. What is `bare` has only its text."""
        source, read, size = iter(lines), 0, min(first, options.window)
        while window := list(itertools.islice(source, size)):
            yield from self._window(cut_lines(window, self.tokenizers.src, first=read, longest=self._longest), options, bare)
            read, size = read + len(window), min(2 * size, options.window)

    def _window(self, lines: Sequence[Line], options: Options, bare: bool) -> Iterator[Translation]:
        """Translate some lines batch by batch, handing on each line when it is its turn and it is whole."""
        parts = [part for line in lines for part in line.parts]
        strategy = options.strategy(self.config.decode)
        engine = self._able(strategy)
        lengths, width = [len(part.src) + 1 for part in parts], options.width(self.config.decode)
        groups = batches_by_length(
            lengths,
            # No worker should stand by while another has twice its work.
            slots=min(engine.slots or self.config.decode.batch_tokens, -(-width * sum(lengths) // engine.workers) or 1),
            width=width,
            most=options.batch_size,
        )
        batches = [[parts[number] for number in group] for group in groups]
        answers: dict[int, Translation] = {}
        waiting = iter(lines)
        line = next(waiting, None)
        # A GPU computes the next batch while this thread is busy with the words of the last.
        ahead = engine is self._native and self.device.type == "cuda" and len(batches) > 1
        found = spread(functools.partial(self._find, options=options), batches, engine.workers, ahead=ahead)
        for batch, hypotheses in itertools.chain(zip(batches, found, strict=True), [([], Found([], [], set()))]):
            answers |= {part.key: answer for part, answer in zip(batch, self._dress(batch, hypotheses, options, bare), strict=True)}
            while line is not None and all(part.key in answers for part in line.parts):
                yield line.translation([answers.pop(part.key) for part in line.parts])
                line = next(waiting, None)

    def _find(self, parts: Sequence[Part], options: Options) -> Found:
        """Search for a batch; one that does not fit in the GPU's memory is halved."""
        try:
            return self._find_whole(parts, options)
        except torch.OutOfMemoryError:
            if len(parts) == 1:
                raise
        torch.cuda.empty_cache()
        if not self._halved:
            self._halved = True
            logger.warning("out of memory with %d sentences at once: batches that do not fit are translated in halves", len(parts))
        half = len(parts) // 2
        first, second = self._find(parts[:half], options), self._find(parts[half:], options)
        retried = first.retried | {half + at for at in second.retried}
        return Found([*first.hypotheses, *second.hypotheses], [*first.texts, *second.texts], retried)

    def _find_whole(self, parts: Sequence[Part], options: Options) -> Found:
        """Search for a batch; an empty answer to a text that is not empty is asked for once more."""
        found = self._search(parts, options)
        texts = self._spell(found)
        empty = [at for at, spelt in enumerate(texts) if not spelt[0].strip()]
        if empty:
            again = self._search([parts[at] for at in empty], options, at_least=1)
            for at, hypotheses, spelt in zip(empty, again, self._spell(again), strict=True):
                found[at], texts[at] = hypotheses, spelt
        return Found(found, texts, set(empty))

    def _search(self, parts: Sequence[Part], options: Options, at_least: int = 0) -> list[list[Hypothesis]]:
        """Ask the engine for a batch."""
        request = self._request(parts, options, at_least)
        return self._able(request.strategy, request.longest).generate(request)

    def _request(self, parts: Sequence[Part], options: Options, at_least: int = 0) -> Request:
        """Say what is asked of an engine; a prefix is forced on the first part of each line."""
        prefix = self.tokenizers.tgt.encode(options.prefix) if options.prefix and options.prefix.strip() else []
        return Request(
            sources=[part.src for part in parts],
            limits=[self._limit(part, len(prefix)) for part in parts],
            prefixes=[prefix if part.place == 0 else [] for part in parts],
            strategy=options.strategy(self.config.decode),
            lines=[part.key for part in parts],
            at_least=at_least,
            scored=options.scored,
        )

    def _able(self, strategy: Strategy, longest: int = 0) -> Engine:
        """Choose who does it: the engine, or the native one where that cannot."""
        reason = self.engine.refusal(strategy, longest)
        if not reason:
            return self.engine
        self._tell(reason)
        return self._native

    def _tell(self, reason: str) -> None:
        """Say, once for each reason, that the native engine stands in."""
        if reason not in self._told:
            self._told.add(reason)
            logger.info("the engine %s %s: the native engine does it", self.engine.name, reason)

    def _limit(self, part: Part, prefix: int) -> int:
        """The most pieces of an output: a matter of its own source alone."""
        return min(int(self.config.decode.max_ratio * len(part.src)) + self.config.decode.max_extra + prefix, self._most)

    def _spell(self, found: Sequence[Sequence[Hypothesis]]) -> list[list[str]]:
        """Spell hypotheses, whatever bytes the model wrote; all at once, for each call of the tokenizer starts a thread."""
        spelt = iter(self.tokenizers.tgt.decode_batch([each.tokens for hypotheses in found for each in hypotheses]))
        return [[without_controls(next(spelt)) for _ in hypotheses] for hypotheses in found]

    def _dress(self, parts: Sequence[Part], found: Found, options: Options, bare: bool) -> list[Translation]:
        """Turn what was found for a batch into translations, with alignments where they are asked for."""
        if bare:
            return [Translation(text=texts[0]) for texts in found.texts]
        best = [hypotheses[0].tokens for hypotheses in found.hypotheses]
        aligned = align(self.model, [part.src for part in parts], best) if options.alignment and parts else None
        return [
            self._translation(part, hypotheses, texts, retried=at in found.retried, alignment=None if aligned is None else aligned[at])
            for at, (part, hypotheses, texts) in enumerate(zip(parts, found.hypotheses, found.texts, strict=True))
        ]

    def _translation(
        self, part: Part, hypotheses: Sequence[Hypothesis], texts: Sequence[str], *, retried: bool, alignment: Any
    ) -> Translation:
        """Dress the hypotheses of a part, and their texts, as a translation."""
        src_pieces = self.tokenizers.src.pieces([*part.src, EOS])

        def dressed(hypothesis: Hypothesis, text: str, **more: Any) -> Translation:
            pieces = self.tokenizers.tgt.pieces(hypothesis.tokens)
            return Translation(
                text=text,
                score=hypothesis.score,
                pieces=pieces,
                log_probs=hypothesis.log_probs,
                src_pieces=src_pieces,
                **more,
            )

        best, notes = hypotheses[0], []
        if retried:
            notes.append("the model's first answer was empty: this is its best answer that is not")
        if not best.finished:
            notes.append(
                f"stopped at {len(best.tokens)} pieces, the limit for this text (decode.max_ratio, decode.max_extra): its end is missing"
            )
        round_and_round = circle(best.tokens)
        if round_and_round and not circle(part.src):
            pattern = self.tokenizers.tgt.decode(round_and_round.pattern).strip()
            notes.append(f"the output goes round in circles: {pattern!r} comes {round_and_round.times} times")
        alternatives = [dressed(*each) for each in zip(hypotheses, texts, strict=True)] if len(hypotheses) > 1 else []
        return dressed(best, texts[0], alignment=alignment, alternatives=alternatives, notes=notes)


class Found(NamedTuple):
    """What a search found for a batch."""

    hypotheses: list[list[Hypothesis]]  # of each part, best first
    texts: list[list[str]]  # theirs
    retried: set[int]  # the parts whose first answer was empty


def _given(lines: Any) -> Iterable[Any]:
    """Refuse what is not a row of texts: a single one would be taken letter by letter."""
    if isinstance(lines, str):
        raise DataError("texts must be a list of texts", found=f"one text, {lines!r:.60}", fix="put it in brackets: [text]")
    if isinstance(lines, (bytes, Mapping)) or not isinstance(lines, Iterable):
        raise DataError(
            "texts must be a list of texts", found=_kind(lines), fix='give a list such as ["Guten Morgen."], or an open text file'
        )
    return lines


def _texts(lines: Iterable[Any]) -> Iterator[str]:
    """Hand on texts, and refuse the first thing that is not one with its place."""
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise DataError(f"text {number} must be a text", found=_kind(line), fix='give "" for an empty one, and decode bytes as UTF-8')
        yield line


def _kind(value: Any) -> str:
    """Say what stands where text belongs."""
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"


def _options(given: dict[str, Any]) -> Options:
    """Check the options' names, and answer a wrong one with the nearest right one."""
    known = list(Options.__dataclass_fields__)
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError([f"there is no option {name!r} for translating; {nearest(name, known)}" for name in wrong])
    return Options(**given)
