"""Vocabulary extension against SentencePiece's own trainer, and what it promises of old text."""

from __future__ import annotations

import random

import pytest

from dragoman.config import TextConfig
from dragoman.text.sentencepiece_tokenizer import Tokenizer, Tokenizers
from dragoman.text.special_tokens import UNK
from dragoman.text.tokenizer_extension import (
    extend_tokenizer,
    extend_tokenizers,
    learn_pairs,
    original_tokenizers,
    segment_added_tokens,
)

GREEK = "καλημέρα κόσμε και καλή μέρα"


def make_lines(seed: int, count: int = 400) -> list[str]:
    """Draw sentences of words and words of letters, both by Zipf's law."""
    draw = random.Random(seed)
    letters = "eariotnslcudpmhgbfywkvxzjq"
    rare = [1 / (rank + 2) for rank in range(len(letters))]
    words = ["".join(draw.choices(letters, rare, k=draw.randint(2, 7))) for _ in range(400)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    return [" ".join(draw.choices(words, weights, k=8)) for _ in range(count)]


def config(algorithm: str, vocab_size: int, *, byte_fallback: bool = False) -> TextConfig:
    return TextConfig(tokenizer=algorithm, vocab_size=vocab_size, byte_fallback=byte_fallback)


def test_bpe_continues_as_if_it_had_been_trained_with_a_larger_vocabulary() -> None:
    lines = make_lines(4)  # of those tried, one in which no pairs are equally frequent
    small, large = (Tokenizer.train(lines, config("bpe", size)) for size in (40, 70))
    extended = extend_tokenizer(small, lines, 30, config("bpe", 40))
    assert len(extended) == 70
    assert set(extended.tokens(range(70))) == set(large.tokens(range(70)))
    cut = [large.tokens(ids) for ids in large.encode_batch(lines)]
    assert [extended.tokens(ids) for ids in extended.encode_batch(lines)] == cut


@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_old_text_is_segmented_as_before_and_then_joined(
    algorithm: str, byte_fallback: bool
) -> None:
    old_lines, new_lines = make_lines(1), make_lines(2)
    text = config(algorithm, 60 + 256 * byte_fallback, byte_fallback=byte_fallback)
    old = Tokenizer.train(old_lines, text)
    new = extend_tokenizer(old, [*new_lines, *[GREEK] * 50], 60, text)
    assert len(new) == len(old) + 60
    assert new.tokens(range(len(old))) == old.tokens(range(len(old)))
    parts = segment_added_tokens(new, old)
    changed = 0
    for before, after in zip(old.encode_batch(old_lines), new.encode_batch(old_lines), strict=True):
        expanded = [
            part
            for each in after
            for part in ([each] if each < len(old) else parts[each - len(old)])
        ]
        assert expanded == before
        changed += before != after
    assert changed, "some neighbours were joined"
    untouched = [token for token in old.tokens(range(len(old))) if token.startswith("▁")]
    assert any(new.encode(each[1:]) == old.encode(each[1:]) for each in untouched)
    # Greek was unknown or bytes, and is a few tokens now.
    assert len(old.encode(GREEK)) > len(new.encode(GREEK)) or UNK in old.encode(GREEK)
    assert UNK not in new.encode(GREEK)
    assert not any(token.startswith("<0x") for token in new.tokens(new.encode(GREEK)))
    assert new.decode(new.encode(GREEK)) == GREEK


def test_added_tokens_can_be_taken_away_and_extended_again() -> None:
    text = config("bpe", 50)
    old = Tokenizer.train(make_lines(1), text)
    once = extend_tokenizer(old, make_lines(2), 20, text)
    twice = extend_tokenizer(once, [GREEK] * 20, 25, text)
    assert len(twice) == len(old) + 45
    for size, expected in ((len(once), once), (len(old), old)):
        (found, other) = original_tokenizers(Tokenizers(twice, twice), size, size)
        assert found is other
        assert found.digest == expected.digest
    again = extend_tokenizer(old, make_lines(2), 20, text)
    assert again.digest == once.digest  # deterministic


def test_characters_are_extended_by_characters_the_most_frequent_first() -> None:
    text = config("characters", 40)
    old = Tokenizer.train(make_lines(1), text)
    new = extend_tokenizer(old, [GREEK] * 3, 5, text)
    assert new.tokens(range(len(old), len(new))) == ["α", "κ", "μ", "έ", "λ"]
    assert extend_tokenizer(old, make_lines(1), 5, text).digest == old.digest  # nothing to add


def test_characters_count_as_often_as_their_words_occur() -> None:
    text = config("characters", 40)
    old = Tokenizer.train(make_lines(1), text)
    new = extend_tokenizer(old, ["β β β β αα"], 1, text)
    assert new.tokens(range(len(old), len(new))) == ["β"]


def test_characters_rarer_than_the_coverage_stay_unknown() -> None:
    text = TextConfig(
        tokenizer="characters", vocab_size=40, byte_fallback=False, character_coverage=0.98
    )
    old = Tokenizer.train(make_lines(1), text)
    new = extend_tokenizer(old, ["β" * 99 + "α"], 9, text)
    assert new.tokens(range(len(old), len(new))) == ["β"]


def test_new_text_is_normalized_before_it_is_learnt_from() -> None:
    text = TextConfig(
        tokenizer="characters", vocab_size=40, byte_fallback=False, normalization="nfc"
    )
    old = Tokenizer.train(make_lines(1), text)
    new = extend_tokenizer(old, ["e\u0301 e\u0301"], 9, text)
    assert new.tokens(range(len(old), len(new))) == ["é"]


def test_each_vocabulary_learns_from_its_own_side() -> None:
    text = config("bpe", 45)
    tokenizers = Tokenizers(*(Tokenizer.train(make_lines(seed), text) for seed in (1, 2)))
    src, tgt = extend_tokenizers(tokenizers, [GREEK] * 9, make_lines(3), 12, text)
    assert UNK not in src.encode("καλ")
    assert UNK in tgt.encode("καλ")
    assert len(tgt) == len(tokenizers.tgt) + 12


def test_pairs_stay_within_scripts_lengths_and_counts() -> None:
    words = {
        ("▁", "a", "б"): 9,  # two scripts
        ("x" * 9, "y" * 8): 9,  # 17 characters
        ("o", "n", "c", "e"): 1,
        ("7", "k"): 9,
        ("n", "\u0303"): 4,  # a combining mark joins its letter
    }
    assert learn_pairs(words, 9) == [("▁", "a"), ("n", "\u0303")]
    assert learn_pairs(words, 9, known={"▁a"}) == [("n", "\u0303")]
    assert learn_pairs({("x" * 8, "y" * 8): 2}, 9) == [("x" * 8, "y" * 8)]  # 16 characters
    assert learn_pairs({("行", "く"): 2}, 9) == [("行", "く")]  # Japanese mixes its scripts
    assert learn_pairs({("a", "a", "a", "a"): 3}, 9) == [("a", "a"), ("aa", "aa")]
