"""Text in columns of a terminal: characters of several code points are never split."""

from __future__ import annotations

from rich.cells import cell_len

from dragoman.explain.terminal_text_width import (
    fit_cells,
    label_token,
    shorten_cells,
    split_clusters,
    wrap_cells,
)

FAMILY, FLAG = "👨\u200d👩\u200d👧", "🇩🇪"


def test_clusters_are_never_split() -> None:
    assert split_clusters(f"a{FAMILY}{FLAG}e\u0301") == ["a", FAMILY, FLAG, "e\u0301"]
    assert shorten_cells(FAMILY * 5, 5) == FAMILY * 2 + "…"
    assert fit_cells("年月日", 5) == "年月…"
    assert fit_cells("ab", 4, right=True) == "  ab"
    assert wrap_cells("one two three", 7, indent="  ") == ["one two", "  three"]
    assert wrap_cells("年月日年月日", 5) == ["年月", "日年", "月日"]
    assert all(cell_len(line) <= 9 for line in wrap_cells("x" * 40 + " y", 9, indent=" "))


def test_control_characters_are_written_as_their_codes() -> None:
    assert label_token("\u202e") == "<202E>"
