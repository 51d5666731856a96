"""Constraints against plain predicates: every output by brute force, and Python's `re`."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.constraint_automaton import (
    AutomatonState,
    CompiledConstraints,
    OutputVocabulary,
    SentenceConstraints,
)
from dragoman.decoding.constraints import (
    Constraint,
    EqualLength,
    Forbid,
    Mirror,
    NoCopy,
    Punctuation,
    Regex,
    Require,
)
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search import SearchStrategy, search
from dragoman.text.special_tokens import BOS, EOS

SPECIAL: list[str | bytes | None] = [None] * 4
CHARACTERS = OutputVocabulary([*SPECIAL, " ", *"abcd，"])
SUBWORDS = OutputVocabulary([*SPECIAL, " ", "a", " a", "ab", "b", " b", "bca", "c", "，", "a，d"])
# Vocabularies of words: no character can be written alone.
WORDS = OutputVocabulary([*SPECIAL, " ab", " ba", "c", "a b", ",", "aab"])
STRIPPED = OutputVocabulary([*SPECIAL, " ", "a", " b", "b ", "，", "ca"], strip=True)


def decode(vocabulary: OutputVocabulary, texts: Sequence[str | bytes | None], tokens) -> str:
    """Decode as SentencePiece does: the first space is dropped."""
    text = "".join(str(texts[token]) for token in tokens)
    return text.strip(" ") if vocabulary.strip else text.removeprefix(" ")


TEXTS = {
    id(CHARACTERS): [*SPECIAL, " ", *"abcd，"],
    id(SUBWORDS): [*SPECIAL, " ", "a", " a", "ab", "b", " b", "bca", "c", "，", "a，d"],
    id(WORDS): [*SPECIAL, " ab", " ba", "c", "a b", ",", "aab"],
    id(STRIPPED): [*SPECIAL, " ", "a", " b", "b ", "，", "ca"],
}


def outputs(
    automaton: SentenceConstraints, limit: int, state: AutomatonState | None = None
) -> Iterator[tuple[int, ...]]:
    """Yield every sequence of tokens that the automaton allows; assert that none is a dead end."""
    state = automaton.start() if state is None else state
    found = [
        token
        for token in automaton.allowed(state, limit).nonzero()[0].tolist()
        if automaton.can_complete(state, token, limit)
    ]
    assert found, "a dead end"
    for token in found:
        if token == EOS:
            yield ()
            continue
        for rest in outputs(automaton, limit - 1, automaton.advance(state, token)):
            yield (token, *rest)


def random_constraints(rng: random.Random, *, letters: str = "abcd") -> list[Constraint]:
    """Draw some constraints."""

    def word() -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 2)))

    patterns = ["a.*", "[^a]*", "(ab|c)+.?", ".{2,3}", r"\w*，?\w*", "(a|b )*", ".?c?.*", "(..)*"]
    every = [
        EqualLength(),
        Mirror(),
        NoCopy(),
        Punctuation(),
        Require([word()]),
        Forbid([word(), word()]),
        Regex(rng.choice(patterns)),
        Require([word(), word()]),
    ]
    return rng.sample(every, rng.randint(1, 4))


@pytest.mark.parametrize(
    ("vocabulary", "limit", "trials"),
    [(CHARACTERS, 4, 100), (SUBWORDS, 3, 100), (WORDS, 3, 40), (STRIPPED, 4, 40)],
    ids=["characters", "subwords", "words", "stripped"],
)
def test_the_allowed_outputs_are_those_that_fulfil_every_predicate(
    vocabulary: OutputVocabulary, limit: int, trials: int
) -> None:
    rng = random.Random(limit + trials)
    texts = TEXTS[id(vocabulary)]
    every = [
        (tokens, decode(vocabulary, texts, tokens))
        for length in range(limit + 1)
        for tokens in itertools.product(range(4, len(texts)), repeat=length)
    ]
    possible = 0
    for _ in range(trials):
        constraints = random_constraints(rng)
        source = "".join(rng.choice("aabcxxy， ") for _ in range(rng.randint(0, 4))).strip()
        automaton = CompiledConstraints(constraints, vocabulary).bind(source)
        expected = {
            tokens
            for tokens, text in every
            if all(each.holds(source, text) for each in constraints)
        }
        if vocabulary.strip:  # white space of which nothing is left must not be written at the end
            expected = {
                tokens for tokens in expected if not tokens or not texts[tokens[-1]].endswith(" ")
            } | {tokens for tokens in expected if not decode(vocabulary, texts, tokens)}
        assert automaton.is_possible(limit) == bool(expected), (source, constraints)
        possible += bool(expected)
        if expected:
            found = list(outputs(automaton, limit))
            assert len(found) == len(set(found))
            assert set(found) == expected, (source, constraints)
    assert 0.3 * trials < possible < trials, "the trials must hold both cases"


class TableState(NamedTuple):
    """A source number a sentence and all tokens so far a row."""

    sources: Tensor  # (N,)
    history: Tensor  # (N * F, T)

    @property
    def device(self) -> torch.device:
        return self.sources.device

    @property
    def fan(self) -> int:
        return len(self.history) // len(self.sources)

    def select(self, rows: Tensor) -> TableState:
        return TableState(self.sources[rows // self.fan], self.history[rows])

    def reorder(self, rows: Tensor) -> TableState:
        return TableState(self.sources, self.history[rows])

    def keep(self, sentences: Tensor) -> TableState:
        rows = (sentences[:, None] * self.fan + torch.arange(self.fan)).flatten()
        return TableState(self.sources[sentences], self.history[rows])


@dataclass
class RandomModel:
    """Logits from a hash of (source, tokens so far)."""

    vocabulary: int
    peak: float = 1.0

    def start(self, memory: Tensor) -> TableState:
        return TableState(memory, torch.empty(len(memory), 0, dtype=torch.long))

    def step(self, tokens: Tensor, state: TableState) -> tuple[Tensor, TableState]:
        history = torch.cat([state.history, tokens[:, None]], dim=1)
        sources = state.sources.repeat_interleave(state.fan).tolist()
        rows = [self.logits(*each) for each in zip(sources, history.tolist(), strict=True)]
        return torch.tensor(rows), TableState(state.sources, history)

    def logits(self, source: int, history: Sequence[int]) -> list[float]:
        rng = random.Random(repr((source, list(history))))
        return [self.peak * rng.gauss(0, 2) for _ in range(self.vocabulary)]

    def log_prob(self, source: int, tokens: Sequence[int]) -> float:
        """Return the log-probability of a whole output."""
        written = [BOS, *tokens]
        return sum(
            float(torch.tensor(self.logits(source, written[: at + 1])).log_softmax(-1)[token])
            for at, token in enumerate([*tokens, EOS])
        )


def random_cases(
    rng: random.Random, vocabulary: OutputVocabulary, limit: int, count: int
) -> list[tuple[str, tuple[Constraint, ...], SentenceConstraints]]:
    """Draw sources with constraints that some output fulfils."""
    cases = []
    while len(cases) < count:
        constraints = tuple(random_constraints(rng))
        source = "".join(rng.choice("aabcxxy， ") for _ in range(rng.randint(1, 4))).strip()
        automaton = CompiledConstraints(constraints, vocabulary).bind(source)
        if automaton.is_possible(limit):
            cases.append((source, constraints, automaton))
    return cases


@pytest.mark.parametrize("vocabulary", [CHARACTERS, SUBWORDS], ids=["characters", "subwords"])
def test_a_beam_that_drops_nothing_finds_the_best_output_that_fulfils_all(
    vocabulary: OutputVocabulary,
) -> None:
    limit, penalty = 3, WuLengthPenalty(0.0)
    cases = random_cases(random.Random(5), vocabulary, limit, 12)
    model = RandomModel(vocabulary.size)
    found = search(
        model,
        torch.arange(len(cases)),
        limits=[limit] * len(cases),
        strategy=BeamSearch(1500, 1, penalty),
        constraints=[automaton for _, _, automaton in cases],
    )
    for number, (_, _, automaton) in enumerate(cases):
        best = max(outputs(automaton, limit), key=lambda each: model.log_prob(number, each))
        assert found[number][0].tokens == list(best)
        assert found[number][0].finished
        assert found[number][0].score == pytest.approx(model.log_prob(number, best), abs=1e-4)


STRATEGIES = [
    GreedySearch(),
    BeamSearch(3, 2),
    Sampling(seed=2, samples=3),
    Sampling(temperature=2.0, top_k=2, seed=3),
    Sampling(top_p=0.5, seed=4),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: each.name)
@pytest.mark.parametrize("vocabulary", [CHARACTERS, SUBWORDS, WORDS], ids=["ch", "sub", "word"])
def test_no_search_violates_a_constraint_or_comes_to_a_dead_end(
    vocabulary: OutputVocabulary, strategy: SearchStrategy
) -> None:
    limit = 6
    cases = random_cases(random.Random(7), vocabulary, limit, 20)
    model = RandomModel(vocabulary.size, peak=3.0)
    together = search(
        model,
        torch.arange(len(cases)),
        limits=[limit] * len(cases),
        strategy=strategy,
        constraints=[automaton for _, _, automaton in cases],
    )
    for number, (source, constraints, _) in enumerate(cases):
        for hypothesis in together[number]:
            text = decode(vocabulary, TEXTS[id(vocabulary)], hypothesis.tokens)
            assert hypothesis.finished
            assert all(each.holds(source, text) for each in constraints), (source, text)
        fresh = CompiledConstraints(constraints, vocabulary).bind(source)
        alone = search(
            model,
            torch.tensor([number]),
            limits=[limit],
            strategy=strategy,
            sample_ids=[number],
            constraints=[fresh],
        )
        assert [each.tokens for each in alone[0]] == [each.tokens for each in together[number]]


def test_samples_follow_the_distribution_over_the_outputs_that_may_follow() -> None:
    """Also where tokens are rejected one by one: with 4 letters Mirror and NoCopy leave few."""
    automaton = CompiledConstraints([EqualLength(), NoCopy(), Require(["b"])], CHARACTERS).bind(
        "axy"
    )
    limit, draws = 4, 4000
    model = RandomModel(CHARACTERS.size)
    found = search(
        model,
        torch.zeros(draws, dtype=torch.long),
        limits=[limit] * draws,
        strategy=Sampling(seed=1),
        constraints=[automaton] * draws,
    )
    counts = Counter(tuple(each[0].tokens) for each in found)
    expected = dict[tuple[int, ...], float]()
    for tokens in outputs(automaton, limit):
        state, probability, left = automaton.start(), 1.0, limit
        for at, token in enumerate([*tokens, EOS]):
            allowed = [
                each
                for each in automaton.allowed(state, left).nonzero()[0].tolist()
                if automaton.can_complete(state, each, left)
            ]
            weights = torch.tensor(model.logits(0, [BOS, *tokens[:at]])).exp()
            probability *= float(weights[token] / weights[allowed].sum())
            if token != EOS:
                state, left = automaton.advance(state, token), left - 1
        expected[tokens] = probability
    assert sum(expected.values()) == pytest.approx(1.0)
    assert counts.keys() <= expected.keys()
    for tokens, probability in expected.items():
        spread = math.sqrt(draws * probability * (1 - probability))
        assert abs(counts[tokens] - draws * probability) <= 4.5 * spread + 1
