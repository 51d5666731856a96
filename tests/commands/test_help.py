"""`--help` of every command: flags take no value, and 80 columns are enough."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.cli.app import app, build_command, main


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, groups included."""
    yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from paths(each, (*path, name))


@pytest.mark.parametrize("path", list(paths(build_command(app))), ids=" ".join)
def test_help_fits_and_flags_have_no_type(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags were shown as `--json <bool>`, and paragraphs were broken twice."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert main([*path, "--help"]) == 0
    out = capsys.readouterr().out
    assert not re.search(r"<(bool|str|path|int|float|list)\b", out), "types of Python"
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "Usage: dragoman" in out
    text = out[: out.index("╭")].splitlines()[
        3:
    ]  # the description: a short line ends its paragraph
    words = [line.strip() for line in text]
    for line, following in itertools.pairwise(words):
        if following and line:
            assert len(line) + 1 + len(following.split()[0]) > 77, f"{line!r} is broken too early"


def test_every_command_is_listed() -> None:
    assert {("score",), ("data", "clean"), ("data", "check"), ("translate",)} <= set(
        paths(build_command(app))
    )
