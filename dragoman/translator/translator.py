"""The translator: raw text in, raw text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dragoman.bundle import Bundle
from dragoman.config import Config
from dragoman.data.corpus import PairedFiles
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.packing import batches_by_length
from dragoman.engines import Engine, Native
from dragoman.engines.choosing import runs_on_cpu
from dragoman.engines.opening import open_engines
from dragoman.engines.spreading import spread
from dragoman.errors import ConfigError, DataError, nearest
from dragoman.explain import Explanation
from dragoman.explain.explanation import Weights
from dragoman.explain.watching import align, watch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import EOS
from dragoman.text.tokenizer import Tokenizers
from dragoman.translator.checks import circle
from dragoman.translator.device import choose_device, where_it_fits
from dragoman.translator.lines import Line, Part, cut_lines
from dragoman.translator.options import Options
from dragoman.translator.pair_scores import PairScore, score_pairs
from dragoman.translator.searching import Found, Searcher
from dragoman.translator.translation import Translation
from dragoman.translator.windows import FIRST, Window, Windows, given, only_texts


class Translator:
    """A trained model that translates, from one directory: `Translator.load("my-model").translate(["Guten Morgen."])`."""

    def __init__(self, model: EncoderDecoder | Native, tokenizers: Tokenizers, config: Config, *, engine: Engine | None = None) -> None:
        self._native = model if isinstance(model, Native) else Native(lambda: model)
        self.tokenizers, self.config = tokenizers, config
        self._searcher = Searcher(self._native, self._native if engine is None else engine, tokenizers, config)

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
        listed = None if shortlist is None else PairedFiles(Path(shortlist[0]), Path(shortlist[1]), on_bad_line="skip")

        def on(where: torch.device) -> Translator:
            bundle = Bundle.load(path, device=where)
            by = Options().strategy(bundle.config.decode) if measure else None
            native, used = open_engines(bundle, where, wanted=engine, precision=precision, measured_by=by, shortlist=listed)
            return cls(native, bundle.tokenizers, bundle.config, engine=used)

        return where_it_fits(choose_device("cpu" if device == "auto" and (shortlist or runs_on_cpu(engine, precision)) else device), on)

    def __repr__(self) -> str:
        """Name languages, recipe and engine in one short line, without loading weights that were not needed yet."""
        data, recipe = self.config.data, self.config.recipe or "none"
        languages = f"{data.src_lang:.20} to {data.tgt_lang:.20}, " if data.src_lang and data.tgt_lang else ""
        return f"Translator({languages}recipe {recipe:.60}, engine {self.engine.name})"

    @property
    def engine(self) -> Engine:
        """What translates; one that fails on the way is replaced by the native one."""
        return self._searcher.engine

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
        return [each.text for each in self._stream(given(texts), chosen, first=chosen.window, bare=True)]

    def stream(self, lines: Iterable[str], **options: Any) -> Iterator[Translation]:
        """Translate lines as they come, in order, each as soon as it and those before it are ready.

        The first 32 are answered before more are read, unless more are there already: in a list, a regular file, or an object of lines
        with a method `ready` that says so.
        """
        return self._stream(given(lines), _options(options))

    def score(self, src_texts: Iterable[str], tgt_texts: Iterable[str], *, batch_size: int | None = None) -> list[PairScore]:
        """Return the log-probability of each target text given its source text, by the model itself and in its own precision."""
        sources, targets = (list(only_texts(given(texts))) for texts in (src_texts, tgt_texts))
        chosen = Options(batch_size=batch_size)
        return score_pairs(self.model, self.tokenizers, self.config, sources, targets, batch_size=chosen.batch_size)

    def explain(self, text: str, **options: Any) -> Explanation:
        """Translate one text and record every attention on the way; a long one is cut to its first part."""
        chosen = _options(options)
        [line] = cut_lines(list(only_texts([text])), self.tokenizers.src, longest=self._searcher.longest)
        if not line.parts:
            raise DataError("a text to explain must hold words", found=repr(text), fix="give it some")
        part = line.parts[0]
        if self.engine is not self._native:
            self._searcher.stand_in("shows nothing of its inside")
        [[best, *_]] = self._native.generate(self._searcher.request([part], chosen))
        with self._native.alone():
            seen = watch(self.model, part.src, best.tokens, finished=best.finished)
        return Explanation(
            text=part.text,
            translation=self._searcher.spell([[best]])[0][0],
            score=best.score,
            src_pieces=self.tokenizers.src.pieces([*part.src, EOS]),
            tgt_pieces=self.tokenizers.tgt.pieces([*best.tokens, EOS] if best.finished else best.tokens),
            log_probs=seen.log_probs,
            attentions=seen.attentions,
        )

    def _stream(self, lines: Iterable[Any], options: Options, first: int = FIRST, *, bare: bool = False) -> Iterator[Translation]:
        """Go through the lines in windows; within one, like lengths are translated together. What is `bare` has only its text."""
        for windows in Windows(lines, first=first, most=options.window):
            yield from self._flow(map(self._cut, windows), options, bare)

    def _cut(self, window: Window) -> list[Line]:
        """Cut the lines of a window."""
        return cut_lines(window.texts, self.tokenizers.src, first=window.first, longest=self._searcher.longest)

    def _flow(self, windows: Iterable[Sequence[Line]], options: Options, bare: bool) -> Iterator[Translation]:
        """Translate windows batch by batch, handing on each line when it is its turn and it is whole."""
        engine = self._searcher.able(options.strategy(self.config.decode))
        waiting: deque[Line] = deque()
        answers: dict[int, Translation] = {}

        def batches() -> Iterator[list[Part]]:
            for window in windows:
                waiting.extend(window)
                yield from self._batches(window, options, engine)

        def find(batch: list[Part]) -> tuple[list[Part], Found, list[Weights] | None]:
            found = self._searcher.find(batch, options)
            return batch, found, self._aligned(batch, found) if options.alignment and not bare else None

        # A GPU computes the next batch while this thread is busy with the words of the last. Whoever records or edits the model
        # does so in this thread alone, so it does all the work, in order.
        watched = self._native.is_watched
        ahead = engine is self._native and self.device.type == "cuda" and not watched
        for batch, found, aligned in spread(find, batches(), 1 if watched else engine.callers, ahead=ahead):
            answers |= {part.key: answer for part, answer in zip(batch, self._dress(batch, found, aligned, bare), strict=True)}
            yield from self._whole(waiting, answers)
        yield from self._whole(waiting, answers)  # lines without words make no batch

    @staticmethod
    def _whole(waiting: deque[Line], answers: dict[int, Translation]) -> Iterator[Translation]:
        """Hand on lines, in order, as long as all of their parts are answered."""
        while waiting and all(part.key in answers for part in waiting[0].parts):
            line = waiting.popleft()
            yield line.translation([answers.pop(part.key) for part in line.parts])

    def _batches(self, lines: Sequence[Line], options: Options, engine: Engine) -> list[list[Part]]:
        """Put the parts of like lengths together."""
        parts = [part for line in lines for part in line.parts]
        lengths, width = [len(part.src) + 1 for part in parts], options.width(self.config.decode)
        groups = batches_by_length(
            lengths,
            # No worker should stand by while another has twice its work.
            slots=min(engine.slots or self.config.decode.batch_tokens, -(-width * sum(lengths) // engine.workers) or 1),
            width=width,
            most=options.batch_size,
        )
        return [[parts[number] for number in group] for group in groups]

    def _aligned(self, parts: Sequence[Part], found: Found) -> list[Weights] | None:
        """Align the best outputs of a batch with their sources; None if the model has no cross-attention."""
        with self._native.alone():
            return align(self.model, [part.src for part in parts], [hypotheses[0].tokens for hypotheses in found.hypotheses])

    def _dress(self, parts: Sequence[Part], found: Found, aligned: list[Weights] | None, bare: bool) -> list[Translation]:
        """Turn what was found for a batch into translations, with their alignments if there are any."""
        if bare:
            return [Translation(text=texts[0]) for texts in found.texts]
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
        alternatives = [dressed(*each) for each in zip(hypotheses, texts, strict=True)]
        return dressed(best, texts[0], alignment=alignment, alternatives=alternatives, notes=notes)


def _options(given: dict[str, Any]) -> Options:
    """Check the options' names, and answer a wrong one with the nearest right one."""
    known = list(Options.__dataclass_fields__)
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError([f"there is no option {name!r} for translating; {nearest(name, known)}" for name in wrong])
    return Options(**given)
