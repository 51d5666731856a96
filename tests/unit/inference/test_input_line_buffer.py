"""Windows of lines: available lines are read together, output is never delayed needlessly, and
memory is bounded.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.cli.input_lines import StreamLines, open_stream_lines
from dragoman.config import Config
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import SearchStrategy
from dragoman.errors import DataError
from dragoman.inference import NativeEngine, SearchRequest, Translator, input_line_buffer
from dragoman.inference.input_line_buffer import (
    FIRST_BUFFER_LINES,
    LineBuffers,
    get_ready_check,
    is_regular_file,
)
from dragoman.inference.translation_result import Translation, join_translations
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

MOST = 2048


Make = Callable[["Counting"], Translator]


class WrittenLines:
    """A stream with some lines available: `ready` while there are any; reading past them fails the
    test.
    """

    def __init__(self, written: list[str]) -> None:
        self.written, self.waited = deque(written), 0

    def ready(self) -> bool:
        return bool(self.written)

    def __iter__(self) -> Iterator[str]:
        while True:
            if not self.written:
                self.waited += 1
                return
            yield self.written.popleft()


class Counting:
    """An engine that copies its source and counts its calls."""

    name, workers, client_threads, batch_tokens = "counting", 1, 1, 4096

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        return ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        self.batch_sizes.append(len(request.sources))
        return [
            [Hypothesis(list(source), [0.0] * (len(source) + 1), 0.0, True)]
            for source in request.sources
        ]


@pytest.fixture(scope="module")
def make() -> Make:
    config = Config().replace(text={"vocab_size": 300}, decode={"beam": 1})
    tokenizers: Tokenizers = train_tokenizers(
        ["line 0123456789"] * 20, ["line 0123456789"] * 20, config.text
    )
    native = NativeEngine(lambda: pytest.fail("the model is not needed"))  # type: ignore[arg-type,return-value]
    return lambda engine: Translator(native, tokenizers, config, engine=engine)


def numbered(count: int) -> list[str]:
    return [f"line {number}" for number in range(count)]


def sizes(lines: object, first: int = FIRST_BUFFER_LINES, max_lines: int = MOST) -> list[list[int]]:
    """Iterate over all windows; return the number of lines of each."""
    return [
        [len(window) for window in row]
        for row in LineBuffers(lines, first=first, max_lines=max_lines)
    ]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, tuple, deque])
def test_lines_in_memory_are_read_a_whole_window_at_a_time(
    kind: Callable[[list[str]], object],
) -> None:
    assert sizes(kind(numbered(5000))) == [[2048, 2048, 904]]
    assert sizes(kind([])) == []


def test_lines_of_a_regular_file_too(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("".join(f"{line}\n" for line in numbered(3000)), "utf-8")
    with path.open(encoding="utf-8") as file:
        assert is_regular_file(file)
        assert sizes(file) == [[2048, 952]]
    assert not is_regular_file(file), "it is closed"
    assert not is_regular_file(io.StringIO("text"))


def test_windows_of_unknown_streams_grow() -> None:
    """The first outputs come soon; from hundreds of lines on input is read ahead."""
    assert sizes(iter(numbered(5000))) == [[32], [256, 2048, 2048, 616]]
    assert sizes(line for line in numbered(20)) == [[20]]
    assert sizes(iter(numbered(5000)), first=MOST) == [[2048, 2048, 904]]
    assert sizes(iter(numbered(3)), max_lines=1) == [[1], [1], [1]]


def test_available_lines_are_read_without_waiting_for_more() -> None:
    pen = WrittenLines(numbered(300))
    rows = iter(LineBuffers(pen, first=FIRST_BUFFER_LINES, max_lines=MOST))
    assert [len(window) for window in next(rows)] == [300]
    assert pen.waited == 0, "their writer may wait for the outputs"
    pen.written.extend(numbered(40))
    row = next(rows)
    assert len(next(row)) == 40
    pen.written.extend(numbered(3))
    assert list(row) == [numbered(3)], (
        "lines that arrived meanwhile join the same batch, however few they are"
    )
    assert pen.waited == 0


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(0, 400),
    first=st.integers(1, 50),
    max_lines=st.integers(1, 70),
    kind=st.sampled_from([list, iter, WrittenLines]),
)
def test_windows_contain_every_line_once_in_order_within_their_limit(
    count: int, first: int, max_lines: int, kind: Callable[[list[str]], object]
) -> None:
    found = [
        window
        for row in LineBuffers(kind(numbered(count)), first=first, max_lines=max_lines)
        for window in row
    ]  # type: ignore[arg-type]
    assert [text for window in found for text in window] == numbered(count)
    assert all(0 < len(window) <= max_lines for window in found)


def test_long_lines_make_shorter_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_line_buffer, "MAX_BUFFER_CHARS", 1000)
    assert sizes(["x" * 300] * 10) == [[4, 4, 2]]
    assert sizes(["x" * 5000] * 2) == [[1, 1]]


def test_an_endless_input_never_fills_the_memory() -> None:
    """At most two windows are read before an output of the first is consumed."""
    read = 0

    def lines() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "line"

    class Endless(WrittenLines):
        def ready(self) -> bool:
            return True

        def __iter__(self) -> Iterator[str]:
            return lines()

    row = next(iter(LineBuffers(Endless([]), first=FIRST_BUFFER_LINES, max_lines=100)))
    for number in range(1, 20):
        next(row)
        assert read == 100 * number


@pytest.mark.parametrize("kind", [list, iter])
def test_lines_before_an_error_are_translated_first(
    kind: Callable[[list[object]], object], make: Make
) -> None:
    stream = make(Counting()).stream(kind([*numbered(40), None, "line"]))  # type: ignore[arg-type]
    assert [next(stream).text for _ in range(40)] == numbered(40)
    with pytest.raises(DataError, match="text 41 must be a text; found None"):
        next(stream)


def test_file_makes_few_batches_with_equal_outputs(make: Make, tmp_path: Path) -> None:
    """Counted in calls of the engine: a list, a file and standard input from a file are as one to
    it, and lines that trickle are not.
    """
    lines = [
        "" if number % 7 == 3 else f"line {number} " + "0" * (number % 5) for number in range(900)
    ]
    lines = [line.strip() for line in lines]
    path = tmp_path / "text"
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    calls = {}
    with path.open(encoding="utf-8") as text, path.open("rb") as raw:
        for name, source in {
            "list": lines,
            "file": text,
            "input": StreamLines(raw),
            "trickle": iter(lines),
        }.items():
            engine = Counting()
            assert [
                each.text for each in make(engine).stream(source, return_scores=False)
            ] == lines, name
            calls[name] = engine.batch_sizes
        engine = Counting()
        assert make(engine).translate(iter(lines)) == lines
    assert calls["list"] == calls["file"] == calls["input"] == engine.batch_sizes
    assert len(calls["list"]) < len(calls["trickle"])
    assert calls["trickle"][0] < FIRST_BUFFER_LINES, "the empty ones make no rows"


def test_stream_without_readiness_is_unknown() -> None:
    assert get_ready_check(iter([])) is None
    assert get_ready_check(line for line in "ab") is None
    known = get_ready_check(["a"])
    assert known is not None
    assert known()


def in_a_pipe() -> tuple[StreamLines, int, io.BufferedReader]:
    """Return the reader of a pipe, and the descriptor of its other end."""
    out, into = os.pipe()
    stream = os.fdopen(out, "rb")
    return StreamLines(stream), into, stream


def test_a_pipe_is_read_as_far_as_it_is_written() -> None:
    arriving, into, stream = in_a_pipe()
    with stream:
        assert not arriving.ready()
        os.write(into, b"a\nb\r\nhal")
        lines = iter(arriving)
        assert arriving.ready()
        assert [next(lines), next(lines)] == ["a", "b"]
        assert not arriving.ready(), "half a line is none"
        os.write(into, "b \u00e4".encode()[:-1])
        assert not arriving.ready()
        os.write(into, "\u00e4".encode()[-1:] + b"\n\nlast")
        assert [next(lines), next(lines)] == ["halb \u00e4", ""]
        assert not arriving.ready()
        os.close(into)
        assert arriving.ready(), "an end ends a line"
        assert list(lines) == ["last"]
        assert not arriving.ready()


def test_open_pipe_gets_translations_of_all_written_lines(make: Make) -> None:
    arriving, into, stream = in_a_pipe()
    engine = Counting()
    with stream:
        os.write(into, "".join(f"{line}\n" for line in numbered(500)).encode())
        answers = make(engine).stream(arriving, return_scores=False)
        assert [next(answers).text for _ in range(500)] == numbered(500)
        once = len(engine.batch_sizes)
        ending = threading.Timer(0.05, os.close, [into])
        ending.start()
        assert list(answers) == []
        ending.join()
    assert once <= 2, "one window, in as few batches as it fills"


def test_a_writer_may_wait_for_the_translation_of_each_line(make: Make) -> None:
    arriving, into, stream = in_a_pipe()
    with stream:
        answers = make(Counting()).stream(arriving, return_scores=False)
        for line in ("one", "", "three"):
            os.write(into, f"{line}\n".encode())
            assert next(answers).text == line
        os.close(into)
        assert list(answers) == []


def test_lines_longer_than_one_read(tmp_path: Path) -> None:
    lines = ["x" * 200_000, "", "y" * 70_000, "z"]
    path = tmp_path / "text"
    path.write_text("\n".join(lines), "utf-8")
    with path.open("rb") as stream:
        arriving = StreamLines(stream)
        assert arriving.ready()
        assert list(arriving) == lines


@pytest.mark.parametrize(
    "stream", [io.BytesIO(b"a\nb"), io.BufferedReader(io.BytesIO(b"a\r\nb\n"))]
)  # type: ignore[arg-type]
def test_bytes_in_memory_are_an_unknown_stream(stream: BinaryIO) -> None:
    lines = open_stream_lines(stream)
    assert get_ready_check(lines) is None
    assert list(lines) == ["a", "b"]


def test_without_select_on_pipes_lines_are_read_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_socket(*_: object) -> None:
        raise OSError("an operation was attempted on something that is not a socket")

    _, into, stream = in_a_pipe()
    os.write(into, b"a\nb\n")
    os.close(into)
    monkeypatch.setattr(select, "select", no_socket)
    with stream:
        lines = open_stream_lines(stream)
        assert get_ready_check(lines) is None
        assert list(lines) == ["a", "b"]


def test_a_line_has_as_many_alternatives_as_the_segment_with_the_fewest() -> None:
    few, many = (
        Translation(
            text=name, alternatives=[Translation(text=f"{name}{rank}") for rank in range(count)]
        )
        for name, count in (("a", 2), ("b", 3))
    )
    found = join_translations([few, many], [" "], ())
    assert [each.text for each in found.alternatives] == ["a0 b0", "a1 b1"]
