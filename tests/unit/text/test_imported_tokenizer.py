"""Tokenizers of imported models: language codes, special tokens and other processes."""

from __future__ import annotations

import pytest

from dragoman.config import TextConfig
from dragoman.data.tokenizer_workers import encode_texts
from dragoman.text.imported_tokenizer import ImportedTokenizer, tokenizer_from_frames
from dragoman.text.sentencepiece_tokenizer import Tokenizer
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK

LINES = ["a cat sat on a mat", "the dog and the cat sat", "<a> dog sat <b>"] * 5


def train(lines: list[str]) -> bytes:
    text = TextConfig(tokenizer="characters", vocab_size=40, byte_fallback=False)
    return Tokenizer.train(lines, text).model


@pytest.fixture(scope="module")
def tokenizer() -> ImportedTokenizer:
    tokens = [*SPECIAL_TOKENS, ">>fra<<", *"▁tacsodhe<>"]
    return ImportedTokenizer(train(LINES), tokens)


def test_a_leading_language_code_is_one_token(tokenizer: ImportedTokenizer) -> None:
    code, *rest = tokenizer.encode(">>fra<<a cat")
    assert tokenizer.tokens([code]) == [">>fra<<"]
    assert rest == tokenizer.encode("a cat")
    inside = tokenizer.encode("a <<cat")
    assert tokenizer.tokens(inside)[:5] == ["▁", "a", "▁", "<", "<"]
    assert tokenizer.encode(">>xyz<<a")[0] == UNK


def test_ids_are_unknown_by_their_token_and_not_by_their_number() -> None:
    bytes_first = [*SPECIAL_TOKENS, "<0x61>", "<0xC3>", *"▁tacsodhe<>"]
    tokenizer = ImportedTokenizer(train(LINES), bytes_first)
    assert tokenizer.unknown_ids == {UNK, 4, 5}
    assert tokenizer.unknown_fraction([4, 5]) == 1
    for text, expected in (("a cat", 0.0), ("q", 1.0), ("q c", 0.5)):
        assert tokenizer.unknown_fraction(tokenizer.encode(text)) == expected, text


def test_another_process_gets_the_same_tokenizer(tokenizer: ImportedTokenizer) -> None:
    again = tokenizer_from_frames(tokenizer.frames())
    assert again.digest == tokenizer.digest
    texts = [">>fra<<a cat", "the dog"]
    assert encode_texts(again, texts).ids.tolist() == encode_texts(tokenizer, texts).ids.tolist()


def test_the_digest_covers_the_order_of_the_tokens(tokenizer: ImportedTokenizer) -> None:
    reordered = ImportedTokenizer(tokenizer.model, [*SPECIAL_TOKENS, ">>fra<<", *"▁atcsodhe<>"])
    assert len(reordered) == len(tokenizer)
    assert reordered.encode("a cat") != tokenizer.encode("a cat")
    assert reordered.digest != tokenizer.digest


def test_special_tokens_are_not_decoded_and_no_text_is_one_of_them(
    tokenizer: ImportedTokenizer,
) -> None:
    ids = tokenizer.encode("a cat")
    assert tokenizer.decode([1, *ids, 2, 0]) == "a cat"
    assert tokenizer.decode([]) == ""
    assert not {0, 1, 2} & set(tokenizer.encode("<s> </s> <pad>"))
