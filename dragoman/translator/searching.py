"""Finding outputs for the parts of lines: by the engine where it can, in halves where memory ends, by the native engine in every need."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

from dragoman.bundle.loading import assemble
from dragoman.config import Config
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.stepping import Strategy
from dragoman.engines import Engine, Native, Request
from dragoman.text.tokenizer import Tokenizers
from dragoman.training.memory import CAP_SHARE, free, is_out_of_memory
from dragoman.translator.checks import without_controls
from dragoman.translator.lines import Part
from dragoman.translator.options import Options

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a search found for a batch."""

    hypotheses: list[list[Hypothesis]]  # of each part, best first
    texts: list[list[str]]  # theirs
    retried: set[int]  # the parts whose first answer was empty


class Searcher:
    """Asks an engine for outputs; whatever happens to it is said once, and the outputs are the same."""

    def __init__(self, native: Native, engine: Engine, tokenizers: Tokenizers, config: Config) -> None:
        self.native, self.engine = native, engine
        self._tokenizers, self._config = tokenizers, config
        self._told = set[str]()
        self._telling, self._assembling = threading.Lock(), threading.Lock()
        self._spared: Searcher | None = None
        self._room = sys.maxsize  # padded places of a batch that fit into the memory, as far as was found out
        # Learned positions end somewhere, and an end takes one as well.
        self._most = config.model.max_positions - 1 if config.model.positions == "learned" else sys.maxsize
        self.longest = min(config.data.max_length, self._most)  # pieces of a part

    def find(self, parts: Sequence[Part], options: Options) -> Found:
        """Search for a batch; one that does not fit into the memory is halved, and a sentence that does not is left to the CPU."""
        if len(parts) > 1 and _places(parts) > self._room:
            return self._halved(parts, options)
        try:
            return self._find_whole(parts, options)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or (len(parts) == 1 and self.native.device.type == "cpu"):
                raise
        free()
        if len(parts) == 1:
            self._say("out of memory for one sentence alone: the CPU translates what does not fit, and the result is the same")
            return self._spare.find(parts, options)
        self._room = int(CAP_SHARE * _places(parts))
        self._say(
            "out of memory with %d sentences at once: batches that do not fit are translated in halves, and the result is the same",
            len(parts),
        )
        return self._halved(parts, options)

    def able(self, strategy: Strategy, longest: int = 0) -> Engine:
        """Choose who does it: the engine, or the native one where that cannot."""
        engine = self.engine
        if engine is not self.native and self.native.is_watched:
            self.stand_in("shows nothing of its inside")
            return self.native
        reason = engine.refusal(strategy, longest)
        if not reason:
            return engine
        self.stand_in(reason)
        return self.native

    def stand_in(self, reason: str) -> None:
        """Say, once for each reason, that the native engine stands in."""
        self._say(f"the engine {self.engine.name} {reason}: the native engine does it", level=logging.INFO)

    def request(self, parts: Sequence[Part], options: Options, at_least: int = 0) -> Request:
        """Say what is asked of an engine; a prefix is forced on the first part of each line."""
        prefix = self._tokenizers.tgt.encode(options.prefix) if options.prefix and options.prefix.strip() else []
        return Request(
            sources=[part.src for part in parts],
            limits=[self._limit(part, len(prefix)) for part in parts],
            prefixes=[prefix if part.place == 0 else [] for part in parts],
            strategy=options.strategy(self._config.decode),
            lines=[part.key for part in parts],
            at_least=at_least,
            scored=options.scored,
        )

    def spell(self, found: Sequence[Sequence[Hypothesis]]) -> list[list[str]]:
        """Spell hypotheses, whatever bytes the model wrote; all at once, for each call of the tokenizer starts a thread."""
        spelt = iter(self._tokenizers.tgt.decode_batch([each.tokens for hypotheses in found for each in hypotheses]))
        return [[without_controls(next(spelt)) for _ in hypotheses] for hypotheses in found]

    def _halved(self, parts: Sequence[Part], options: Options) -> Found:
        """Search for a batch in two."""
        half = len(parts) // 2
        first, second = self.find(parts[:half], options), self.find(parts[half:], options)
        retried = first.retried | {half + at for at in second.retried}
        return Found([*first.hypotheses, *second.hypotheses], [*first.texts, *second.texts], retried)

    def _find_whole(self, parts: Sequence[Part], options: Options) -> Found:
        """Search for a batch; an empty answer to a text that is not empty is asked for once more."""
        found = self._search(self.request(parts, options))
        texts = self.spell(found)
        empty = [at for at, spelt in enumerate(texts) if not spelt[0].strip()]
        if empty:
            again = self._search(self.request([parts[at] for at in empty], options, at_least=1))
            for at, hypotheses, spelt in zip(empty, again, self.spell(again), strict=True):
                found[at], texts[at] = hypotheses, spelt
        return Found(found, texts, set(empty))

    def _search(self, request: Request) -> list[list[Hypothesis]]:
        """Ask the engine for a batch; one of another program's that fails is not asked again."""
        engine = self.able(request.strategy, request.longest)
        try:
            return engine.generate(request)
        except RuntimeError as error:
            if engine is self.native or is_out_of_memory(error):
                raise
            found = next(iter(str(error).splitlines()), "")[:160]
        self._say(f"the engine {engine.name} failed ({found}): the native engine is used, and the result is the same but for rounding")
        self.engine = self.native
        return self.native.generate(request)

    @property
    def _spare(self) -> Searcher:
        """The same model on the CPU, for what a GPU has no room for."""
        with self._assembling:
            if self._spared is None:
                weights = {name: tensor.cpu() for name, tensor in self.native.model.state_dict().items()}
                model = assemble(self._config, self._tokenizers, weights)
                native = Native(lambda: model)
                self._spared = Searcher(native, native, self._tokenizers, self._config)
        return self._spared

    def _limit(self, part: Part, prefix: int) -> int:
        """The most pieces of an output: a matter of its own source alone."""
        return min(int(self._config.decode.max_ratio * len(part.src)) + self._config.decode.max_extra + prefix, self._most)

    def _say(self, line: str, *values: object, level: int = logging.WARNING) -> None:
        """Say something once, whichever of the workers meets it first."""
        with self._telling:
            if line not in self._told:
                self._told.add(line)
                logger.log(level, line, *values)


def _places(parts: Sequence[Part]) -> int:
    """Count the padded places of a batch's sources, their ends included."""
    return len(parts) * (1 + max(len(part.src) for part in parts))
