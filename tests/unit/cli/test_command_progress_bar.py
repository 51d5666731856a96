"""Progress bars: on a terminal only, after a delay, and never raising."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from dragoman.cli import command_progress_bar as module
from dragoman.cli.command_progress_bar import is_terminal, progress, track


class Terminal(io.StringIO):
    """A terminal, which may hang up."""

    gone = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Patch stderr.isatty inside the test, because pytest replaces stderr after a fixture."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(module, "DELAY_SECONDS", 0.0)
    return found


def test_a_bar_counts_and_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with progress("translating", 3, "lines") as bar:
        assert list(track("abc", bar)) == ["a", "b", "c"]
    assert "translating" in screen.getvalue()
    assert "3 of 3 lines" in screen.getvalue()
    assert bar.done == 3


def test_a_phase_without_a_count_shows_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with progress("exporting to onnx"):
        pass
    assert "exporting to onnx" in screen.getvalue()


def test_a_short_phase_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr(module, "DELAY_SECONDS", 60.0)
    threads = threading.active_count()
    with progress("translating", 3, "lines") as bar:
        bar.advance(3)
    assert screen.getvalue() == ""
    assert threading.active_count() <= threads + 1, "the timer was stopped"


def test_nothing_is_shown_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with progress("translating", 3, "lines", shown=False) as bar:
        bar.advance()
    assert screen.getvalue() == ""
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with progress("translating", 3, "lines") as bar:
        bar.advance()
    assert pipe.getvalue() == ""


def test_a_terminal_that_hangs_up_costs_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with progress("translating", 3, "lines") as bar:
        screen.gone = True
        bar.advance(3)
    assert bar.done == 3


def test_a_closed_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    assert not is_terminal(stream)
