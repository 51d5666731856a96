"""Vocabularies of words, characters and bytes, label sets, and the word tokenizer."""

from __future__ import annotations

import hashlib
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from dragoman.config.root_config import TextConfig
from dragoman.errors import BundleError
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK

# Words with inner apostrophes and hyphens, numbers with separators, HTML line breaks, and single
# other characters.
_WORDS = re.compile(r"<br\s*/?>|\d+(?:[.,:]\d+)*|[^\W\d_]+(?:['’\-][^\W\d_]+)*|\w|[^\w\s]")
MAX_ENTRIES = 5_000_000  # of a vocabulary file


def split_words(text: str) -> list[str]:
    """Return the words, numbers and punctuation marks of a text; contractions stay whole."""
    return _WORDS.findall(text)


class Vocabulary:
    """Tokens with their ids; the first four are the special tokens."""

    def __init__(self, tokens: Sequence[str], *, lowercase: bool = False) -> None:
        self.tokens = tuple(tokens)
        self.lowercase = lowercase
        self._ids = {token: number for number, token in enumerate(self.tokens)}

    @classmethod
    def build(
        cls,
        texts: Iterable[Iterable[str]],
        *,
        max_size: int,
        min_count: int = 1,
        lowercase: bool = False,
        keep: Sequence[str] = (),
    ) -> Vocabulary:
        """Count tokens and keep the most frequent, ties in order of code points.

        `keep` follow the special tokens, whatever their counts.
        """
        counts: Counter[str] = Counter()
        for tokens in texts:
            counts.update(map(str.lower, tokens) if lowercase else tokens)
        first = [*SPECIAL_TOKENS, *dict.fromkeys(keep)]
        for token in first:
            counts.pop(token, None)
        ranked = sorted(
            (token for token, count in counts.items() if count >= min_count),
            key=lambda token: (-counts[token], token),
        )
        return cls([*first, *ranked[: max(0, max_size - len(first))]], lowercase=lowercase)

    @classmethod
    def of_bytes(cls) -> Vocabulary:
        """Return the vocabulary of the 256 bytes, named as in SentencePiece."""
        return cls([*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))])

    def __len__(self) -> int:
        """Return the vocabulary size, special tokens included."""
        return len(self.tokens)

    def __contains__(self, token: str) -> bool:
        """Whether a token has an id of its own."""
        return (token.lower() if self.lowercase else token) in self._ids

    def id(self, token: str) -> int:
        """Return the id of a token; that of <unk> if it has none."""
        return self._ids.get(token.lower() if self.lowercase else token, UNK)

    def ids(self, tokens: Iterable[str]) -> list[int]:
        """Return the ids of tokens; unknown ones are <unk>."""
        get = self._ids.get
        if self.lowercase:
            return [get(token.lower(), UNK) for token in tokens]
        return [get(token, UNK) for token in tokens]

    @property
    def digest(self) -> str:
        """SHA-256 of the file's contents."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the vocabulary as a JSON file."""
        content = {"format": 1, "lowercase": self.lowercase, "tokens": list(self.tokens)}
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Vocabulary:
        """Read a vocabulary file; `name` is named in errors."""
        content = _read_object(data, name)
        tokens = _distinct_texts(content.get("tokens"), name, "tokens")
        lowercase = content.get("lowercase", False)
        if tuple(tokens[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS or type(lowercase) is not bool:
            raise BundleError(
                f"{name} must begin with the special tokens {', '.join(SPECIAL_TOKENS)}",
                found=f"{tokens[: len(SPECIAL_TOKENS)]!r:.120}",
                fix="copy the model directory again",
            )
        return cls(tokens, lowercase=lowercase)


class Labels:
    """A set of labels with their indices, in sorted order: numbers by value, then text."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._indices = {name: index for index, name in enumerate(self.names)}

    @classmethod
    def build(cls, names: Iterable[str]) -> Labels:
        """Return the distinct labels, sorted."""
        return cls(sorted(set(names), key=_label_order))

    def __len__(self) -> int:
        """Return the number of labels."""
        return len(self.names)

    def __contains__(self, name: str) -> bool:
        """Whether this is one of the labels."""
        return name in self._indices

    def index(self, name: str) -> int:
        """Return the index of a label; raise KeyError if it is not one of them."""
        return self._indices[name]

    def to_bytes(self) -> bytes:
        """Return the labels as a JSON file."""
        content = {"format": 1, "labels": list(self.names)}
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Labels:
        """Read a file of labels; `name` is named in errors."""
        return cls(_distinct_texts(_read_object(data, name).get("labels"), name, "labels"))


def build_vocabulary(
    texts: Iterable[Iterable[str]], config: TextConfig, *, keep: Sequence[str] = ()
) -> Vocabulary:
    """Return the vocabulary that the settings describe, of tokenized texts."""
    return Vocabulary.build(
        texts,
        max_size=config.vocab_size,
        min_count=config.min_count,
        lowercase=config.lowercase,
        keep=keep,
    )


def normalize_text(text: str, form: str) -> str:
    """Return text in a Unicode normalization form: none, nfc or nfkc."""
    if form == "none" or text.isascii():
        return text
    return unicodedata.normalize("NFKC" if form == "nfkc" else "NFC", text)


def _label_order(name: str) -> tuple[int, float, str]:
    """Return the sort key of a label: numbers by value, before text."""
    try:
        number = float(name)
    except ValueError:
        number = math.nan
    # The word "nan" is text too: NaN has no order, and that of a set differs between processes.
    return (1, 0.0, name) if math.isnan(number) else (0, number, name)


def _read_object(data: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object with "format": 1."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{name} must be JSON", found=f"{error}"[:120], fix="copy the model directory again"
        ) from error
    if not isinstance(content, dict) or content.get("format") != 1:
        raise BundleError(
            f"{name} must have format 1",
            found=f"{content.get('format') if isinstance(content, dict) else content!r:.60}"[:80],
            fix="use a newer release of dragoman",
        )
    return content


def _distinct_texts(values: Any, name: str, what: str) -> list[str]:
    """Return a list of distinct texts; raise BundleError if it is none."""
    if (
        isinstance(values, list)
        and 0 < len(values) <= MAX_ENTRIES
        and all(isinstance(value, str) for value in values)
        and len(set(values)) == len(values)
    ):
        return values
    raise BundleError(
        f"{name} must list distinct {what}",
        found=f"{values!r:.80}",
        fix="copy the model directory again",
    )
