"""What a file holds cannot control a terminal: messages, tables, notes and JSON escape it."""

from __future__ import annotations

import json

import pytest

from dragoman.cli.terminal_output import (
    print_error,
    print_json,
    print_note,
    print_result,
    print_table,
)
from dragoman.config import read_config
from dragoman.errors import (
    MAX_LISTED_PROBLEMS,
    MAX_MESSAGE_CHARACTERS,
    BundleError,
    ConfigError,
    escape_unprintable,
    suggest_name,
)

ESCAPES = {
    "a colour": ("\x1b[31m", "\\x1b[31m"),
    "a title": ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
    "C1": ("\x9b31m", "\\x9b31m"),
    "a carriage return": ("safe\rowned", "safe\\rowned"),
    "a direction": ("\u202eexe", "\\u202eexe"),
    "an isolate": ("\u2066x\u2069", "\\u2066x\\u2069"),
    "half of a character": ("\udcff", "\\udcff"),
    "delete": ("\x7f", "\\x7f"),
    "a separator": ("\u2028", "\\u2028"),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_message_shows_controls_escaped(name: str) -> None:
    raw, shown = ESCAPES[name]
    assert str(BundleError(f"must {raw}", found=f"found {raw}", fix=f"fix {raw}")).count(shown) == 3
    assert str(ConfigError([raw])) == shown
    assert raw not in str(ConfigError([raw, raw]))


def test_a_message_stays_one_line_and_bounded() -> None:
    text = str(BundleError("a\nb", found="x" * 100_000, fix="c"))
    assert text.startswith("a\\nb; found x")
    assert "\n" not in text
    assert len(text) < 2 * MAX_MESSAGE_CHARACTERS
    assert BundleError("a", found="x\n", fix="c").found == "x\n", (
        "programs read what was found as it is"
    )


def test_of_many_problems_the_first_are_listed_and_the_rest_counted() -> None:
    error = ConfigError([f"problem {number}" for number in range(1000)])
    lines = str(error).splitlines()
    assert lines[0] == "1000 problems in the configuration:"
    assert lines[-1] == f"  - and {1000 - MAX_LISTED_PROBLEMS} more"
    assert len(lines) == MAX_LISTED_PROBLEMS + 2
    assert len(error.problems) == 1000


@pytest.mark.parametrize("name", ESCAPES)
def test_the_command_shows_controls_escaped(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    raw, shown = ESCAPES[name]
    print_error(raw)
    print_note(raw)
    print_result(raw)
    print_table(["name"], [(raw,)], title=raw)
    captured = capsys.readouterr()
    assert captured.err.count(shown) == 2
    assert captured.out.count(shown) == 3
    assert raw not in captured.out + captured.err


@pytest.mark.parametrize("name", ESCAPES)
def test_json_is_the_same_with_controls_escaped(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, _ = ESCAPES[name]
    print_json({raw: [raw, "é 中"]})
    out = capsys.readouterr().out
    assert raw not in out
    assert "é 中" in out
    assert json.loads(out) == {raw: [raw, "é 中"]}


def test_text_of_every_script_is_left_alone() -> None:
    text = "Grüße, 日本語, עברית, 👩‍👩‍👧, a\u200db"
    assert escape_unprintable(text) == text
    assert escape_unprintable("a\n\tb", lines=True) == "a\n\tb"


def test_names_that_a_message_lists_are_not_listed_again() -> None:
    names = ["loss", "accuracy"]
    assert suggest_name("x", names) == "choose one of accuracy, loss"
    assert suggest_name("x", names, listed=True) == "choose one of them"
    assert suggest_name("los", names, listed=True) == "did you mean loss?"
    with pytest.raises(ConfigError) as caught:
        read_config(overrides=["model.positions=x"])
    assert str(caught.value).count("rotary") == 1
