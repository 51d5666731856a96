"""Characters, or the byte, that each output token adds: the input of compiled constraints."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from dragoman.decoding.output_constraint_definitions import (
    is_mark,
)
from dragoman.decoding.regex_to_dfa import (
    MAX_CODE_POINT,
    BoolArray,
    CharacterSet,
)
from dragoman.text.imported_tokenizer import ImportedTokenizer
from dragoman.text.sentencepiece_tokenizer import Tokenizer
from dragoman.text.special_tokens import EOS, byte_of_token

# What the translator replaces by spaces, and the tokenizer's escape character.
NEVER_WRITTEN = CharacterSet.of([(0, 8), (10, 31), (127, 127), (0x10FFFD, 0x10FFFD)])
SURROGATES = CharacterSet.of([(0xD800, 0xDFFF)])
_SPACE_MARK = "\u2581"


class TokenTable:
    """The characters that each token adds to the text."""

    def __init__(self, texts: Sequence[str | None], numbers: Mapping[str, int]) -> None:
        self.valid = np.array([text is not None for text in texts])  # (V,)
        self.lengths = np.array([len(text or "") for text in texts], dtype=np.int64)  # (V,)
        width = max(1, int(self.lengths.max()))
        self.characters = np.full((len(texts), width), len(numbers), dtype=np.int64)  # (V, W)
        for row, text in enumerate(texts):
            for column, character in enumerate(text or ""):
                self.characters[row, column] = numbers[character]


class TokenCharacters:
    """The text that each token of an output vocabulary stands for.

    A text is None for a token that is never written, and bytes for a token of a single byte. The
    first token loses one leading space, as SentencePiece decodes, or with `strip` the whole text
    its spaces at both ends. The token `end` ends a text.
    """

    def __init__(
        self, texts: Sequence[str | bytes | None], *, strip: bool = False, end: int = EOS
    ) -> None:
        self.strip, self.size, self.end = strip, len(texts), end
        written = [
            text if isinstance(text, str) and text and _is_written(text) else None for text in texts
        ]
        # A byte that is a character by itself is written as one, if no other token writes it.
        single = {text for text in written if text and len(text) == 1}
        for number, text in enumerate(texts):
            if isinstance(text, bytes) and text.isascii() and text.decode() not in single:
                written[number] = text.decode() if _is_written(text.decode()) else None
        self.characters = sorted({each for text in written for each in text or ""})
        self.numbers = {each: number for number, each in enumerate(self.characters)}
        self.codes = np.array([ord(each) for each in self.characters], dtype=np.int64)  # (C,)
        self.table = TokenTable(written, self.numbers)
        self.first_table = TokenTable(
            [
                text if text is None else text.lstrip(" ") if strip else text.removeprefix(" ")
                for text in written
            ],
            self.numbers,
        )
        self.byte_ids = np.full(256, -1, dtype=np.int64)
        for number, text in enumerate(texts):
            if isinstance(text, bytes):
                self.byte_ids[text[0]] = number
        self.has_bytes = bool((self.byte_ids >= 0).all()) and not strip
        self.is_character_level = self.table.characters.shape[1] == 1

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenCharacters:
        """Return the vocabulary of a tokenizer."""
        texts = list[str | bytes | None]()
        tags = set(tokenizer.tag_ids.values())
        for number, token in enumerate(tokenizer.tokens(range(len(tokenizer)))):
            byte = byte_of_token(token)
            if number < 4 or number in tags:
                texts.append(None)
            else:
                texts.append(token.replace(_SPACE_MARK, " ") if byte is None else bytes([byte]))
        return cls(texts, strip=isinstance(tokenizer, ImportedTokenizer))

    @functools.cached_property
    def is_mark(self) -> BoolArray:
        """Which characters are marks, (C + 1,); the last stands for the end of a token."""
        return np.array([*map(is_mark, self.characters), False])

    def missing(self, text: str) -> list[str]:
        """Return the characters of a text that no token writes."""
        has_bytes = self.has_bytes
        return [each for each in dict.fromkeys(text) if each not in self.numbers and not has_bytes]


def _is_written(text: str) -> bool:
    return not any(each in NEVER_WRITTEN or each in SURROGATES for each in text)


def code_point_bounds(pending: bytes) -> tuple[int, int] | None:
    """Return the first and the last code point whose UTF-8 form begins with some bytes."""
    lead = pending[0]
    if lead < 0x80:
        length, bits = 1, lead
    elif 0xC2 <= lead < 0xE0:
        length, bits = 2, lead & 0x1F
    elif 0xE0 <= lead < 0xF0:
        length, bits = 3, lead & 0x0F
    elif 0xF0 <= lead < 0xF5:
        length, bits = 4, lead & 0x07
    else:
        return None
    if len(pending) > length or any(each & 0xC0 != 0x80 for each in pending[1:]):
        return None
    for each in pending[1:]:
        bits = bits << 6 | each & 0x3F
    missing = 6 * (length - len(pending))
    least = {1: 0, 2: 0x80, 3: 0x800, 4: 0x10000}[length]
    low = max(bits << missing, least)
    high = min((bits + 1 << missing) - 1, MAX_CODE_POINT)
    return (low, high) if low <= high else None


def missing_bytes(pending: bytes) -> int:
    """Return how many bytes the character that these begin still needs."""
    lead = pending[0]
    length = 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    return length - len(pending)
