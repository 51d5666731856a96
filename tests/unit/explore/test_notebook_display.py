"""The explorer in a notebook: what may be shown, and what a cell consists of."""

from __future__ import annotations

import html
import re

import pytest
from explorer_kit import StubPredictor, make_explanation

import dragoman
from dragoman.errors import ConfigError
from dragoman.explore.html_export import export_html
from dragoman.explore.notebook_display import (
    MAX_TABLE_ROWS,
    explore,
    render_cell,
    render_table,
    show_spaces,
)


def test_the_package_is_the_function() -> None:
    found = dragoman.explore(StubPredictor(), "ein Mann", beam=2)
    assert found.text == "ein Mann"
    assert found.request["beam"] == 2
    assert dragoman.explore(found) is found
    import dragoman.explore.explorer_session as session  # modules of the package are there

    assert session.ExplorerSession


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((make_explanation("a"), "b"), "shown as it is; found a text"),
        ((StubPredictor(),), "needs a text to explain; found none"),
        ((3, "a"), "found int; pass dragoman.load"),
    ],
)
def test_invalid_arguments_are_one_line(arguments: tuple, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        explore(*arguments)


def test_a_directory_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dragoman.inference.predictors.catalogue.load", lambda path: StubPredictor()
    )
    assert explore("my-model", "ein Mann").text == "ein Mann"


def test_a_cell_is_a_sandboxed_frame_of_the_file() -> None:
    explanation = make_explanation("ein <b>Mann</b> & Hund")
    cell = explanation._repr_html_()
    assert cell == render_cell(explanation)
    [frame] = re.findall(r"<iframe ([^>]*)>", cell)
    assert 'sandbox="allow-scripts"' in frame
    [page] = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(page) == export_html(explanation, title="Dragoman explorer")
    assert "<script" not in cell  # the notebook itself runs nothing


def test_the_table_holds_what_a_frame_would_show() -> None:
    table = render_table(make_explanation("ein <b>Mann</b>"))
    assert "<b>" not in table
    assert "&lt;b&gt;Mann&lt;/b&gt;" in table
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    assert len(rows) == 1 + 3
    cells = re.findall(r"<bdi[^>]*>(.*?)</bdi>|<td>([\d.]+)</td>", rows[1])
    assert [one or other for one, other in cells] == ["EIN", "0.607", "other", "ein"]


def test_a_long_table_is_cut() -> None:
    table = render_table(make_explanation("wort " * 100))
    assert table.count("<tr>") == 1 + MAX_TABLE_ROWS
    assert f"and {101 - MAX_TABLE_ROWS} more" in table


def test_a_space_can_be_seen() -> None:
    assert [show_spaces(token) for token in (" ", " a", "", "  ")] == ["␣", " a", "", "␣␣"]
