"""A tokenizer that another program trained: SentencePiece cuts, and a list beside it numbers the pieces.

Marian keeps pieces and their numbers apart: two SentencePiece models, one a side, and one vocabulary for both. Here the list
`SIDE.pieces.json` gives each number its piece; our four special pieces are its first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from dragoman.errors import BundleError, DataError
from dragoman.storage.atomic import read_regular
from dragoman.text.bpe_dropout import SPACE_MARK
from dragoman.text.special_tokens import SPECIAL_TOKENS, UNK
from dragoman.text.tokenizer import FORMAT, TokenIds, Tokenizer, invalid_text_error, write_text_json

_MAX_BYTES = 64 << 20
_LANGUAGE_CODE_MARKS = (">>", "<<")  # around the language that a model of several is asked for


def pieces_path(directory: Path, side: str) -> Path:
    """Name the list of a side's pieces."""
    return Path(directory) / f"{side}.pieces.json"


class ImportedTokenizer(Tokenizer):
    """Cuts as its SentencePiece model does, that model's own normalising included; a piece without a number is unknown."""

    def __init__(self, model: bytes, pieces: Sequence[str], *, algorithm: str = "unigram") -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            found = f"{len(model)} bytes that are none"
            raise BundleError(
                "a tokenizer must be a SentencePiece model",
                found=found,
                fix="copy the model directory anew",
            ) from error
        if tuple(pieces[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS or len(set(pieces)) != len(
            pieces
        ):
            found = (
                f"{list(pieces[:4])!r:.80}"
                if tuple(pieces[:4]) != SPECIAL_TOKENS
                else "a piece twice"
            )
            raise BundleError(
                f"a list of pieces must begin with {', '.join(SPECIAL_TOKENS)} and name each piece once",
                found=found,
                fix="copy the model directory anew",
            )
        self.algorithm, self.normalization = algorithm, "none"
        self._model, self._pieces = model, list(pieces)
        self._ids = {
            piece: number for number, piece in enumerate(pieces) if number >= len(SPECIAL_TOKENS)
        }

    @classmethod
    def read(cls, directory: Path, side: str, model: bytes, algorithm: str) -> ImportedTokenizer:
        """Read the list of pieces beside a SentencePiece model."""
        path = pieces_path(directory, side)
        fix = "copy the model directory anew"
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
        pieces = content.get("pieces") if isinstance(content, dict) else content
        if (
            not isinstance(content, dict)
            or not isinstance(pieces, list)
            or not all(isinstance(piece, str) for piece in pieces)
        ):
            raise BundleError(f"{path} must be a list of tokens", found=f"{pieces!r:.100}", fix=fix)
        return cls(model, pieces, algorithm=algorithm)

    def save(self, directory: Path, side: str) -> None:
        """Write `SIDE.model`, `SIDE.pieces.json` and `text.json` into a directory, which is made when missing."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{side}.model").write_bytes(self._model)
        pieces_path(directory, side).write_text(
            json.dumps({"pieces": self._pieces}, ensure_ascii=False, indent=0) + "\n",
            encoding="utf-8",
        )
        write_text_json(directory, algorithm=self.algorithm, normalization=self.normalization)

    def frames(self) -> list[bytes]:
        """Return all that makes the tokenizer, its list of tokens included."""
        return [*super().frames()[:2], json.dumps(self._pieces).encode()]

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[list[int]]:
        """Encode many texts; a language's code before a text, as in `>>fra<<`, is one piece."""
        cut = [_split_language_code(text) for text in texts]
        try:
            pieces = self._processor.encode(
                [rest for _, rest in cut], out_type=str, num_threads=threads
            )
        except (RuntimeError, UnicodeError, TypeError) as error:
            raise invalid_text_error(texts) from error
        return [
            [self._ids.get(piece, UNK) for piece in [*code, *row]]
            for (code, _), row in zip(cut, pieces, strict=True)
        ]

    def encode_with_dropout(
        self, text: str, *, dropout: float, generator: Callable[[], float]
    ) -> list[int]:
        """Refuse: merges that another program learnt are not ours to skip."""
        raise DataError(
            "sampling of pieces needs a tokenizer trained here",
            found="an imported one",
            fix="set text.bpe_dropout=0",
        )

    def decode_batch(self, rows: Sequence[TokenIds]) -> list[str]:
        """Decode many rows of ids; a piece that this side's model does not know is written as it is spelt."""
        lists = [
            row.tolist() if isinstance(row, np.ndarray) else [int(each) for each in row]
            for row in rows
        ]
        spelt = [[self._pieces[each] for each in row if each >= UNK] for row in lists]
        return [
            self._processor.decode_pieces(row).replace(SPACE_MARK, " ").strip() if row else ""
            for row in spelt
        ]

    def tokens(self, ids: TokenIds) -> list[str]:
        """Spell the pieces for people."""
        return [self._pieces[int(each)] for each in ids]

    def __len__(self) -> int:
        """Count the pieces that have a number."""
        return len(self._pieces)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides the ids."""
        hasher = hashlib.sha256(f"dragoman tokenizer {FORMAT} foreign\n".encode())
        hasher.update(json.dumps(self._pieces).encode())
        hasher.update(self._model)
        return hasher.hexdigest()


def tokenizer_from_frames(frames: Sequence[bytes]) -> Tokenizer:
    """Make a tokenizer from what `Tokenizer.frames` returned."""
    header, model, pieces = frames
    algorithm, normalization = header.decode().split("\n")
    if pieces:
        return ImportedTokenizer(model, json.loads(pieces), algorithm=algorithm)
    return Tokenizer(model, algorithm=algorithm, normalization=normalization)


def _split_language_code(text: str) -> tuple[list[str], str]:
    """Take a language's code off the beginning of a text, if there is one."""
    begin, end = _LANGUAGE_CODE_MARKS
    place = text.find(end)
    if text.startswith(begin) and place != -1:
        return [text[: place + len(end)]], text[place + len(end) :]
    return [], text
