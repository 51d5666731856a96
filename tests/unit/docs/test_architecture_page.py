"""Files and names in the table "Where is what" exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
TABLE = PAGE.split("## Where is what")[1].split("\n## ")[0]
ROWS = [row for row in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TABLE, re.M) if "`" in row[1]]


@pytest.mark.parametrize(("what", "answer"), ROWS)
def test_files_and_names_of_the_table_exist(what: str, answer: str) -> None:
    spans, folder, text = re.findall(r"`([^`]+)`", answer), ROOT / "dragoman", ""
    assert spans, what
    for span in spans:
        if span.endswith("/"):
            folder = folder / span
        elif span.endswith(".py"):
            text = (folder / span).read_text()
        else:
            name = span.split(".")[-1]
            assert re.search(rf"^\s*(def|class) {name}\b", text, re.M), (what, span)


def test_the_table_has_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("page", ["architecture.md", "design.md"])
def test_every_python_file_named_on_a_page_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert named
    for path in sorted(named):
        assert (ROOT / "dragoman" / path).is_file() or (ROOT / path).is_file(), path
