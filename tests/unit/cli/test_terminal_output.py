"""Tables, notes and results printed by commands."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from dragoman.cli import terminal_output
from dragoman.storage.disk_space_and_errors import format_bytes


def test_results_and_notes_go_to_different_streams(capsys: pytest.CaptureFixture[str]) -> None:
    terminal_output.print_result("a result")
    terminal_output.print_note("a note")
    terminal_output.print_error("a complaint")
    captured = capsys.readouterr()
    assert captured.out == "a result\n"
    assert captured.err == "dragoman: a note\ndragoman: error: a complaint\n"


def test_json_keeps_scripts_readable(capsys: pytest.CaptureFixture[str]) -> None:
    terminal_output.print_json({"text": "早上好"})
    out = capsys.readouterr().out
    assert out == '{"text": "早上好"}\n'
    assert json.loads(out) == {"text": "早上好"}


def test_a_table_in_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    terminal_output.print_table(
        ["name", "number"], [("x" * 100, 1), ("[bold]y[/bold]", 20)], right=["number"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["x" * 100, "1"]
    assert lines[2].split() == ["[bold]y[/bold]", "20"], (
        "text is shown as it is, not read as markup"
    )
    assert len(lines[1]) == len(lines[2]), "numbers are flush right"


def test_a_last_column_without_spaces_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sacreBLEU signature is copied as a whole; 80 columns broke that of TER."""
    monkeypatch.setenv("COLUMNS", "80")
    signature = "nrefs:1|case:lc|tok:tercom|norm:no|punct:yes|asian:no|version:2.6.0"
    shown = []
    for last in (signature, "a sentence of many words " * 4):
        with io.StringIO() as out:
            out.isatty = lambda: True
            monkeypatch.setattr(sys, "stdout", out)
            terminal_output.print_table(["metric", "score", ""], [("TER", "41.53", last)])
            shown.append(re.sub(r"\x1b\[\d+m", "", out.getvalue()).splitlines())
    assert signature in shown[0][1]
    assert max(map(len, shown[1])) <= 80


@pytest.mark.parametrize(("number", "text"), [(0, "0 lines"), (1, "1 line"), (1200, "1,200 lines")])
def test_counts_agree_with_their_noun(number: int, text: str) -> None:
    assert terminal_output.format_count(number, "line") == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [(12, "12 bytes"), (2048, "2.0 kB"), (5_200_000, "5.2 MB"), (3e9, "3.0 GB")],
)
def test_sizes(amount: int, text: str) -> None:
    assert format_bytes(amount) == text
