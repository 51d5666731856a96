"""The translator: raw text in, raw text out."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dragoman.bundle import Bundle
from dragoman.config import Config
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.packing import batches_by_length, pack_sources
from dragoman.decoding.search import search
from dragoman.errors import ConfigError, DataError, nearest
from dragoman.explain import Explanation
from dragoman.explain.watching import align, watch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import EOS
from dragoman.text.tokenizer import Tokenizers
from dragoman.translator.checks import circle
from dragoman.translator.device import choose_device
from dragoman.translator.lines import Line, Part, cut_lines
from dragoman.translator.options import Options
from dragoman.translator.translation import Translation

_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # all but the tab
_FIRST_WINDOW = 32  # lines; each window doubles up to `Options.window`, so that the first answers come soon


class Translator:
    """A trained model that translates, from one directory: `Translator.load("my-model").translate(["Guten Morgen."])`."""

    def __init__(self, model: EncoderDecoder, tokenizers: Tokenizers, config: Config) -> None:
        self.model, self.tokenizers, self.config = model, tokenizers, config
        self.device = next(model.parameters()).device
        # Learned positions end somewhere, and an end takes one as well.
        self._most = config.model.max_positions - 1 if config.model.positions == "learned" else sys.maxsize
        self._longest = min(config.data.max_length, self._most)

    @classmethod
    def load(cls, path: str | Path, *, device: str | torch.device = "auto") -> Translator:
        """Load a model directory; `auto` takes a GPU where there is one."""
        bundle = Bundle.load(path, device=choose_device(device))
        return cls(bundle.model, bundle.tokenizers, bundle.config)

    def translate(self, texts: Iterable[str], **options: Any) -> list[str]:
        """Translate texts, one for one and in order; the options are those of `Options`."""
        return [each.text for each in self.stream(texts, **options)]

    def stream(self, lines: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translate lines as they come, in order, each as soon as it and those before it are ready."""
        if isinstance(lines, str):
            raise DataError("texts must be a list of texts", found=f"one text, {lines!r:.60}", fix="put it in brackets: [text]")
        if isinstance(lines, (bytes, Mapping)) or not isinstance(lines, Iterable):
            raise DataError(
                "texts must be a list of texts", found=_kind(lines), fix='give a list such as ["Guten Morgen."], or an open text file'
            )
        return self._stream(_texts(lines), _options(options))

    def explain(self, text: str, **options: Any) -> Explanation:
        """Translate one text and record every attention on the way; a long one is cut to its first part."""
        chosen = _options(options)
        [line] = cut_lines(list(_texts([text])), self.tokenizers.src, longest=self._longest)
        if not line.parts:
            raise DataError("a text to explain must hold words", found=repr(text), fix="give it some")
        part = line.parts[0]
        [[best, *_]] = self._search([part], chosen)
        seen = watch(self.model, part.src, best.tokens, finished=best.finished)
        return Explanation(
            text=part.text,
            translation=self._text(best),
            score=best.score,
            src_pieces=self.tokenizers.src.pieces([*part.src, EOS]),
            tgt_pieces=self.tokenizers.tgt.pieces([*best.tokens, EOS] if best.finished else best.tokens),
            log_probs=seen.log_probs,
            attentions=seen.attentions,
        )

    def _stream(self, lines: Iterable[str], options: Options) -> Iterator[Translation]:
        """Go through the lines in windows; within one, like lengths are translated together."""
        source, read, size = iter(lines), 0, min(_FIRST_WINDOW, options.window)
        while window := list(itertools.islice(source, size)):
            yield from self._window(cut_lines(window, self.tokenizers.src, first=read, longest=self._longest), options)
            read, size = read + len(window), min(2 * size, options.window)

    def _window(self, lines: Sequence[Line], options: Options) -> Iterator[Translation]:
        """Translate some lines batch by batch, handing on each line when it is its turn and it is whole."""
        parts = [part for line in lines for part in line.parts]
        groups = batches_by_length(
            [len(part.src) + 1 for part in parts],
            slots=self.config.decode.batch_tokens,
            width=options.width(self.config.decode),
            most=options.batch_size,
        )
        answers: dict[int, Translation] = {}
        waiting = iter(lines)
        line = next(waiting, None)
        for group in [*groups, []]:
            batch = [parts[number] for number in group]
            answers |= {part.key: answer for part, answer in zip(batch, self._answer(batch, options), strict=True)}
            while line is not None and all(part.key in answers for part in line.parts):
                yield line.translation([answers.pop(part.key) for part in line.parts])
                line = next(waiting, None)

    def _answer(self, parts: Sequence[Part], options: Options) -> list[Translation]:
        """Translate a batch; one that does not fit in the GPU's memory is halved."""
        if not parts:
            return []
        try:
            return self._answer_whole(parts, options)
        except torch.OutOfMemoryError:
            if len(parts) == 1:
                raise
        torch.cuda.empty_cache()
        half = len(parts) // 2
        return [*self._answer(parts[:half], options), *self._answer(parts[half:], options)]

    def _answer_whole(self, parts: Sequence[Part], options: Options) -> list[Translation]:
        """Translate a batch; an empty answer to a text that is not empty is asked for once more."""
        found = self._search(parts, options)
        empty = [at for at, hypotheses in enumerate(found) if not self._text(hypotheses[0]).strip()]
        if empty:
            again = self._search([parts[at] for at in empty], options, at_least=1)
            for at, hypotheses in zip(empty, again, strict=True):
                found[at] = hypotheses
        aligned = align(self.model, [part.src for part in parts], [each[0].tokens for each in found]) if options.alignment else None
        return [
            self._translation(part, hypotheses, retried=at in empty, alignment=None if aligned is None else aligned[at])
            for at, (part, hypotheses) in enumerate(zip(parts, found, strict=True))
        ]

    def _search(self, parts: Sequence[Part], options: Options, at_least: int = 0) -> list[list[Hypothesis]]:
        """Encode parts and search; a prefix is forced on the first part of each line."""
        prefix = self.tokenizers.tgt.encode(options.prefix) if options.prefix and options.prefix.strip() else []
        with torch.inference_mode():
            memory = self.model.encode(*pack_sources([part.src for part in parts], self.device))
        return search(
            self.model,
            memory,
            limits=torch.tensor([self._limit(part, len(prefix)) for part in parts]),
            strategy=options.strategy(self.config.decode),
            prefixes=[prefix if part.place == 0 else [] for part in parts],
            lines=[part.key for part in parts],
            at_least=at_least,
        )

    def _limit(self, part: Part, prefix: int) -> int:
        """The most pieces of an output: a matter of its own source alone."""
        return min(int(self.config.decode.max_ratio * len(part.src)) + self.config.decode.max_extra + prefix, self._most)

    def _text(self, hypothesis: Hypothesis) -> str:
        """Spell a hypothesis; a line stays one line, and a terminal as it was, whatever bytes the model wrote (marian-dev#365)."""
        return _CONTROLS.sub(" ", self.tokenizers.tgt.decode(hypothesis.tokens))

    def _translation(self, part: Part, hypotheses: Sequence[Hypothesis], *, retried: bool, alignment: Any) -> Translation:
        """Dress the hypotheses of a part as a translation."""
        src_pieces = self.tokenizers.src.pieces([*part.src, EOS])

        def dressed(hypothesis: Hypothesis, **more: Any) -> Translation:
            pieces = self.tokenizers.tgt.pieces(hypothesis.tokens)
            return Translation(
                text=self._text(hypothesis),
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
        alternatives = [dressed(each) for each in hypotheses] if len(hypotheses) > 1 else []
        return dressed(best, alignment=alignment, alternatives=alternatives, notes=notes)


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
