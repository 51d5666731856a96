"""Options of a translation: validated together, and turned into a search strategy."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dragoman.config import DecodeConfig, list_settings
from dragoman.config.device_engine_and_precision_names import utility_problem
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.output_constraint_definitions import Constraint, constraint_problems
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import SearchStrategy
from dragoman.errors import ConfigError, suggest_name

_SETTINGS = {each.name: each.setting for each in list_settings(DecodeConfig)}
MAX_BEAM = int(_SETTINGS["beam"].at_most or 0)
MAX_SAMPLES = 1024  # candidates of minimum Bayes risk decoding: all pairs of them are compared
DEFAULT_SAMPLES = 64
MBR_EPSILON = 0.02  # the best of Freitag, Ghorbani and Fernandes (2023)
# Integer options: minimum, maximum, and whether None stands for the model's own setting.
_INTEGER_OPTIONS = {
    "beam": (1, MAX_BEAM, True),
    "nbest": (1, MAX_BEAM, False),
    "batch_size": (1, None, True),
    "buffer_size": (1, None, False),
    "top_k": (0, None, False),
    "seed": (0, None, False),
    "no_repeat_ngram_size": (0, None, False),
    "samples": (2, MAX_SAMPLES, True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationOptions:
    """How to translate; None stands for the setting of the model's configuration."""

    beam: int | None = None  # hypotheses kept in beam search; 1 is greedy
    nbest: int = 1  # translations of each line
    length_penalty: float | None = None  # Wu et al. (2016), alpha
    batch_size: int | None = None  # sentences per batch; by default decode.batch_tokens decides
    # For models of several directions; the source is identified, the target if there is a choice.
    source_language: str | None = None
    target_language: str | None = None
    prefix: str | None = None  # text that every translation begins with
    # The same as token ids, of the target's vocabulary; the end of sentence may be the last.
    prefix_ids: Sequence[int] | None = None
    no_repeat_ngram_size: int = 0  # no n tokens in a row twice; 0 allows repetition
    constraints: Sequence[Constraint] = ()  # fulfilled by every translation
    alignment: bool = False  # return the averaged cross-attention weights
    return_scores: bool = True  # return scores and log-probabilities; greedy is faster without
    sample: bool = False  # sample instead of searching
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    epsilon: float | None = None  # tokens less probable are not drawn; with mbr 0.02, else 0
    seed: int = 1
    # Minimum Bayes risk decoding: "chrf" or "bleu" is the utility, of `samples` drawn candidates
    # (64 by default) or, with `beam`, of the hypotheses of that beam.
    mbr: str | None = None
    samples: int | None = None
    buffer_size: int = (
        2048  # lines batched together by length; 1 translates each before the next is read
    )

    def __post_init__(self) -> None:
        """Raise ConfigError with all options that are out of range."""
        problems = [
            problem
            for name in _INTEGER_OPTIONS
            for problem in _integer_problems(name, getattr(self, name))
        ]
        for name in ("length_penalty", "temperature", "top_p", "epsilon"):
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
        for name in ("source_language", "target_language"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                problems.append(
                    f'{name} must be a language code; found {value!r:.60}; write one such as "en"'
                )
        if self.prefix is not None and not isinstance(self.prefix, str):
            problems.append(f"prefix must be text; found {self.prefix!r:.60}; write it in quotes")
        problems += _prefix_problems(self.prefix, self.prefix_ids)
        if self.constraints and self.no_repeat_ngram_size:
            problems.append(
                "no_repeat_ngram_size and constraints exclude each other; "
                f"found no_repeat_ngram_size={self.no_repeat_ngram_size!r:.60} with constraints; "
                "keep one"
            )
        if self.constraints != ():
            problems += constraint_problems(self.constraints)
        if self.sample and self.beam is not None:
            problems.append(
                "beam belongs to search and not to sampling; "
                f"found beam={self.beam} with sample=True; keep one"
            )
        problems += self._mbr_problems()
        if problems:
            raise ConfigError(problems)

    def _mbr_problems(self) -> Iterator[str]:
        """Yield the problems of minimum Bayes risk decoding."""
        if self.mbr is None:
            if self.samples is not None:
                yield (
                    f"samples belongs to minimum Bayes risk decoding; found samples={self.samples} "
                    'without mbr; add mbr="chrf", or write sample=True, nbest=…'
                )
            return
        if problem := utility_problem(self.mbr):
            yield problem
        if self.sample:
            yield (
                "sample and mbr exclude each other; found both; "
                "leave sample out: mbr draws samples by default"
            )
        if self.beam is not None and self.samples is not None:
            yield (
                "with mbr the candidates are samples or those of a beam; "
                f"found samples={self.samples} with beam={self.beam}; keep one"
            )
        candidates = self.beam or self.samples or DEFAULT_SAMPLES
        sizes = (self.nbest, candidates)
        if all(isinstance(size, numbers.Integral) for size in sizes) and self.nbest > candidates:
            yield (
                f"with mbr nbest must be 1 to the number of candidates, {candidates}; "
                f"found {self.nbest}; raise {'beam' if self.beam else 'samples'} or lower nbest"
            )

    @property
    def draws_samples(self) -> bool:
        """Whether outputs are sampled, not searched for."""
        return self.sample or (self.mbr is not None and self.beam is None)

    def with_runner_up(self, config: DecodeConfig) -> TranslationOptions:
        """Return options that search for the second best too; the best stays the same."""
        size = self.strategy(config).beam_size or 1
        return self if self.nbest > 1 or size == 1 else dataclasses.replace(self, nbest=2)

    def strategy(self, config: DecodeConfig) -> SearchStrategy:
        """Return the search strategy; the beam is at least as wide as the n-best list."""
        penalty = WuLengthPenalty(
            config.length_penalty if self.length_penalty is None else self.length_penalty
        )
        if self.draws_samples:
            has_mbr = self.mbr is not None
            default_epsilon = MBR_EPSILON if has_mbr else 0.0
            return Sampling(
                self.temperature,
                self.top_k,
                self.top_p,
                self.seed,
                samples=(self.samples or DEFAULT_SAMPLES) if has_mbr else self.nbest,
                penalty=penalty,
                epsilon=default_epsilon if self.epsilon is None else self.epsilon,
                distinct=not has_mbr,  # how often a candidate was drawn is its weight
            )
        size = max(config.beam, self.nbest) if self.beam is None else self.beam
        if self.mbr is not None:
            return BeamSearch(size, size, penalty)
        if size == 1 and self.nbest == 1:
            return GreedySearch(penalty=penalty)
        return BeamSearch(size, self.nbest, penalty)


def _integer_problems(name: str, value: Any) -> Iterator[str]:
    """Yield the problems of an integer option."""
    minimum, maximum, optional = _INTEGER_OPTIONS[name]
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        yield f"{name} must be an integer; found {value!r:.60}; try {max(minimum, 1)}"
    elif int(value) < minimum:
        yield f"{name} must be at least {minimum}; found {value}; try {max(minimum, 1)}"
    elif maximum is not None and int(value) > maximum:
        yield f"{name} must be at most {maximum}; found {value}; lower it"


def _prefix_problems(prefix: Any, prefix_ids: Any) -> Iterator[str]:
    """Yield the problems of a forced prefix of token ids."""
    if prefix_ids is None:
        return
    if isinstance(prefix_ids, (str, bytes)) or not isinstance(prefix_ids, Sequence):
        yield f"prefix_ids must be a list of token ids; found {prefix_ids!r:.60}; write [5, 6]"
        return
    wrong = [each for each in prefix_ids if isinstance(each, bool) or not isinstance(each, int)]
    if wrong:
        yield f"prefix_ids must be integers; found {wrong[0]!r:.60}; write [5, 6]"
    if prefix_ids and isinstance(prefix, str) and prefix.strip():
        yield (
            f"prefix and prefix_ids exclude each other; found {prefix!r:.60} and "
            f"{list(prefix_ids)!r:.60}; keep one"
        )


# What other libraries, or the command, call an option.
_OPTION_SYNONYMS = {
    "to": "target_language",
    "tgt_lang": "target_language",
    "target_lang": "target_language",
    "from_": "source_language",
    "src_lang": "source_language",
    "source_lang": "source_language",
    "lenpen": "length_penalty",
    "do_sample": "sample",
    "num_return_sequences": "nbest",
}


def parse_options(given: dict[str, Any]) -> TranslationOptions:
    """Return the options; raise ConfigError for unknown names, with the nearest known one."""
    known = list(TranslationOptions.__dataclass_fields__)
    wrong = [name for name in given if name not in known]
    if wrong:
        raise ConfigError(
            [
                f"there is no option {name!r} for translating; "
                f"{suggest_name(_OPTION_SYNONYMS.get(name, name), known)}"
                for name in wrong
            ]
        )
    return TranslationOptions(**given)
