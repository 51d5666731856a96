"""SentencePiece tokenizers: lossless encoding and decoding, and their files.

A new algorithm also needs its row in `sentencepiece_trainer.py` and its name among the choices of
`text.tokenizer` (`config/root_config.py`). Words and bytes are in `language_model_tokenizer.py`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from dragoman.config.root_config import TextConfig
from dragoman.errors import BundleError, DataError, suggest_name
from dragoman.storage.atomic_and_safe_file_io import read_regular
from dragoman.text.bpe_dropout import SPACE_MARK, BPEDropoutEncoder
from dragoman.text.sentencepiece_trainer import train_sentencepiece
from dragoman.text.special_tokens import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    byte_of_token,
    language_tag,
)

_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # all but the tab
FORMAT = 1
_MAX_BYTES = 1 << 20
TOKENIZER_ALGORITHMS = ("bpe", "unigram", "characters")
NORMALIZATION_FORMS = ("none", "nfc", "nfkc")
"""`none` keeps text, `nfc` composes accents, `nfkc` also replaces compatibility characters."""
_MAX_FAST_CHARACTERS = 4096  # characters up to which `unicodedata` is fast for any input


def write_text_json(directory: Path, *, algorithm: str, normalization: str) -> None:
    """Write `text.json`, which describes the tokenizer's files."""
    settings = {"format": FORMAT, "kind": algorithm, "normalisation": normalization}
    (directory / "text.json").write_text(
        json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def read_text_json(directory: Path) -> dict[str, str]:
    """Read and validate `text.json`."""
    path = directory / "text.json"
    try:
        settings = json.loads(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise BundleError(
            "a model directory must hold text/text.json",
            found=f"{path}: {error.strerror}",
            fix="copy the whole model directory",
        ) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(
            "text.json must be JSON", found=f"{path}: {error}", fix="copy the model directory again"
        ) from error
    if (
        not isinstance(settings, dict)
        or settings.get("kind") not in TOKENIZER_ALGORITHMS
        or settings.get("normalisation") not in [*NORMALIZATION_FORMS]
    ):
        raise BundleError(
            "text.json must have a known algorithm and normalization",
            found=f"{path}: {settings!r:.200}",
            fix="copy the model directory again",
        )
    if settings.get("format") != FORMAT:
        raise BundleError(
            f"text.json must have format {FORMAT}",
            found=f"format {settings.get('format')!r}",
            fix="use the dragoman that wrote it",
        )
    return settings


TokenIds = Sequence[int] | NDArray[np.integer[Any]]
_MAX_MODEL_BYTES = 256 << 20

# SentencePiece writes a space as U+2581, so that character itself would be decoded as a space. It
# is escaped as two characters: a private one, which is escaped likewise, and a digit.
_ESCAPE = "\U0010fffd"
_TAG = re.compile(r"<2(\w+)>")  # as `language_tag` writes it


def escape_space_marks(text: str) -> str:
    """Return a text as SentencePiece gets it: U+2581 and the escape are two characters each."""
    if SPACE_MARK in text or _ESCAPE in text:
        return text.replace(_ESCAPE, _ESCAPE + "0").replace(SPACE_MARK, _ESCAPE + "1")
    return text


def _unescape(text: str) -> str:
    return (
        text.replace(_ESCAPE + "1", SPACE_MARK).replace(_ESCAPE + "0", _ESCAPE)
        if _ESCAPE in text
        else text
    )


class Tokenizer:
    """Encodes text as token ids and decodes them; deterministic."""

    first_ids: tuple[int, ...] = ()  # before the tokens of every text: a language tag

    def __init__(self, model: bytes, *, algorithm: str, normalization: str) -> None:
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            found = f"{len(model)} bytes of another format"
            raise BundleError(
                "a tokenizer must be a SentencePiece model",
                found=found,
                fix="copy the model directory again",
            ) from error
        ids = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        if ids != (PAD, BOS, EOS, UNK):
            raise BundleError(
                "a tokenizer's pad, bos, eos and unk must have the ids 0, 1, 2 and 3",
                found=str(ids),
                fix="use a model trained by dragoman",
            )
        self.algorithm, self.normalization = algorithm, normalization
        self._model, self._processor = model, processor

    @classmethod
    def train(
        cls, lines: Iterable[str], config: TextConfig, languages: Sequence[str] = ()
    ) -> Tokenizer:
        """Train a tokenizer on lines of text, read once as a stream; deterministic.

        The vocabulary has a tag for each of `languages`, which no text is encoded as.
        """
        prepared = (escape_space_marks(normalize(line, config.normalization)) for line in lines)
        tags = [language_tag(language) for language in languages]
        return cls(
            train_sentencepiece(prepared, config, tags),
            algorithm=config.tokenizer,
            normalization=config.normalization,
        )

    @classmethod
    def load(cls, directory: Path, side: str, names: Collection[str] | None = None) -> Tokenizer:
        """Read the tokenizer of a side (`source`, `target` or `shared`) from a model's `text/`
        directory.

        Only files in `names` are opened, which are those of the manifest; by default all that
        exist.
        """
        path = Path(directory) / f"{side}.model"
        settings = read_text_json(Path(directory))
        try:
            model = read_regular(path, _MAX_MODEL_BYTES)
        except OSError as error:
            raise BundleError(
                "a model directory must hold its tokenizer",
                found=f"{path}: {error.strerror}",
                fix="copy the whole model directory",
            ) from error
        if f"{side}.pieces.json" in (_list_files(directory) if names is None else names):
            from dragoman.text.imported_tokenizer import ImportedTokenizer

            return ImportedTokenizer.read(Path(directory), side, model, settings["kind"])
        return cls(model, algorithm=settings["kind"], normalization=settings["normalisation"])

    def save(self, directory: Path, side: str) -> None:
        """Write `SIDE.model` and `text.json` into a directory, which is created if missing."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{side}.model").write_bytes(self._model)
        write_text_json(directory, algorithm=self.algorithm, normalization=self.normalization)

    def frames(self) -> list[bytes]:
        """Return the serialized tokenizer for another process; see `tokenizer_from_frames`."""
        return [f"{self.algorithm}\n{self.normalization}".encode(), self._model, b""]

    @functools.cached_property
    def tag_ids(self) -> dict[str, int]:
        """The ids of the language tags, by language; empty for a vocabulary without tags."""
        sp, found = self._processor, dict[str, int]()
        for number in range(len(SPECIAL_TOKENS), sp.get_piece_size()):
            if not sp.is_control(number):  # control tokens come first
                break
            if match := _TAG.fullmatch(sp.id_to_piece(number)):
                found[match[1]] = number
        return found

    def tagged(self, language: str) -> Tokenizer:
        """Return a tokenizer that begins every text with a language's tag; raise if it has none."""
        if language not in self.tag_ids:
            raise DataError(
                "a target language must have a tag in the vocabulary",
                found=f"{language!r:.40}",
                fix=f"the languages are {', '.join(sorted(self.tag_ids)) or 'none'}",
            )
        tokenizer = copy.copy(self)
        tokenizer.first_ids = (self.tag_ids[language],)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without BOS and EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[list[int]]:
        """Encode texts in one call, which is faster than one by one."""
        prepared = [escape_space_marks(normalize(text, self.normalization)) for text in texts]
        try:
            rows = self._processor.encode(prepared, num_threads=threads)
        except (
            RuntimeError,
            UnicodeError,
            TypeError,
        ) as error:
            # the binding names neither the text nor the position
            raise invalid_text_error(prepared) from error
        return [[*self.first_ids, *row] for row in rows] if self.first_ids else rows

    def encode_with_dropout(
        self, text: str, *, dropout: float, generator: Callable[[], float]
    ) -> list[int]:
        """Encode with BPE-dropout; equal generator states give equal tokens on every machine."""
        if self.algorithm != "bpe":
            raise DataError(
                "BPE-dropout needs BPE",
                found=f"text.tokenizer={self.algorithm}",
                fix="set text.tokenizer=bpe or text.bpe_dropout=0",
            )
        if not 0.0 <= dropout < 1.0:
            raise DataError(
                "the BPE-dropout probability must be from 0 to below 1",
                found=str(dropout),
                fix="set text.bpe_dropout=0.1",
            )
        ids = self._bpe_encoder.encode(
            escape_space_marks(normalize(text, self.normalization)), dropout, generator
        )
        return [*self.first_ids, *ids] if self.first_ids else ids

    def decode(self, ids: TokenIds) -> str:
        """Return the text of token ids; special tokens other than unknown are dropped."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, rows: Sequence[TokenIds]) -> list[str]:
        """Decode rows of ids in one call."""
        lists = [
            row.tolist() if isinstance(row, np.ndarray) else [int(each) for each in row]
            for row in rows
        ]
        return [_unescape(text) for text in self._processor.decode(lists, num_threads=1)]

    def tokens(self, ids: TokenIds) -> list[str]:
        """Return the tokens of ids: a leading U+2581 is a space, `<0xE4>` is a byte."""
        return [self._token_strings[each] for each in ids]

    def unknown_fraction(self, ids: TokenIds) -> float:
        """Return the fraction of a text's characters, spaces aside, outside of the vocabulary."""
        tags, known, unknown = set(self.tag_ids.values()), 0, 0
        for each, token in zip(ids, self.tokens(ids), strict=True):
            if each == UNK:
                unknown += 1
            elif each in self.unknown_ids:
                unknown += not 0x80 <= int(token[3:5], 16) < 0xC0  # the first byte of a character
            elif each not in tags and each >= len(SPECIAL_TOKENS):
                known += len(token.replace("\u2581", ""))
        return unknown / max(1, known + unknown)

    @functools.cached_property
    def _token_strings(self) -> list[str]:
        """All tokens by id, computed once: SentencePiece is slow when asked one by one."""
        return [
            *SPECIAL_TOKENS,
            *(
                self._processor.id_to_piece(number)
                for number in range(len(SPECIAL_TOKENS), len(self))
            ),
        ]

    @functools.cached_property
    def unknown_ids(self) -> frozenset[int]:
        """The ids that stand for characters outside of the vocabulary: unknown and bytes."""
        tokens = self.tokens(range(len(self)))
        is_byte = [byte_of_token(each) is not None for each in tokens]
        return frozenset([UNK, *(number for number, byte in enumerate(is_byte) if byte)])

    @functools.cached_property
    def frequency_ranks(self) -> list[int | None]:
        """The rank of every token by frequency in the training text, 0 for the most frequent.

        It follows from the scores of SentencePiece: log-probabilities of unigram and characters,
        the order of merges of BPE. BPE does not count single characters, whose rank is None, and
        byte tokens, which stand for characters outside the vocabulary, come last.
        """
        sp = self._processor
        normal = [
            i
            for i in range(len(SPECIAL_TOKENS), len(self))
            if not (sp.is_byte(i) or sp.is_control(i))
            and (self.algorithm != "bpe" or len(sp.id_to_piece(i)) > 1)
        ]
        ranks: list[int | None] = [None] * len(self)
        for rank, number in enumerate(sorted(normal, key=lambda i: (-sp.get_score(i), i))):
            ranks[number] = rank
        for number in range(len(SPECIAL_TOKENS), len(self)):
            if sp.is_byte(number):
                ranks[number] = len(normal)
        return ranks

    def __len__(self) -> int:
        """Return the vocabulary size, byte tokens and special tokens included."""
        return self._processor.get_piece_size()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides the ids."""
        hasher = hashlib.sha256(
            f"dragoman tokenizer {FORMAT} {self.algorithm} {self.normalization}\n".encode()
        )
        hasher.update(self._model)
        return hasher.hexdigest()

    @property
    def model(self) -> bytes:
        """The serialized SentencePiece model."""
        return self._model

    @functools.cached_property
    def _bpe_encoder(self) -> BPEDropoutEncoder:
        sp = self._processor
        normal = [
            i
            for i in range(len(self))
            if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i))
        ]
        ids = {sp.id_to_piece(i): i for i in normal}
        scores = {token: sp.get_score(i) for token, i in ids.items()}
        byte_ids = [sp.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        return BPEDropoutEncoder(scores, ids, None if UNK in byte_ids else byte_ids)


class Tokenizers(NamedTuple):
    """Source and target tokenizer; the same object for a shared vocabulary."""

    src: Tokenizer
    tgt: Tokenizer

    @property
    def shared_vocab(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.src is self.tgt


def train_tokenizers(
    src_lines: Iterable[str],
    tgt_lines: Iterable[str],
    config: TextConfig,
    languages: Sequence[str] = (),
) -> Tokenizers:
    """Train the tokenizers of both sides; a shared one reads both sides alternately.

    It has a tag for each of `languages`.
    """
    if config.shared_vocab:
        both = itertools.chain.from_iterable(zip(src_lines, tgt_lines, strict=True))
        shared = Tokenizer.train(both, config, languages)
        return Tokenizers(shared, shared)
    return Tokenizers(Tokenizer.train(src_lines, config), Tokenizer.train(tgt_lines, config))


def save_tokenizers(tokenizers: Tokenizers, directory: Path) -> None:
    """Write a model's `text/` directory: `shared.model` or `source.model` and `target.model`."""
    if tokenizers.shared_vocab:
        tokenizers.src.save(directory, "shared")
    else:
        tokenizers.src.save(directory, "source")
        tokenizers.tgt.save(directory, "target")


def load_tokenizers(directory: Path, names: Collection[str] | None = None) -> Tokenizers:
    """Read a model's `text/` directory; only files in `names`, by default all that exist."""
    names = _list_files(directory) if names is None else names
    if "shared.model" in names:
        shared = Tokenizer.load(directory, "shared", names)
        return Tokenizers(shared, shared)
    return Tokenizers(
        Tokenizer.load(directory, "source", names), Tokenizer.load(directory, "target", names)
    )


def _list_files(directory: Path) -> list[str]:
    """Return the names in a directory; empty if it cannot be read."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def invalid_text_error(texts: Sequence[str]) -> DataError:
    """Return the error for a character that has no UTF-8 form."""
    for text in texts:
        position = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if position is not None:
            found = f"U+{ord(text[position]):04X}, a lone surrogate, at position {position + 1}"
            return DataError(
                "text must be valid Unicode",
                found=found,
                fix="decode the input as UTF-8 with errors='strict' to find it",
            )
    return DataError(
        "text must be valid Unicode", found=f"{texts!r:.80}", fix="decode the input as UTF-8"
    )


def normalize(text: str, form: str) -> str:
    """Return text in a Unicode normalization form; idempotent."""
    if form == "none" or text.isascii():
        return text
    if len(text) > _MAX_FAST_CHARACTERS:
        text = _order_marks(text, "NFKD" if form == "nfkc" else "NFD")
    if form == "nfc":
        return (
            text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text)
        )
    if form == "nfkc":
        return unicodedata.normalize("NFKC", text)
    raise DataError(
        "the normalization form must be known",
        found=repr(form),
        fix=suggest_name(form, NORMALIZATION_FORMS),
    )


def _order_marks(text: str, form: Literal["NFD", "NFKD"]) -> str:
    """Decompose text and put its combining marks into canonical order, in O(n log n).

    `unicodedata.normalize` inserts one mark after the other, which takes minutes for a letter with
    200,000 of them.
    """
    decomposed = "".join([unicodedata.normalize(form, char) for char in text])
    ordered, marks = list[str](), list[str]()
    for char in decomposed:
        if unicodedata.combining(char):
            marks.append(char)
            continue
        if marks:
            ordered += sorted(marks, key=unicodedata.combining) if len(marks) > 1 else marks
            marks = []
        ordered.append(char)
    return "".join([*ordered, *sorted(marks, key=unicodedata.combining)])


def replace_control_chars(text: str) -> str:
    """Replace control characters but the tab by spaces: outputs stay one line (marian-dev#365)."""
    return _CONTROL_CHARS.sub(" ", text)
