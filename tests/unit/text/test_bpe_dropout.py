"""BPE-dropout: SentencePiece's encoding without dropout, the paper's algorithm with it."""

from __future__ import annotations

import collections
import itertools
import lzma
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config.root_config import TextConfig
from dragoman.errors import DataError
from dragoman.runtime.counter_rng import CounterRNG
from dragoman.text import bpe_dropout as merges_module
from dragoman.text.bpe_dropout import BPEDropoutEncoder
from dragoman.text.sentencepiece_tokenizer import Tokenizer
from dragoman.text.special_tokens import UNK

DATA = Path(
    os.environ.get("DRAGOMAN_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "multi30k").is_dir(), reason=f"no corpora at {DATA} (set DRAGOMAN_DATA)"
)
WORDS = {"a": 4, "b": 5, "c": 6, "\u2581": 7, "ab": 8, "bc": 9, "abc": 10, "\u2581a": 11}
SCORES = {
    "a": -9.0,
    "b": -9.0,
    "c": -9.0,
    "\u2581": -9.0,
    "ab": -1.0,
    "bc": -2.0,
    "abc": -3.0,
    "\u2581a": -4.0,
}


def read_lines(path: Path) -> list[str]:
    with lzma.open(path) as file:
        return file.read().decode().split("\n")[:-1]


@pytest.fixture(scope="module")
def multi30k() -> tuple[Tokenizer, list[str]]:
    lines = [
        line
        for name in ("train.de.xz", "train.en.xz")
        for line in read_lines(DATA / "multi30k" / name)
    ]
    return Tokenizer.train(lines, TextConfig(vocab_size=4000)), lines


@needs_data
def test_without_dropout_it_is_sentencepiece_on_multi30k(
    multi30k: tuple[Tokenizer, list[str]],
) -> None:
    tokenizer, lines = multi30k
    sample = lines[::4]
    assert [
        tokenizer.encode_with_dropout(line, dropout=0.0, generator=CounterRNG(0)) for line in sample
    ] == tokenizer.encode_batch(sample)


@needs_data
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_without_dropout_it_is_sentencepiece_on_chinese(byte_fallback: bool) -> None:
    lines = read_lines(DATA / "zh_couplet" / "train.first.xz")[:4000]
    tokenizer = Tokenizer.train(
        lines, TextConfig(vocab_size=4000, byte_fallback=byte_fallback, character_coverage=0.98)
    )
    lines += [
        "".join(lines[i : i + 12]) for i in range(0, 480, 12)
    ]  # words beyond those that are remembered
    assert [
        tokenizer.encode_with_dropout(line, dropout=0.0, generator=CounterRNG(0)) for line in lines
    ] == tokenizer.encode_batch(lines)


@needs_data
@settings(max_examples=300, deadline=None)
@given(
    text=st.text(
        alphabet=st.one_of(
            st.sampled_from(" \u2581abetnsr,.äß中\U0010fffd\t"),
            st.characters(exclude_categories=("Cs",)),
        ),
        max_size=60,
    )
)
def test_without_dropout_it_is_sentencepiece_on_any_text(
    multi30k: tuple[Tokenizer, list[str]], text: str
) -> None:
    tokenizer, _ = multi30k
    assert tokenizer.encode_with_dropout(
        text, dropout=0.0, generator=CounterRNG(0)
    ) == tokenizer.encode(text)


@needs_data
def test_equal_seeds_give_equal_tokens(multi30k: tuple[Tokenizer, list[str]]) -> None:
    """SentencePiece's sampler ignores its seed: no exact resume (joeynmt#125, OpenNMT-py#2006)."""
    tokenizer, lines = multi30k
    fresh = Tokenizer(
        tokenizer.model, algorithm="bpe", normalization="nfc"
    )  # remembers no words yet
    for number, line in enumerate(lines[:300]):
        first = tokenizer.encode_with_dropout(line, dropout=0.1, generator=CounterRNG(1, number))
        assert first == fresh.encode_with_dropout(
            line, dropout=0.1, generator=CounterRNG(1, number)
        )
        assert tokenizer.decode(first) == line


@needs_data
def test_dropout_gives_more_tokens_and_varies(
    multi30k: tuple[Tokenizer, list[str]],
) -> None:
    tokenizer, lines = multi30k
    plain = sum(map(len, tokenizer.encode_batch(lines[:500])))
    growth = []
    for dropout in (0.05, 0.1, 0.3):
        rows = [
            tokenizer.encode_with_dropout(line, dropout=dropout, generator=CounterRNG(2, i))
            for i, line in enumerate(lines[:500])
        ]
        growth.append(sum(map(len, rows)) / plain)
    assert 1.05 < growth[0] < growth[1] < growth[2]
    assert growth[1] == pytest.approx(1.2, abs=0.05)
    different = {
        tuple(tokenizer.encode_with_dropout(lines[0], dropout=0.1, generator=CounterRNG(seed)))
        for seed in range(20)
    }
    assert len(different) > 10


def exact_distribution(word: str, dropout: float) -> dict[tuple[str, ...], float]:
    """Algorithm 1 of Provilkov et al., by going through every outcome of every draw."""
    ends: dict[tuple[str, ...], float] = collections.defaultdict(float)

    def expand(cut: tuple[str, ...], probability: float) -> None:
        moves = sorted(
            (-SCORES[cut[i] + cut[i + 1]], i)
            for i in range(len(cut) - 1)
            if cut[i] + cut[i + 1] in SCORES
        )
        for kept in itertools.product([False, True], repeat=len(moves)):
            here = probability
            for keep in kept:
                here *= (1 - dropout) if keep else dropout
            best = next((move for move, keep in zip(moves, kept, strict=True) if keep), None)
            if best is None:
                ends[cut] += here
            else:
                position = best[1]
                expand(
                    (*cut[:position], cut[position] + cut[position + 1], *cut[position + 2 :]), here
                )

    expand(tuple(word), 1.0)
    return ends


@pytest.mark.parametrize("remembered", [True, False])
@pytest.mark.parametrize("dropout", [0.2, 0.5])
def test_the_draws_follow_the_papers_algorithm(
    monkeypatch: pytest.MonkeyPatch, remembered: bool, dropout: float
) -> None:
    """Both merge implementations, cached and with a heap, against enumeration of every outcome."""
    if not remembered:
        monkeypatch.setattr(merges_module, "_MAX_CACHED_WORD_LENGTH", 0)
    merges = BPEDropoutEncoder(SCORES, WORDS, None)
    draw = CounterRNG(11)
    names = {number: token for token, number in WORDS.items()}
    times = 20_000
    seen = collections.Counter(
        tuple(names[i] for i in merges.encode("abcab", dropout, draw)) for _ in range(times)
    )
    expected = exact_distribution("\u2581abcab", dropout)
    assert sum(expected.values()) == pytest.approx(1)
    for cut, probability in expected.items():
        assert seen[cut] / times == pytest.approx(probability, abs=0.012), cut


def test_leftmost_of_equal_scores_is_merged_first() -> None:
    merges = BPEDropoutEncoder(SCORES | {"aa": -0.5}, WORDS | {"aa": 12}, None)
    assert merges.encode("aaa", 0.0, CounterRNG(0)) == [7, 12, 4]


def test_consecutive_unknown_characters_are_one_token() -> None:
    merges = BPEDropoutEncoder(SCORES, WORDS, None)
    assert merges.encode("axyzab", 0.0, CounterRNG(0)) == [11, UNK, 8]
    assert merges.encode("x" * 50, 0.0, CounterRNG(0)) == [7, UNK]


def test_unknown_characters_become_bytes() -> None:
    merges = BPEDropoutEncoder(SCORES, WORDS, list(range(100, 356)))
    assert merges.encode("aä", 0.0, CounterRNG(0)) == [11, 100 + 0xC3, 100 + 0xA4]


def test_tokens_across_spaces_are_found() -> None:
    merges = BPEDropoutEncoder(
        SCORES | {"b\u2581": -0.1, "b\u2581a": -0.2}, WORDS | {"b\u2581": 12, "b\u2581a": 13}, None
    )
    assert merges.encode("b a", 0.0, CounterRNG(0)) == [7, 13]


def test_emptying_the_word_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["".join(letters) for letters in itertools.product("abc", repeat=4)]
    plenty = BPEDropoutEncoder(SCORES, WORDS, None)
    monkeypatch.setattr(merges_module, "_MAX_CACHED_WORDS", 3)
    few = BPEDropoutEncoder(SCORES, WORDS, None)
    for seed, text in enumerate(texts * 2):
        assert few.encode(text, 0.3, CounterRNG(seed)) == plenty.encode(text, 0.3, CounterRNG(seed))


def test_empty_text_has_no_tokens() -> None:
    assert BPEDropoutEncoder(SCORES, WORDS, None).encode("", 0.5, CounterRNG(0)) == []


def test_bpe_dropout_needs_bpe_and_a_probability_below_one() -> None:
    unigram = Tokenizer.train(
        ["a b c d e f g"] * 10,
        TextConfig(tokenizer="unigram", vocab_size=12, byte_fallback=False, character_coverage=1.0),
    )
    with pytest.raises(DataError, match=r"found text.tokenizer=unigram; set text.tokenizer=bpe"):
        unigram.encode_with_dropout("a b", dropout=0.1, generator=CounterRNG(0))
    bpe = Tokenizer(unigram.model, algorithm="bpe", normalization="nfc")
    with pytest.raises(DataError, match=r"from 0 to below 1; found 1\.5"):
        bpe.encode_with_dropout("a b", dropout=1.5, generator=CounterRNG(0))
