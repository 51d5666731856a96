"""Spans tile the text, split no grapheme and belong to the tokens, in any script."""

from __future__ import annotations

import functools

import pytest

from dragoman.config.root_config import TextConfig
from dragoman.explain.explanation import Token
from dragoman.explain.explanation_consistency_checks import check_spans
from dragoman.explain.token_spans import find_token_spans, find_words, text_direction, tokenize_text
from dragoman.text.sentencepiece_tokenizer import Tokenizer
from dragoman.text.special_tokens import EOS

TEXTS = {
    "plain": "The houses are not big, are they?",
    "arabic": "مرحبا بالعالم، كيف حالك؟",
    "hebrew": "שלום עולם",
    "mixed": "The word سلام means peace.",
    "chinese": "今天天气很好，我们去公园吧。",
    "japanese": "今日は良い天気ですね。",
    "korean": "안녕하세요 세계",
    "thai": "สวัสดีชาวโลก",
    "hindi": "नमस्ते दुनिया क्षत्रिय",
    "emoji": "family 👨‍👩‍👧‍👦 and flag 🇩🇪 done 👍🏽",
    "combining": "e\u0301\u0323\u0308 a\u030a stacks",
    "long word": "x" * 300,
    "markup": "<script>alert('x')</script> & more",
    "override": "abc \u202edef\u202c ghi",
    "space mark": "a \u2581 b\u2581c",
    "spaces": "  two  leading,   three  inside and two at the end  ",
    "one": "a",
}
LINES = ["the houses are not big, are they?", "a small house and a dog", "das haus ist klein"] * 9


@functools.cache
def tokenizer(algorithm: str, *, byte_fallback: bool = True) -> Tokenizer:
    size = {"bpe": 330, "unigram": 286, "characters": 300}[algorithm]
    config = TextConfig(
        tokenizer=algorithm, vocab_size=size if byte_fallback else 30, byte_fallback=byte_fallback
    )
    return Tokenizer.train(LINES, config)


@pytest.mark.parametrize("algorithm", ["bpe", "unigram", "characters"])
@pytest.mark.parametrize("name", TEXTS)
def test_spans_tile_the_source_and_the_output(name: str, algorithm: str) -> None:
    """Token spans, for the text that is encoded and for the one that is decoded."""
    own, text = tokenizer(algorithm), TEXTS[name]
    ids = own.encode(text)
    found = tokenize_text(own, text, [*ids, EOS])
    assert check_spans(found) == []
    assert found.tokens[-1].special
    assert found.tokens[-1].span == (len(text), len(text))
    decoded = tokenize_text(own, own.decode(ids), [*ids, EOS])
    assert check_spans(decoded) == []
    for token in decoded.tokens:
        if token.text.isascii() and token.text.strip() and not token.text.startswith("<"):
            start, end = token.span
            assert decoded.text[start:end].strip() == token.text.strip()


def test_unknown_tokens_get_the_text_between_adjacent_tokens() -> None:
    own = tokenizer("unigram", byte_fallback=False)
    text = "the 今天 house"
    found = tokenize_text(own, text, [*own.encode(text), EOS])
    assert check_spans(found) == []
    unknown = [token for token in found.tokens if token.text == "<unk>"]
    assert unknown
    assert text[unknown[0].span[0] : unknown[-1].span[1]].strip() == "今天"


def test_a_character_belongs_to_its_first_byte() -> None:
    tokens = ["<0xE4>", "<0xBB>", "<0x8A>", "a"]
    assert find_token_spans("今a", tokens, [False] * 4) == [(0, 1), (1, 1), (1, 1), (1, 2)]


def test_a_mark_belongs_to_the_token_of_its_letter() -> None:
    """A token border inside a grapheme moves to its end."""
    assert find_token_spans("e\u0301x", ["e", "\u0301x"], [False] * 2) == [(0, 2), (2, 3)]


def test_bytes_that_are_no_text_are_one_replacement_each() -> None:
    own = tokenizer("bpe")
    byte = own.tokens(range(len(own))).index("<0xBF>")
    ids = [byte, byte, *own.encode("house")]
    found = tokenize_text(own, own.decode(ids), ids)
    assert check_spans(found) == []
    assert [token.span for token in found.tokens[:2]] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["▁the", "▁hou", "ses", ",", "▁are"], ["the", "houses", ",", "are"]),
        (["▁", "h", "i", "▁", "y", "ou"], ["hi", "you"]),
        (["▁今", "天", "天气"], ["今", "天", "天气"]),
        (["▁don", "'", "t"], ["don't"]),
        (["▁x", "<0xE4>", "<0xBB>", "<0x8A>", "y"], ["x今y"]),
    ],
)
def test_words_join_subwords(tokens: list[str], words: list[str]) -> None:
    plain = [token.replace("▁", " ") for token in tokens]
    text = "".join(plain).strip().replace("<0xE4><0xBB><0x8A>", "今")
    spans = find_token_spans(text, plain, [False] * len(plain))
    found = [
        Token(at + 4, token, span)
        for at, (token, span) in enumerate(zip(plain, spans, strict=True))
    ]
    ranges = find_words(text, found)
    assert [
        text[found[start].span[0] : found[end - 1].span[1]].strip() for start, end in ranges
    ] == words


@pytest.mark.parametrize(
    ("text", "lang", "direction"),
    [
        ("house", "", "ltr"),
        ("مرحبا", "", "rtl"),
        ("שלום", "", "rtl"),
        ("… سلام", "en", "rtl"),
        ("12, 3", "ar", "rtl"),
        ("12, 3", "he-IL", "rtl"),
        ("12, 3", "de", "ltr"),
        ("The word سلام", "ar", "ltr"),
        ("", "", "ltr"),
    ],
)
def test_direction_is_that_of_the_first_strong_character(
    text: str, lang: str, direction: str
) -> None:
    assert text_direction(text, lang) == direction


def test_frequency_ranks_follow_the_scores() -> None:
    own = tokenizer("unigram")
    ranks = [rank for rank in own.frequency_ranks if rank is not None]
    space = own.frequency_ranks[own.encode("a")[0]]
    byte = own.frequency_ranks[own.tokens(range(len(own))).index("<0xBF>")]
    assert space is not None
    assert space < byte == max(ranks)
    pairs = tokenizer("bpe")
    numbers = {token: at for at, token in enumerate(pairs.tokens(range(len(pairs))))}
    assert pairs.frequency_ranks[numbers["e"]] is None  # BPE does not count single characters
    assert pairs.frequency_ranks[0] is None
