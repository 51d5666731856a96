"""Text of a language model as token ids and back: words, bytes or subwords, line by line.

Words and subwords end each line with EOS, which is decoded as a line break; bytes keep line breaks
as they are. So every text has ids, and generated ids can be decoded one by one.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dragoman.config.root_config import TextConfig
from dragoman.errors import BundleError
from dragoman.text.sentencepiece_tokenizer import Tokenizer
from dragoman.text.special_tokens import EOS, SPECIAL_TOKENS
from dragoman.text.vocabulary_and_labels import Vocabulary, build_vocabulary, normalize_text

WORDS_FILE, SUBWORDS_FILE = "words.json", "shared.model"
_FIRST_BYTE = len(SPECIAL_TOKENS)  # id of byte 0
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded bytes that do not end a character


class TextDecoder(Protocol):
    """Decodes generated tokens one by one."""

    def push(self, token: int) -> str:
        """Return the text that a token adds; "" while a character is incomplete."""
        ...


class LanguageModelTokenizer(Protocol):
    """Encodes text for a language model."""

    is_lossless: bool  # whether no part of a text becomes <unk>

    def __len__(self) -> int:
        """Return the vocabulary size, special tokens included."""
        ...

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a whole document, whose last line has ended."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that is to be continued, so its last line has not ended."""
        ...

    def decoder(self, prompt: Sequence[int]) -> TextDecoder:
        """Return a decoder of the continuation of a prompt."""
        ...

    def files(self) -> dict[str, bytes]:
        """Return the files that describe it."""
        ...


class ByteTokenizer:
    """UTF-8 bytes, as they are."""

    is_lossless = True

    def __len__(self) -> int:
        """Return the vocabulary size: 256 bytes and the special tokens."""
        return _FIRST_BYTE + 256

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the bytes of a document."""
        found = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        return found.astype(np.int32) + _FIRST_BYTE

    def encode_prompt(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return self.encode(text).tolist()

    def decoder(self, prompt: Sequence[int]) -> TextDecoder:
        """Return a UTF-8 decoder that waits for whole characters."""
        return _ByteDecoder()

    def files(self) -> dict[str, bytes]:
        """Return nothing: bytes need no vocabulary."""
        return {}


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the characters that a byte completes."""
        return self._decoder.decode(bytes([token - _FIRST_BYTE])) if token >= _FIRST_BYTE else ""


class WordTokenizer:
    """Words separated by white space, as in WikiText; EOS ends a line."""

    is_lossless = False

    def __init__(self, vocabulary: Vocabulary, *, normalization: str = "none") -> None:
        self.vocabulary, self._normalization = vocabulary, normalization

    def __len__(self) -> int:
        """Return the vocabulary size."""
        return len(self.vocabulary)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a document's words, with EOS after each line."""
        ids: list[int] = []
        for line in document_lines(text):
            ids += self.vocabulary.ids(normalize_text(line, self._normalization).split())
            ids.append(EOS)
        return np.array(ids, np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that is to be continued."""
        return _without_last_eos(self.encode(text), text)

    def decoder(self, prompt: Sequence[int]) -> TextDecoder:
        """Return a decoder that puts a space before each word but a line's first."""
        return _WordDecoder(self.vocabulary, at_start=not prompt or prompt[-1] == EOS)

    def files(self) -> dict[str, bytes]:
        """Return the vocabulary."""
        return {WORDS_FILE: self.vocabulary.to_bytes()}


class _WordDecoder:
    def __init__(self, vocabulary: Vocabulary, *, at_start: bool) -> None:
        self._vocabulary, self._at_start = vocabulary, at_start

    def push(self, token: int) -> str:
        """Return the word with the space before it, or a line break."""
        space = "" if self._at_start else " "
        self._at_start = token == EOS
        return "\n" if token == EOS else space + self._vocabulary.tokens[token]


class SubwordTokenizer:
    """Subwords or characters of a SentencePiece model; EOS ends a line."""

    is_lossless = True  # with byte fallback

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        """Return the vocabulary size."""
        return len(self.tokenizer)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return the ids of a document's subwords, with EOS after each line."""
        ids: list[int] = []
        for line in self.tokenizer.encode_batch(list(document_lines(text))):
            ids += line
            ids.append(EOS)
        return np.array(ids, np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text that is to be continued."""
        return _without_last_eos(self.encode(text), text)

    def decoder(self, prompt: Sequence[int]) -> TextDecoder:
        """Return a decoder of the continuation of a prompt."""
        reversed_line = list(itertools.takewhile(lambda token: token != EOS, reversed(prompt)))
        return _SubwordDecoder(self.tokenizer, reversed_line[::-1])

    def files(self) -> dict[str, bytes]:
        """Return the SentencePiece model."""
        return {SUBWORDS_FILE: self.tokenizer.model}


class _SubwordDecoder:
    def __init__(self, tokenizer: Tokenizer, line: list[int]) -> None:
        self._tokenizer, self._line = tokenizer, line
        self._text = tokenizer.decode(line)  # of the line so far

    def push(self, token: int) -> str:
        """Return the text that a token adds to the decoded line."""
        if token == EOS:
            self._line, self._text = [], ""
            return "\n"
        self._line.append(token)
        text = self._tokenizer.decode(self._line)
        if text.endswith(_INCOMPLETE) or not text.startswith(self._text):
            return ""
        added, self._text = text[len(self._text) :], text
        return added


def document_lines(text: str) -> Iterator[str]:
    """Yield the lines of a document; a line break at its end begins no further line."""
    lines = text.split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    return iter(lines)


def _without_last_eos(ids: NDArray[np.int32], text: str) -> list[int]:
    """Return the ids of a text without the EOS of a last line that has no line break."""
    if not text:
        return []
    found: list[int] = ids.tolist()
    return found if text.endswith("\n") else found[:-1]


def fit_language_model_tokenizer(
    texts: Iterable[str], config: TextConfig
) -> LanguageModelTokenizer:
    """Return the text encoder that the settings name, learned from documents or lines."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    lines = (line for text in texts for line in document_lines(text))
    if config.tokenizer == "words":
        form = config.normalization
        words = (normalize_text(line, form).split() for line in lines)
        return WordTokenizer(build_vocabulary(words, config), normalization=form)
    return SubwordTokenizer(Tokenizer.train(lines, config))


def load_language_model_tokenizer(
    files: Mapping[str, bytes], config: TextConfig
) -> LanguageModelTokenizer:
    """Return the tokenizer stored in `files`; raise BundleError if a file is missing or invalid."""
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    name = WORDS_FILE if config.tokenizer == "words" else SUBWORDS_FILE
    if name not in files:
        raise BundleError(
            f"a model of {config.tokenizer} must hold text/{name}",
            found=", ".join(sorted(files)) or "no files",
            fix="copy the whole model directory",
        )
    if config.tokenizer == "words":
        vocabulary = Vocabulary.from_bytes(files[name], name)
        return WordTokenizer(vocabulary, normalization=config.normalization)
    return SubwordTokenizer(
        Tokenizer(files[name], algorithm=config.tokenizer, normalization=config.normalization)
    )
