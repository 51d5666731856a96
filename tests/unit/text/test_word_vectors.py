"""Word vectors: formats, and errors that name the line."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from dragoman.errors import DataError
from dragoman.text.word_vectors import read_word_vectors

IDS = {"the": 4, "cat": 5, "at home": 6, "dog": 7}
GLOVE = "cat 1 2.5 -3e-1\nunseen 9 9 9\nat home 4 5 6\nthe 7 8 9\ncat 0 0 0\n"


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("header", ["", "5 3\n"])
def test_vectors_of_the_vocabulary_are_read(tmp_path: Path, suffix: str, header: str) -> None:
    path = tmp_path / f"vectors.txt{suffix}"
    write = {"": path.write_bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    data = write((header + GLOVE).encode())
    if isinstance(data, bytes):
        path.write_bytes(data)
    found = read_word_vectors(path, IDS)
    assert found.width == 3
    assert found.ids.tolist() == [4, 5, 6]
    expected = [[7, 8, 9], [1, 2.5, -0.3], [4, 5, 6]]
    np.testing.assert_allclose(found.vectors, expected, rtol=1e-6)


def test_a_word_as_written_precedes_its_lower_case(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("The 1 1\nTHE 2 2\nthe 3 3\nCat 4 4\n")
    found = read_word_vectors(path, IDS, lowercase=True)
    assert found.ids.tolist() == [4, 5]
    assert found.vectors.tolist() == [[3, 3], [4, 4]]
    with pytest.raises(DataError, match=r"found none of 1 words"):
        read_word_vectors(path, {"fish": 4})


def test_case_counts_unless_words_are_lowercased(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("The 1 1\ncat 2 2\n")
    assert read_word_vectors(path, IDS).ids.tolist() == [5]


def test_the_first_of_several_spellings_gives_a_lowercased_word_its_vector(tmp_path: Path) -> None:
    """Files are sorted by frequency: The comes long before THE."""
    path = tmp_path / "vectors.txt"
    path.write_text("The 1 1\nCAT 2 2\nTHE 3 3\nCat 4 4\n")
    found = read_word_vectors(path, IDS, lowercase=True)
    assert found.ids.tolist() == [4, 5]
    assert found.vectors.tolist() == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the 1 2\ncat 1\n", r"line 2 must have a word and 2 numbers.*found 2 columns"),
        (b"the 1 2\ncat 1 x2\n", r"line 2 must have numbers.*found 'x2'"),
        (b"the 1 nan\n", r"line 1 must have finite numbers.*found 'nan'"),
        (b"the 1 2\ncat inf 2\n", r"line 2 must have finite numbers.*found 'inf'"),
        (b"the 1 2\ncat 1 \xff\n", r"line 2 must be UTF-8.*found byte 0xff"),
        (b"", r"must hold word vectors.*found an empty file"),
        (b"the\n", r"line 1 must have a word and its numbers.*found 1 columns"),
    ],
)
def test_bad_files_are_reported_with_their_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "vectors.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_word_vectors(path, IDS)


def test_missing_and_truncated_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found No such file"):
        read_word_vectors(tmp_path / "none.txt", IDS)
    path = tmp_path / "vectors.txt.gz"
    path.write_bytes(gzip.compress(GLOVE.encode() * 100)[:-20])
    with pytest.raises(DataError, match=r"must be a readable file.*found .*after line"):
        read_word_vectors(path, IDS)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(DataError, match=r"found .*gzip"):
        read_word_vectors(path, IDS)


def test_a_first_word_with_one_number_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text("cat 7\nthe 8\n")
    found = read_word_vectors(path, IDS)
    assert (found.ids.tolist(), found.vectors.tolist()) == ([4, 5], [[8.0], [7.0]])


def test_a_header_gives_the_dimension_and_the_number_of_vectors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first word may contain a space, and a file that was cut off lacks vectors."""
    path = tmp_path / "vectors.txt"
    path.write_text("2 3\nat home 4 5 6\ncat 1 2 3\n")
    assert read_word_vectors(path, IDS).ids.tolist() == [5, 6]
    assert not caplog.messages
    path.write_text("2000 3\nat home 4 5 6\ncat 1 2 3")
    assert read_word_vectors(path, IDS).vectors.tolist() == [[1, 2, 3], [4, 5, 6]]
    (message,) = caplog.messages
    assert message == (
        f"{path} has 2 of the 2,000 vectors that its first line declares; unless they are a "
        "selection, fetch the file again"
    )
    path.write_text("2 4\nat home 4 5 6\n")
    with pytest.raises(DataError, match=r"line 2 must have numbers after the word; found 'home'"):
        read_word_vectors(path, IDS | {"at": 9})
    path.write_text("2 4\ncat 4 5 6\n")
    with pytest.raises(DataError, match=r"line 2 must have a word and 4 numbers"):
        read_word_vectors(path, IDS)
    path.write_text("2 4\n")
    with pytest.raises(DataError, match=r"must hold word vectors; found no vector"):
        read_word_vectors(path, IDS)
