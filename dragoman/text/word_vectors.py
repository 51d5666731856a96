"""Word vectors from text files in the formats of GloVe and word2vec, read as a stream."""

from __future__ import annotations

import gzip
import logging
import lzma
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import DataError

logger = logging.getLogger(__name__)

MAX_WIDTH = 65_536
MAX_LINE_BYTES = 1 << 20


class WordVectors(NamedTuple):
    """Vectors of the words of a vocabulary that a file has."""

    ids: NDArray[np.int64]  # (N,) ids of the words that were found
    vectors: NDArray[np.float32]  # (N, D)

    @property
    def width(self) -> int:
        """The dimension of the vectors."""
        return int(self.vectors.shape[1])


def read_word_vectors(
    path: Path | str, ids: Mapping[str, int], *, lowercase: bool = False
) -> WordVectors:
    """Read the vectors of the words in `ids`; others are skipped without being parsed.

    A line is a word and its numbers, separated by spaces. A first line of two integers is
    word2vec's count and dimension; a file with fewer vectors is warned of. Words may contain
    spaces: the numbers are the last columns, as many as the dimension, or as on the first line.
    With `lowercase` a word that is not in `ids` is looked up in lower case. Of several vectors of
    one word the first counts. The file may be compressed (.gz, .xz).
    """
    path = Path(path)
    width = declared = rows = 0
    found: dict[int, NDArray[np.float32]] = {}
    exact: set[int] = set()  # ids whose vector is of the word as written, not in lower case
    for number, line in _read_lines(path):
        columns = line.rstrip("\r\n ").split(" ")
        if number == 1 and len(columns) == 2 and all(each.isdecimal() for each in columns):
            declared, width = map(int, columns)
            _check_width(path, number, width)
            continue
        if not width:
            width = len(columns) - 1
            _check_width(path, number, width)
        if len(columns) <= width:
            if columns == [""]:
                continue
            raise DataError(
                f"{path} line {number} must have a word and {width} numbers, as its first line",
                found=f"{len(columns)} columns",
                fix="repair the line, or use a file of word vectors in text format",
            )
        rows += 1
        word = " ".join(columns[: len(columns) - width])
        index = ids.get(word)
        is_exact = index is not None
        if index is None and lowercase:
            index = ids.get(word.lower())
        if index is None or index in exact or (index in found and not is_exact):
            continue
        found[index] = _parse(path, number, columns[len(columns) - width :])
        if is_exact:
            exact.add(index)
    if not rows:
        raise DataError(
            f"{path} must hold word vectors",
            found="no vector" if declared else "an empty file",
            fix="pass a file with one word and its vector per line",
        )
    if not found:
        raise DataError(
            f"{path} must hold vectors of some words of the vocabulary",
            found=f"none of {len(ids):,} words",
            fix="use vectors of the same language and case, or set text.lowercase",
        )
    if rows < declared:
        logger.warning(
            "%s has %s of the %s vectors that its first line declares; "
            "unless they are a selection, fetch the file again",
            path,
            f"{rows:,}",
            f"{declared:,}",
        )
    order = sorted(found)
    return WordVectors(np.array(order, np.int64), np.stack([found[index] for index in order]))


def _check_width(path: Path, number: int, width: int) -> None:
    """Raise DataError unless a first line has a possible number of columns."""
    if not 1 <= width <= MAX_WIDTH:
        raise DataError(
            f"{path} line {number} must have a word and its numbers, separated by spaces",
            found=f"{width + 1} columns",
            fix="use word vectors in text format, as of GloVe or word2vec",
        )


def _parse(path: Path, number: int, columns: list[str]) -> NDArray[np.float32]:
    """Return the numbers of a line; raise DataError for one that is not finite."""
    try:
        vector = np.array(columns, dtype=np.float32)
    except ValueError as error:
        raise DataError(
            f"{path} line {number} must have numbers after the word",
            found=f"{next(filter(_is_no_number, columns), '')!r:.60}",
            fix="repair the line",
        ) from error
    if not np.isfinite(vector).all():
        wrong = columns[int(np.flatnonzero(~np.isfinite(vector))[0])]
        raise DataError(
            f"{path} line {number} must have finite numbers",
            found=f"{wrong!r:.60}",
            fix="repair the line",
        )
    return vector


def _is_no_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return True
    return False


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, decompressed by the end of its name."""
    number = 0
    try:
        with _open(path) as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise DataError(
                        f"{path} line {number} must be shorter than {MAX_LINE_BYTES:,} bytes",
                        found="a longer line",
                        fix="use word vectors in text format, as of GloVe or word2vec",
                    )
                yield number, line.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} line {number} must be UTF-8",
            found=f"byte {error.object[error.start]:#04x}",
            fix="use word vectors in text format; word2vec's binary format must be converted",
        ) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{path} must be a readable file of word vectors",
            found=(getattr(error, "strerror", None) or str(error) or type(error).__name__)
            + (f" after line {number}" if number else ""),
            fix="check the path, or fetch the file again",
        ) from error


def _open(path: Path) -> BinaryIO:
    """Open a plain or compressed file."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path, "rb"))
    return path.open("rb")
