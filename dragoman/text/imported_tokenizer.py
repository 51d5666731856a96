"""Tokenizers of imported models: SentencePiece segments, a vocabulary file maps tokens to ids.

Marian has two SentencePiece models, one per side, and a separate vocabulary. `SIDE.pieces.json`
lists the tokens by id; our four special tokens come first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from dragoman.errors import BundleError, DataError
from dragoman.storage.atomic_and_safe_file_io import read_regular
from dragoman.text.bpe_dropout import SPACE_MARK
from dragoman.text.sentencepiece_tokenizer import (
    FORMAT,
    TokenIds,
    Tokenizer,
    invalid_text_error,
    write_text_json,
)
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK

_MAX_BYTES = 64 << 20
_LANGUAGE_CODE_MARKS = (">>", "<<")  # around a target-language code, in multilingual models


def vocabulary_path(directory: Path, side: str) -> Path:
    """Return the path of a side's vocabulary file."""
    return Path(directory) / f"{side}.pieces.json"


class ImportedTokenizer(Tokenizer):
    """Segments and normalizes with its SentencePiece model; tokens without an id are unknown."""

    def __init__(self, model: bytes, tokens: Sequence[str], *, algorithm: str = "unigram") -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            found = f"{len(model)} bytes of another format"
            raise BundleError(
                "a tokenizer must be a SentencePiece model",
                found=found,
                fix="copy the model directory again",
            ) from error
        if tuple(tokens[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS or len(set(tokens)) != len(
            tokens
        ):
            found = (
                f"{list(tokens[:4])!r:.80}"
                if tuple(tokens[:4]) != SPECIAL_TOKENS
                else "a token twice"
            )
            raise BundleError(
                f"a list of tokens must begin with {', '.join(SPECIAL_TOKENS)} and name each "
                "token once",
                found=found,
                fix="copy the model directory again",
            )
        self.algorithm, self.normalization = algorithm, "none"
        self._model, self._tokens = model, list(tokens)
        self._ids = {
            token: number for number, token in enumerate(tokens) if number >= len(SPECIAL_TOKENS)
        }

    @classmethod
    def read(cls, directory: Path, side: str, model: bytes, algorithm: str) -> ImportedTokenizer:
        """Return the tokenizer of a SentencePiece model and the vocabulary file beside it."""
        path = vocabulary_path(directory, side)
        fix = "copy the model directory again"
        try:
            content = json.loads(read_regular(path, _MAX_BYTES))
        except OSError as error:
            raise BundleError(
                f"{path} must be a list of tokens", found=error.strerror or str(error), fix=fix
            ) from error
        except (ValueError, RecursionError) as error:
            raise BundleError(
                f"{path} must be a list of tokens", found=f"{error!s:.200}", fix=fix
            ) from error
        tokens = content.get("pieces") if isinstance(content, dict) else content
        if (
            not isinstance(content, dict)
            or not isinstance(tokens, list)
            or not all(isinstance(token, str) for token in tokens)
        ):
            raise BundleError(f"{path} must be a list of tokens", found=f"{tokens!r:.100}", fix=fix)
        return cls(model, tokens, algorithm=algorithm)

    def save(self, directory: Path, side: str) -> None:
        """Write `SIDE.model`, `SIDE.pieces.json` and `text.json` into a directory."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{side}.model").write_bytes(self._model)
        vocabulary_path(directory, side).write_text(
            json.dumps({"pieces": self._tokens}, ensure_ascii=False, indent=0) + "\n",
            encoding="utf-8",
        )
        write_text_json(directory, algorithm=self.algorithm, normalization=self.normalization)

    def frames(self) -> list[bytes]:
        """Return the serialized tokenizer, vocabulary included."""
        return [*super().frames()[:2], json.dumps(self._tokens).encode()]

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[list[int]]:
        """Encode texts; a language code at the beginning, such as `>>fra<<`, is one token."""
        cut = [_split_language_code(text) for text in texts]
        try:
            tokens = self._processor.encode(
                [rest for _, rest in cut], out_type=str, num_threads=threads
            )
        except (RuntimeError, UnicodeError, TypeError) as error:
            raise invalid_text_error(texts) from error
        return [
            [self._ids.get(token, UNK) for token in [*code, *row]]
            for (code, _), row in zip(cut, tokens, strict=True)
        ]

    def encode_with_dropout(
        self, text: str, *, dropout: float, generator: Callable[[], float]
    ) -> list[int]:
        """Raise an error: imported tokenizers have no BPE-dropout."""
        raise DataError(
            "BPE-dropout needs a tokenizer trained here",
            found="an imported one",
            fix="set text.bpe_dropout=0",
        )

    def decode_batch(self, rows: Sequence[TokenIds]) -> list[str]:
        """Decode rows of ids; a token unknown to this side's model is written as it is."""
        lists = [
            row.tolist() if isinstance(row, np.ndarray) else [int(each) for each in row]
            for row in rows
        ]
        tokens = [[self._tokens[each] for each in row if each >= UNK] for row in lists]
        return [
            self._processor.decode_pieces(row).replace(SPACE_MARK, " ").strip() if row else ""
            for row in tokens
        ]

    def tokens(self, ids: TokenIds) -> list[str]:
        """Return the tokens of ids, as Hugging Face's convert_ids_to_tokens."""
        return [self._tokens[int(each)] for each in ids]

    @property
    def tag_ids(self) -> dict[str, int]:
        """None: an imported model's language codes are part of its texts."""
        return {}

    @property
    def frequency_ranks(self) -> list[int | None]:
        """The ranks of the tokens, all unknown: a vocabulary file has no counts."""
        return [None] * len(self)

    def __len__(self) -> int:
        """Return the vocabulary size."""
        return len(self._tokens)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides the ids."""
        hasher = hashlib.sha256(f"dragoman tokenizer {FORMAT} foreign\n".encode())
        hasher.update(json.dumps(self._tokens).encode())
        hasher.update(self._model)
        return hasher.hexdigest()


def tokenizer_from_frames(frames: Sequence[bytes]) -> Tokenizer:
    """Return the tokenizer that `Tokenizer.frames` serialized."""
    header, model, tokens = frames
    algorithm, normalization = header.decode().split("\n")
    if tokens:
        return ImportedTokenizer(model, json.loads(tokens), algorithm=algorithm)
    return Tokenizer(model, algorithm=algorithm, normalization=normalization)


def _split_language_code(text: str) -> tuple[list[str], str]:
    """Return a leading language code, if there is one, and the rest of the text."""
    begin, end = _LANGUAGE_CODE_MARKS
    position = text.find(end)
    if text.startswith(begin) and position != -1:
        return [text[: position + len(end)]], text[position + len(end) :]
    return [], text


def marian_language_code(language: str) -> str:
    """Return the language tag that Marian's tokenizer reads at the beginning of a text."""
    return f">>{language}<<"
