"""Very long lines (accents, dots, spaces, ten megabytes) take linear time and bounded memory."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import threading
import tracemalloc
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from dragoman.cli import input_lines
from dragoman.inference import long_line_segments, translation_result
from dragoman.inference.translation_result import Translation, join_translations
from dragoman.text import sentencepiece_tokenizer as tokenizer_module
from dragoman.text.sentence_splitter import split_long_text
from dragoman.text.sentencepiece_tokenizer import normalize

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 50

UNITS = {
    "one accent": "\u0301",
    "two accents in turn": "\u0301\u0323",
    "joiners": "\u200d",
    "selectors": "\ufe0f",
    "a family": "\U0001f469\u200d",
    "letters": "a",
    "dots": ".",
    "dots and quotes": ".'",
    "quotes": '"',
    "commas": ",",
    "dashes": " - ",
    "spaces": " ",
    "no-break spaces": "\u00a0",
    "full stops of Chinese": "。",
    "short sentences": "Ja. ",
    "words": "ab ",
}


def long_line(name: str, length: int) -> str:
    """Repeat a unit between two letters, so that nothing is stripped."""
    unit = UNITS[name]
    return "a" + (unit * (length // len(unit) + 1))[:length] + "b"


@pytest.mark.parametrize("name", UNITS)
def test_cutting_takes_linear_work_and_loses_nothing(name: str) -> None:
    """5,000 accents on one letter took 22 seconds: they went through the model as one part."""
    work = []
    for length in (4_000, 16_000):
        seen = 0

        def fits(text: str) -> bool:
            nonlocal seen
            seen += len(text)
            return len(text.encode()) <= LONGEST

        text = long_line(name, length)
        parts = split_long_text(text, fits)
        assert all(len(part.encode()) <= LONGEST for part in parts.texts)
        gaps = [*parts.gaps, ""]
        assert "".join(part + gap for part, gap in zip(parts.texts, gaps, strict=True)) == text
        work.append(seen)
    assert work[1] < 6 * work[0]
    assert work[1] < 100 * 16_000


def test_a_letter_keeps_its_accents_where_they_fit() -> None:
    text = "e\u0301" * 100
    parts = split_long_text(text, lambda each: len(each) <= 7)
    assert set(parts.texts[:-1]) == {"e\u0301" * 3}


@pytest.mark.parametrize("form", ["nfc", "nfkc"])
def test_long_texts_are_normalised_as_short_ones_are(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(3)
    letters = (
        "aeox\u1100\u1161\u11a8\uac00\u00e9\u1e69\u0958\ufb01"
        "\u0344\u0301\u0323\u0327\u0345\u05b0\u3099か"
    )
    monkeypatch.setattr(tokenizer_module, "_MAX_FAST_CHARACTERS", 0)
    for _ in range(500):
        text = "".join(draw.choices(letters, k=draw.randint(1, 30)))
        assert normalize(text, form) == unicodedata.normalize(form.upper(), text)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from test_long_lines import UNITS, long_line
from dragoman.config import TextConfig
from dragoman.text.sentencepiece_tokenizer import train_tokenizers
from dragoman.inference.long_line_segments import split_lines
config = TextConfig(tokenizer="characters")
tokenizers = train_tokenizers(["ein Satz."] * 50, ["a sentence."] * 50, config)
for name in ("two accents in turn", "dots", "spaces"):
    [line] = split_lines([long_line(name, 300_000)], tokenizers.src, longest=1_000)
    assert all(len(part.src) <= 1_000 for part in line.segments), name
    assert "only its first 262,144 characters were translated" in line.notes[0], name
"""


def test_lines_of_300_000_characters_do_not_hang() -> None:
    """Ordering 200,000 accents took minutes, and so did finding a sentence end in as many dots."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr


def test_a_line_of_fifty_megabytes_is_read_in_bounded_memory() -> None:
    reader, writer = os.pipe()

    def write() -> None:
        with open(writer, "wb") as file:
            for _ in range(50):
                file.write("€".encode() * (1 << 20))
            file.write(b"\nthe next\n")

    thread = threading.Thread(target=write)
    thread.start()
    tracemalloc.start()
    with open(reader, "rb") as file:
        first, second = input_lines.StreamLines(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    thread.join()
    assert long_line_segments.MAX_LINE_CHARS < len(first) <= input_lines.MAX_LINE_BYTES
    assert set(first) == {"€"}
    assert second == "the next"
    assert peak < 8 * input_lines.MAX_LINE_BYTES


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_file_with_a_line_of_fifty_megabytes_is_read_in_bounded_memory(
    kind: str, tmp_path: Path
) -> None:
    """Only standard input was; a line of `--input` was read as a whole."""
    path = tmp_path / "long"
    if kind == "pipe":
        os.mkfifo(path)

    def write() -> None:
        with path.open("wb") as file:
            for _ in range(50):
                file.write("€".encode() * (1 << 20))
            file.write(b"\nthe next")

    thread = threading.Thread(target=write)
    thread.start()
    if kind == "file":
        thread.join()
    tracemalloc.start()
    first, second = input_lines.InputFiles([path])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    thread.join()
    assert long_line_segments.MAX_LINE_CHARS < len(first) <= input_lines.MAX_LINE_BYTES
    assert (set(first), second) == ({"€"}, "the next")
    assert peak < 8 * input_lines.MAX_LINE_BYTES


@pytest.mark.parametrize("text", ["aé", "a€", "a\U0001f469", "abcd", "é", ""])
def test_a_character_that_was_cut_off_is_dropped(text: str) -> None:
    data = text.encode()
    for end in range(len(data) + 1):
        expected = data[:end].decode("utf-8", "ignore")
        assert input_lines.drop_partial_char(data[:end]).decode() == expected


def test_a_truncated_long_line_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Letters:
        unknown_ids = frozenset[int]()

        def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]:
            return [[5] * len(text) for text in texts]

        def encode(self, text: str) -> list[int]:
            return [5] * len(text)

    monkeypatch.setattr(long_line_segments, "MAX_LINE_CHARS", 10)
    exact, longer, padded = long_line_segments.split_lines(
        ["abcdefghij", "abcdefghijk", "abcdefghij   "], Letters(), longest=100
    )  # type: ignore[arg-type]
    assert exact.notes == padded.notes == []
    assert longer.notes == [
        "only its first 10 characters were translated: put a line break between its sentences"
    ]
    assert [part.text for part in longer.segments] == ["abcdefghij"]


def test_an_alignment_that_is_mostly_zeros_is_left_out_where_it_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(translation_result, "MAX_ALIGNMENT_CELLS", 100)
    part = Translation(text="x", alignment=np.ones((4, 5), np.float32))
    whole = join_translations([part, part], [" "], ())
    assert whole.alignment is not None
    np.testing.assert_array_equal(whole.alignment, np.kron(np.eye(2), np.ones((4, 5))))
    whole = join_translations([part, part, part], [" ", " "], ["first"])
    assert whole.alignment is None
    assert whole.notes == ["first", "its alignment is left out: 12 by 15 is more than 100 numbers"]


@pytest.mark.parametrize(("columns", "is_kept"), [(1024, True), (1025, False)])
def test_an_alignment_has_at_most_four_million_numbers(columns: int, is_kept: bool) -> None:
    block = np.broadcast_to(np.float32(1), (1024, columns))
    whole = join_translations([Translation(text="x", alignment=block)] * 2, [" "], ())
    assert (whole.alignment is not None) is is_kept


def test_a_file_ends_in_the_middle_of_a_line(tmp_path: Path) -> None:
    assert list(input_lines.decode_lines(io.BytesIO("ä\nö".encode()))) == ["ä", "ö"]
