"""What may be asked of a translation, checked all at once and turned into the objects that do the work."""

from __future__ import annotations

import numbers
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dragoman.config import DecodeConfig, list_settings
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search import SearchStrategy
from dragoman.errors import ConfigError

_SETTINGS = {each.name: each.setting for each in list_settings(DecodeConfig)}
MAX_BEAM = int(
    _SETTINGS["beam"].at_most or 0
)  # a wider beam gains nothing and may take all the memory there is
# Options that are counted: the least and the most, and whether None stands for the model's own.
_INTEGER_OPTIONS = {
    "beam": (1, MAX_BEAM, True),
    "nbest": (1, MAX_BEAM, False),
    "batch_size": (1, None, True),
    "window": (1, None, False),
    "top_k": (0, None, False),
    "seed": (0, None, False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationOptions:
    """How to translate; None stands for what the model's own configuration says."""

    beam: int | None = None  # hypotheses kept in beam search; 1 is greedy
    nbest: int = 1  # translations of each line
    length_penalty: float | None = None  # Wu et al. (2016), alpha
    batch_size: int | None = (
        None  # sentences translated together; by default as many as fill decode.batch_tokens
    )
    prefix: str | None = None  # text that every translation begins with
    alignment: bool = False  # whether each translation carries its averaged cross-attention
    return_scores: bool = True  # whether translations carry scores and log-probabilities: without, some engines are quicker
    sample: bool = False  # whether to draw by chance instead of searching
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    window: int = 2048  # lines looked ahead, so that like lengths go together; 1 answers each line before reading on

    def __post_init__(self) -> None:
        """Refuse what means nothing or would fill the memory, all at once."""
        problems = [
            problem
            for name in _INTEGER_OPTIONS
            for problem in _integer_problems(name, getattr(self, name))
        ]
        for name in ("length_penalty", "temperature", "top_p"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, numbers.Real)
            ):
                problems.append(
                    f"{name} must be a number; found {value!r:.60}; write one such as 0.6"
                )
        if isinstance(self.length_penalty, numbers.Real):
            problems += filter(
                None,
                [_SETTINGS["length_penalty"].problem("length_penalty", float(self.length_penalty))],
            )
        if self.prefix is not None and not isinstance(self.prefix, str):
            problems.append(f"prefix must be text; found {self.prefix!r:.60}; write it in quotes")
        if self.sample and self.beam is not None:
            problems.append(
                f"beam belongs to search and not to sampling; found beam={self.beam} with sample=True; keep one"
            )
        if problems:
            raise ConfigError(problems)

    def strategy(self, config: DecodeConfig) -> SearchStrategy:
        """Choose the way of searching; an n-best list widens a beam that is too narrow for it."""
        penalty = WuLengthPenalty(
            config.length_penalty if self.length_penalty is None else self.length_penalty
        )
        if self.sample:
            return Sampling(
                self.temperature,
                self.top_k,
                self.top_p,
                self.seed,
                samples=self.nbest,
                penalty=penalty,
            )
        size = max(config.beam, self.nbest) if self.beam is None else self.beam
        if size == 1 and self.nbest == 1:
            return GreedySearch(penalty=penalty)
        return BeamSearch(size, self.nbest, penalty)

    def rows_per_sentence(self, config: DecodeConfig) -> int:
        """Count the rows that each sentence takes."""
        if self.sample:
            return self.nbest
        return max(config.beam, self.nbest) if self.beam is None else self.beam


def _integer_problems(name: str, value: Any) -> Iterator[str]:
    """Say what is wrong with an option that is counted."""
    minimum, maximum, optional = _INTEGER_OPTIONS[name]
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        yield f"{name} must be a whole number; found {value!r:.60}; try {max(minimum, 1)}"
    elif int(value) < minimum:
        yield f"{name} must be at least {minimum}; found {value}; try {max(minimum, 1)}"
    elif maximum is not None and int(value) > maximum:
        yield f"{name} must be at most {maximum}; found {value}; lower it"
