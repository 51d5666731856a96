"""Constraints against plain predicates: every output by brute force, and Python's `re`."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dragoman.config.root_config import TextConfig
from dragoman.decoding import constraint_automaton
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.constraint_automaton import (
    AutomatonState,
    CompiledConstraints,
    ConstraintError,
    NotBlank,
    SentenceConstraints,
    check_constraints,
)
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.output_constraint_definitions import (
    Constraint,
    EqualLength,
    Forbid,
    Mirror,
    NoCopy,
    Punctuation,
    Regex,
    Require,
    contains_word,
    is_mark,
    mark_characters,
    parse_constraints,
)
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import SearchStrategy, search
from dragoman.decoding.token_surface_forms import TokenCharacters, code_point_bounds
from dragoman.errors import ConfigError
from dragoman.text.sentencepiece_tokenizer import Tokenizer, train_tokenizers
from dragoman.text.special_tokens import BOS, EOS
from tests.search_kit import TableState

SPECIAL: list[str | bytes | None] = [None] * 4
CHARACTERS = TokenCharacters([*SPECIAL, " ", *"abcd，"])
SUBWORDS = TokenCharacters([*SPECIAL, " ", "a", " a", "ab", "b", " b", "bca", "c", "，", "a，d"])
# Vocabularies of words: no character can be written alone.
WORDS = TokenCharacters([*SPECIAL, " ab", " ba", "c", "a b", ",", "aab"])
STRIPPED = TokenCharacters([*SPECIAL, " ", "a", " b", "b ", "，", "ca"], strip=True)


def decode(vocabulary: TokenCharacters, texts: Sequence[str | bytes | None], tokens) -> str:
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
    vocabulary: TokenCharacters, limit: int, trials: int
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
    rng: random.Random, vocabulary: TokenCharacters, limit: int, count: int
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
    vocabulary: TokenCharacters,
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
def test_no_search_violates_a_constraint_or_reaches_a_dead_end(
    vocabulary: TokenCharacters, strategy: SearchStrategy
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


# Tokens of bytes


BYTES = TokenCharacters([*SPECIAL, *(bytes([each]) for each in range(256)), " ", "a", "ab"])
BYTE_TEXTS: list[str | bytes | None] = [
    *SPECIAL,
    *(bytes([each]) for each in range(256)),
    " ",
    "a",
    "ab",
]


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode tokens of bytes and of text; raise UnicodeDecodeError for invalid UTF-8."""
    parts = [BYTE_TEXTS[token] for token in tokens]
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].removeprefix(" ")
    return b"".join(
        each.encode() if isinstance(each, str) else each or b"" for each in parts
    ).decode()


@pytest.mark.parametrize(
    ("constraints", "source", "limit"),
    [
        ([Regex("[é😀]b?")], "", 4),
        ([EqualLength(), Regex("[aé春]+")], "xx", 4),
        ([Punctuation(), Regex("[a-b，]*")], "x，", 4),
        ([Require(["é"]), Regex("[a-cé]*")], "", 3),
    ],
)
def test_bytes_form_valid_characters(
    constraints: list[Constraint], source: str, limit: int
) -> None:
    """Against brute force over the tokens that can have a part in it."""
    automaton = CompiledConstraints(constraints, BYTES).bind(source)
    found = set(outputs(automaton, limit))
    useful = {*"é😀春，abc".encode()}
    tokens = [4 + byte for byte in sorted(useful)] + [260, 261, 262]
    expected = set()
    for length in range(limit + 1):
        for each in itertools.product(tokens, repeat=length):
            try:
                text = decode_bytes(each)
            except UnicodeDecodeError:
                continue
            if all(constraint.holds(source, text) for constraint in constraints):
                expected.add(each)
    assert found == expected
    assert expected


def test_bytes_are_complete_wherever_their_tokens_stand() -> None:
    every: list[str | bytes | None] = [bytes([byte]) for byte in range(256)]
    assert TokenCharacters([*every, None], end=256).has_bytes
    assert TokenCharacters([None, *every], end=0).has_bytes
    assert not TokenCharacters([None, *every[1:]], end=0).has_bytes
    assert not TokenCharacters([None, *every], end=0, strip=True).has_bytes


def test_a_token_without_text_is_never_written() -> None:
    assert TokenCharacters([*SPECIAL, "", "a"]).table.valid.tolist() == [*[False] * 5, True]


def test_an_output_does_not_end_within_a_character() -> None:
    automaton = CompiledConstraints([Forbid(["x"])], BYTES).bind("")
    state = automaton.start()
    assert automaton.allowed(state, 9)[EOS]
    *begin, last = "春".encode()
    for byte in begin:
        state = automaton.advance(state, 4 + byte)
        assert not automaton.accepts(state)
        assert not automaton.allowed(state, 9)[EOS]
    state = automaton.advance(state, 4 + last)
    assert automaton.accepts(state)
    assert automaton.allowed(state, 9)[EOS]


def test_a_search_completes_the_character_that_its_bytes_begin() -> None:
    """Though the model would rather end after the first byte."""

    class Hasty(RandomModel):
        def logits(self, source: int, history: Sequence[int]) -> list[float]:
            wanted = EOS if len(history) > 1 else 4 + "é".encode()[0]
            return [9.0 * (token == wanted) for token in range(self.vocabulary)]

    for strategy in (GreedySearch(), BeamSearch(2), Sampling(top_k=1)):
        [[found, *_]] = search(
            Hasty(BYTES.size),
            torch.tensor([0]),
            limits=[3],
            strategy=strategy,
            constraints=[CompiledConstraints([Forbid(["x"])], BYTES).bind("")],
        )
        assert len(decode_bytes(found.tokens)) == 1
        assert found.finished


@pytest.mark.parametrize("character", ["é", "春", "😀"])
def test_a_character_is_begun_only_if_all_its_bytes_fit(character: str) -> None:
    written = character.encode()
    automaton = CompiledConstraints([Forbid(["x"])], BYTES).bind("")
    assert automaton.allowed(automaton.start(), len(written))[4 + written[0]]
    assert not automaton.allowed(automaton.start(), len(written) - 1)[4 + written[0]]
    after = CompiledConstraints([Regex(f"x{character}")], BYTES).bind("")
    assert after.is_possible(1 + len(written))
    assert not after.is_possible(len(written))
    marked = CompiledConstraints([EqualLength(), Punctuation()], BYTES).bind("x，")
    assert marked.is_possible(4)
    assert not marked.is_possible(3)


@pytest.mark.parametrize(
    ("code", "is_written"),
    [
        (0x00, False),
        (0x08, False),
        (0x09, True),
        (0x0A, False),
        (0x1F, False),
        (0x20, True),
        (0x7E, True),
        (0x7F, False),
        (0x80, True),
        (0xD7FF, True),
        (0xD800, False),
        (0xDFFF, False),
        (0xE000, True),
        (0x10FFFC, True),
        (0x10FFFD, False),
        (0x10FFFF, True),
    ],
)
def test_control_characters_and_the_escape_of_the_tokenizer_are_never_written(
    code: int, is_written: bool
) -> None:
    character = chr(code)
    vocabulary = TokenCharacters([*SPECIAL, "a", character, f"a{character}"])
    assert vocabulary.table.valid.tolist() == [*[False] * 4, True, is_written, is_written]
    automaton = CompiledConstraints([Forbid(["x"])], BYTES).bind("")
    state = automaton.advance(automaton.start(), 261)
    *begin, last = character.encode("utf-8", "surrogatepass")
    for byte in begin:
        if not automaton.allowed(state, 9)[4 + byte]:
            break
        state = automaton.advance(state, 4 + byte)
    else:
        assert automaton.allowed(state, 9)[4 + last] == is_written
        return
    assert not is_written


def test_bytes_are_forbidden_under_no_copy_and_mirror() -> None:
    """Which characters were written is known of those in the vocabulary only."""
    for constraint in (NoCopy(), Mirror()):
        automaton = CompiledConstraints([constraint], BYTES).bind("éé")
        allowed = automaton.allowed(automaton.start(), 9)
        assert allowed[4 + ord("b")]
        assert not allowed[4 + 0x80 : 4 + 0x100].any()


def test_sentences_of_any_length_share_their_compiled_constraints() -> None:
    compiled = CompiledConstraints([EqualLength(), Regex("[ab]*")], CHARACTERS)
    for length in (3, 1, 4, 0, 3):
        automaton = compiled.bind("x" * length)
        found = {decode(CHARACTERS, TEXTS[id(CHARACTERS)], each) for each in outputs(automaton, 4)}
        assert {len(each) for each in found} == {length}
        assert not length or not automaton.is_possible(length - 1)


def test_characters_that_no_token_writes_are_missing_unless_there_are_bytes() -> None:
    assert CHARACTERS.missing("春a春，夏") == ["春", "夏"]
    assert BYTES.missing("春a") == []


def test_the_first_token_loses_its_spaces() -> None:
    texts: list[str | bytes | None] = [*SPECIAL, "  a", " b", "c"]
    assert TokenCharacters(texts).first_table.lengths.tolist() == [0, 0, 0, 0, 2, 1, 1]
    assert TokenCharacters(texts, strip=True).first_table.lengths.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert TokenCharacters(texts).table.lengths.tolist() == [0, 0, 0, 0, 3, 2, 1]


def test_the_bounds_of_a_utf8_prefix_are_those_of_its_characters() -> None:
    rng = random.Random(0)
    codes = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000, 0x10FFFF]
    codes += [
        rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]) for _ in range(300)
    ]
    for code in codes:
        whole = chr(code).encode()
        assert code_point_bounds(whole) == (code, code)
        for length in range(1, len(whole)):
            low, high = code_point_bounds(whole[:length]) or (1, 0)
            assert low <= code <= high
            for bound in (low, high):
                assert chr(bound).encode("utf-8", "surrogatepass").startswith(whole[:length])
    for wrong in (b"\x80", b"\xc0", b"\xf5", b"\xff", b"\xe4a", b"\xe0\x80", b"\xf4\x90"):
        assert code_point_bounds(wrong) is None


@pytest.mark.parametrize("algorithm", ["characters", "bpe", "unigram"])
def test_texts_of_tokens_are_those_that_the_tokenizer_decodes(algorithm: str) -> None:
    lines = ["春风又绿江南岸，", "明月何时照我还", "a man walks, a dog runs", "x  y ▁z"] * 5
    size = {"characters": 400, "bpe": 320, "unigram": 295}[algorithm]
    tokenizer = Tokenizer.train(lines, TextConfig(tokenizer=algorithm, vocab_size=size))
    vocabulary = TokenCharacters.of(tokenizer)
    assert vocabulary.size == len(tokenizer)
    assert vocabulary.has_bytes
    assert not vocabulary.table.valid[:4].any(), "special tokens have no text"
    automaton = CompiledConstraints([Forbid(["dog", "月"])], vocabulary).bind("")
    rng = random.Random(3)
    for _ in range(150):
        state, tokens, left = automaton.start(), list[int](), 12
        while True:
            token = rng.choice(automaton.allowed(state, left).nonzero()[0].tolist())
            if token == EOS:
                break
            tokens.append(token)
            state, left = automaton.advance(state, token), left - 1
        text = tokenizer.decode(tokens)
        assert len(text) == state.position, (text, tokenizer.tokens(tokens))
        assert "�" not in text
        assert Forbid(["dog", "月"]).holds("", text)


def test_the_tag_of_a_language_is_never_written() -> None:
    lines = ["a man walks", "ein Mann geht"] * 5
    tokenizers = train_tokenizers(
        lines, lines, TextConfig(tokenizer="characters", vocab_size=400), languages=["de", "en"]
    )
    tags = list(tokenizers.tgt.tag_ids.values())
    assert len(tags) == 2
    vocabulary = TokenCharacters.of(tokenizers.tgt)
    automaton = CompiledConstraints([Forbid(["man"])], vocabulary).bind("")
    state = automaton.start()
    assert not automaton.allowed(state, 20)[tags].any()
    [letter] = tokenizers.tgt.encode("a")[-1:]
    assert not automaton.allowed(automaton.advance(state, letter), 19)[tags].any()


# What is asked for


def test_the_predicates_on_couplets() -> None:
    assert Mirror().holds("处处春风", "人人夏雨")
    assert not Mirror().holds("处处春风", "人家夏雨")
    assert Mirror().holds("山，水，云", "月，日！星"), "punctuation is left aside"
    assert NoCopy().holds("处处春风", "人人夏雨")
    assert not NoCopy().holds("春风", "春雨")
    assert not NoCopy().holds("春风", "雨雨")
    assert NoCopy().holds("春，风，", "夏，雨，")
    assert not NoCopy().holds("春", "夏夏"), "past the end nothing repeats"
    assert Punctuation().holds("春，风", "夏，雨")
    assert not Punctuation().holds("春，风", "夏雨")
    assert not Punctuation().holds("春，风", "夏，雨，")
    assert not Punctuation().holds("春风", "夏，")
    assert EqualLength().holds("春风", "夏雨")


def test_marks_are_punctuation_and_white_space_but_no_symbols() -> None:
    for text, expected in ((" \t\u3000，。-_「", True), ("a春1+$=^🙂é", False)):
        assert [is_mark(each) for each in text] == [expected] * len(text)
        assert [each in mark_characters() for each in text] == [expected] * len(text)


def test_an_output_that_is_not_blank_holds_more_than_white_space() -> None:
    assert [NotBlank().holds("", each) for each in ("", " ", "\u3000\t", " a ")] == [
        False,
        False,
        False,
        True,
    ]
    automaton = CompiledConstraints([NotBlank()], CHARACTERS).bind("")
    state = automaton.start()
    for token, expected in ((4, False), (4, False), (5, True), (4, True)):
        assert automaton.accepts(state) is (token == 4 and expected)
        state = automaton.advance(state, token)
        assert automaton.accepts(state) is expected


def test_words_are_normalized_as_the_output_is() -> None:
    assert Require(["É", "A"]).normalized(str.lower) == Require(["é", "a"])
    assert Forbid("É").normalized(str.lower) == Forbid(["é"])
    assert EqualLength().normalized(str.lower) == EqualLength()


def test_a_word_given_as_a_string_is_one_word() -> None:
    assert Require("ab").words == ("ab",)
    assert Forbid("ab").holds("", "a b")


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [
        ("a dog runs", "dog", True),
        ("a dogma", "dog", False),
        ("hotdog", "dog", False),
        ("dogma, dog", "dog", True),
        ("春风得意", "风得", True),
        ("x春y", "春", True),
        ("wi-fi", "fi", True),
        ("12%", "2%", False),
        ("a 2%b", "2%", True),
        ("ba a a", "a a", True),
        ("ba a ab", "a a", False),
        ("dog_", "dog", False),
        ("_dog", "dog", False),
        ("2nd", "nd", False),
        ("ωμέγα", "μέ", False),
        ("собака", "бак", False),
        ("กขค", "ข", True),
        ("ກຂຄ", "ຂ", True),
        ("ཀཁག", "ཁ", True),
        ("ကခဂ", "ခ", True),
        ("កខគ", "ខ", True),
        ("かなだ", "な", True),
        ("한국어", "국", True),
        ("豈更車", "更", True),
        ("ｶｷｸ", "ｷ", True),
        ("𛀁𛀂𛀃", "𛀂", True),
        ("𠀀𠀁𠀂", "𠀁", True),
    ],
)
def test_a_word_respects_the_boundaries_of_its_script(text: str, word: str, expected: bool) -> None:
    assert contains_word(text, word) is expected
    vocabulary = TokenCharacters([*SPECIAL, *sorted(set(text))])
    tokens = [4 + sorted(set(text)).index(each) for each in text]
    for constraint, wanted in ((Require([word]), expected), (Forbid([word]), not expected)):
        automaton = CompiledConstraints([constraint], vocabulary).bind("")
        state = automaton.start()
        for token in tokens:
            state = automaton.advance(state, token)
        assert automaton.accepts(state) is wanted


def test_constraints_are_parsed_by_name() -> None:
    found = parse_constraints(
        ["equal_length", "no-copy", "equal_length"],
        require=["春", "a"],
        forbid=["死", "b"],
        regex=["a*"],
    )
    assert found == (
        EqualLength(),
        NoCopy(),
        Require(["春", "a"]),
        Forbid(["死", "b"]),
        Regex("a*"),
    )
    assert [each.label for each in found] == [
        "equal_length",
        "no_copy",
        "require 春 a",
        "forbid 死 b",
        "regex a*",
    ]
    with pytest.raises(ConfigError, match="found 'mirrored'; did you mean mirror"):
        parse_constraints(["mirrored"])
    with pytest.raises(ConfigError, match="require needs words; found ' '"):
        Require(["春", " "])
    with pytest.raises(ConfigError, match="forbid needs at least one word; found none"):
        Forbid([])
    with pytest.raises(ConfigError, match="regex needs a pattern; found 3"):
        Regex(3)  # type: ignore[arg-type]


# Conflicts


def conflict(constraints: Sequence[Constraint], source: str, limit: int = 20, prefix=()) -> str:
    compiled = CompiledConstraints(constraints, CHARACTERS)
    with pytest.raises(ConstraintError) as caught:
        check_constraints(compiled, compiled.bind(source), limit, prefix, line=3)
    return str(caught.value)


def test_an_error_names_the_constraints_that_conflict_and_no_others() -> None:
    found = conflict([Punctuation(), EqualLength(), Require(["abcd"]), Forbid(["d，"])], "xyz")
    assert (
        "found none under equal_length (3 characters) and require abcd, for 'xyz' (line 3)" in found
    )
    found = conflict([Require(["ab"]), Mirror(), Forbid(["ab"]), NoCopy()], "xyz")
    assert "under require ab and forbid ab" in found
    found = conflict([EqualLength(), Mirror(), Require(["ab"])], "xx")
    assert "under equal_length (2 characters) and mirror and require ab" in found
    # Four letters are not enough for five different characters.
    found = conflict([EqualLength(), Mirror(), NoCopy(), Punctuation()], "vwxyz")
    assert "found none under equal_length (5 characters) and no_copy and punctuation" in found
    assert "found none under regex [e-z]+, for 'x' (line 3); change it" in conflict(
        [Regex("[e-z]+")], "x"
    )
    found = conflict([NoCopy(), Require(["春"])], "x")
    assert "the model's vocabulary must hold" in found
    assert "found none for '春' of require 春" in found
    found = conflict([Require(["abcd"]), Mirror()], "xyz", limit=3)
    assert "found none of at most 3 tokens under require abcd" in found
    found = conflict([Regex("b.*")], "xyz", prefix=[5])
    assert "the prefix must agree with the constraints" in found
    assert "found one that no output continues for 'xyz' (line 3)" in found


def test_an_error_names_the_setting_to_change() -> None:
    """Not the prefix, if no output fulfils the constraints anyway."""
    rules = [Require(["ab"]), Forbid(["ab"])]
    assert conflict(rules, "xyz").endswith("drop one of them")
    assert "found none under require ab and forbid ab" in conflict(rules, "xyz", prefix=[5])
    assert conflict([Regex("[e-z]+")], "x").endswith("change it")
    found = conflict([EqualLength(), Punctuation()], "x！")
    assert "found none for '！' of punctuation, for 'x！' (line 3)" in found
    compiled = CompiledConstraints(rules, CHARACTERS)
    with pytest.raises(ConstraintError, match="forbid ab, for 'xyz'; drop"):
        check_constraints(compiled, compiled.bind("xyz"), 20)


def test_constraints_too_large_for_the_vocabulary_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = CompiledConstraints([Regex("[ab]{3}c")], CHARACTERS)
    states, kinds = compiled.next_by_kind.shape
    monkeypatch.setattr(constraint_automaton, "MAX_TABLE_CELLS", states * kinds)
    CompiledConstraints([Regex("[ab]{3}c")], CHARACTERS)
    monkeypatch.setattr(constraint_automaton, "MAX_TABLE_CELLS", states * kinds - 1)
    with pytest.raises(ConfigError, match=f"found {states} states for {kinds} kinds of tokens"):
        CompiledConstraints([Regex("[ab]{3}c")], CHARACTERS)


def test_the_limit_on_states_is_of_each_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many searches of one sentence do not use it up."""
    assert constraint_automaton.MAX_SEARCHED_STATES == 20_000
    compiled = CompiledConstraints([Mirror(), EqualLength(), Regex(".*[bc]")], CHARACTERS)
    source, limit, tokens = "xyxyx", 5, range(5, CHARACTERS.size)
    expected, needed = [], 0
    for token in tokens:
        alone = compiled.bind(source)
        expected.append(alone.can_complete(alone.start(), token, limit))
        needed = max(needed, alone._visited)
    monkeypatch.setattr(constraint_automaton, "MAX_SEARCHED_STATES", needed)
    together = compiled.bind(source)
    assert [together.can_complete(together.start(), each, limit) for each in tokens] == expected
    assert set(expected) == {True, False}


@pytest.mark.parametrize("more", [(), (NoCopy(),)], ids=["regex", "no_copy"])
def test_tokens_of_a_prefix_count_against_the_limit(more: tuple[Constraint, ...]) -> None:
    """Two letters are still missing after the prefix."""
    rules = [Regex(".*bc"), *more]
    found = conflict(rules, "xyz", limit=3, prefix=[5, 8])
    assert "the prefix must agree with the constraints" in found
    compiled = CompiledConstraints(rules, CHARACTERS)
    check_constraints(compiled, compiled.bind("xyz"), 4, [5, 8])


def test_a_hard_combination_is_decided_exactly() -> None:
    """A path through all nodes of a graph, each once, is NoCopy and forbidden pairs."""
    rng = random.Random(11)
    nodes = "甲乙丙丁戊己庚"
    vocabulary = TokenCharacters([*SPECIAL, *nodes])
    pairs = [(one, other) for one in nodes for other in nodes if one != other]
    seen = set()
    for _ in range(25):
        edges = {pair for pair in pairs if rng.random() < 0.27}
        missing = Forbid([one + other for one, other in pairs if (one, other) not in edges])
        automaton = CompiledConstraints([EqualLength(), NoCopy(), missing], vocabulary).bind(
            "1234567"
        )
        paths = [
            path
            for path in itertools.permutations(nodes)
            if all(pair in edges for pair in itertools.pairwise(path))
        ]
        assert automaton.is_possible(7) is bool(paths)
        if paths:
            found = {"".join(nodes[token - 4] for token in each) for each in outputs(automaton, 7)}
            assert found == {"".join(path) for path in paths}
        seen.add(bool(paths))
    assert seen == {True, False}


def test_the_translation_of_a_mirrored_character_is_reused() -> None:
    """After `.` the pattern is in one state, and only the character that replaced x is allowed
    there again.
    """
    for source, pattern, expected in (
        ("xx", ".b", {"bb"}),
        ("xyx", "..[bc]", {"bab", "bcb", "bdb", "cac", "cbc", "cdc", "bbb", "ccc"}),
    ):
        constraints = [Mirror(), EqualLength(), Regex(pattern)]
        automaton = CompiledConstraints(constraints, CHARACTERS).bind(source)
        found = {decode(CHARACTERS, TEXTS[id(CHARACTERS)], each) for each in outputs(automaton, 4)}
        assert {each for each in found if " " not in each and "，" not in each} == expected


@pytest.mark.parametrize("pattern", ["z(,z|bq)", "z(bz|,q)"])
@pytest.mark.parametrize("letters", ["bq,z", ",bqz", "zq,b", "zqb,"])
def test_no_copy_distinguishes_punctuation_from_letters(pattern: str, letters: str) -> None:
    """A search that takes a comma and a letter for interchangeable tries only one of them."""
    compiled = CompiledConstraints(
        [NoCopy(), Regex(pattern)], TokenCharacters([*SPECIAL, *letters])
    )
    assert compiled.bind("123").is_possible(3)


def test_unfinished_search_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion that is not found within the limit on states counts as none."""
    source, limit = "xyxyx", 5
    compiled = CompiledConstraints([Mirror(), EqualLength(), Regex(".*[bc]")], CHARACTERS)
    assert compiled.bind(source).is_possible(limit)
    monkeypatch.setattr(constraint_automaton, "MAX_SEARCHED_STATES", 1)
    assert not compiled.bind(source).is_possible(limit)


def test_a_source_too_long_for_a_search_of_its_completions_is_an_error() -> None:
    compiled = CompiledConstraints([Mirror(), EqualLength(), Regex(".*[bc]")], CHARACTERS)
    automaton, limit = compiled.bind("x" * 1500), 1500
    assert not automaton.can_complete(automaton.start(), 6, limit)
    with pytest.raises(ConstraintError, match="some output must fulfil all constraints"):
        check_constraints(compiled, automaton, limit)
