"""Rows of CSV files with lines that cannot be used, before, between and inside rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.data.tabular_files import TableRow, read_csv_rows, read_tsv_rows
from dragoman.data.text_lines import BadLine

PATH = Path("pairs.csv")


def bad(number: int, kind: str = "invalid") -> BadLine:
    return BadLine(PATH, number, kind, "must be UTF-8", "byte 0xff", "convert it")


@pytest.mark.parametrize("read", [read_csv_rows, read_tsv_rows])
@pytest.mark.parametrize("kind", ["invalid", "overlong"])
def test_rows_after_a_bad_first_line_are_read(read, kind):
    """CSV files ended at a bad first line; TSV files did not."""
    cell = {read_csv_rows: "a,b", read_tsv_rows: "a\tb"}[read]
    rows = list(read(PATH, iter([bad(1, kind), bad(2, kind), cell, cell])))
    assert rows == [
        bad(1, kind),
        bad(2, kind),
        TableRow(3, ["a", "b"]),
        TableRow(4, ["a", "b"]),
    ]


def test_a_delimiter_is_that_of_the_first_line_that_can_be_used():
    assert list(read_csv_rows(PATH, iter([bad(1), "a;b"]))) == [bad(1), TableRow(2, ["a", "b"])]


def test_a_row_with_a_bad_line_inside_is_bad_as_a_whole():
    """It was kept without the line, so that training read a truncated text."""
    lines = ["src,tgt", '"one', bad(3), 'two",eins zwei', "three,drei"]
    rows = list(read_csv_rows(PATH, iter(lines)))
    assert rows == [
        TableRow(1, ["src", "tgt"]),
        bad(2)._replace(found="byte 0xff (by line 3)"),
        TableRow(5, ["three", "drei"]),
    ]


def test_a_row_begins_after_the_bad_lines_before_it():
    rows = list(read_csv_rows(PATH, iter(["a,b", bad(2), bad(3), '"c\n', 'd",e', "f,g"])))
    assert [row.number for row in rows] == [1, 2, 3, 4, 6]
    assert rows[3] == TableRow(4, ["c\n\nd", "e"])


def test_bad_lines_at_the_end_are_yielded():
    assert list(read_csv_rows(PATH, iter(["a,b", bad(2)]))) == [TableRow(1, ["a", "b"]), bad(2)]
    assert list(read_csv_rows(PATH, iter([bad(1)]))) == [bad(1)]
    assert list(read_csv_rows(PATH, iter([]))) == []


def test_a_quote_that_does_not_end_is_reported_once():
    rows = list(read_csv_rows(PATH, iter(["a,b", '"c,d', bad(3), "e,f"])))
    assert [(type(row), row.number) for row in rows] == [(TableRow, 1), (BadLine, 2)]
    assert rows[1].kind == "broken"
    assert rows[1].found.endswith("(by line 4)")


def test_carriage_returns_are_named():
    """Lines of old Macintosh programs end in CR: the file is one line."""
    [row] = read_csv_rows(Path("x.csv"), iter(["text,label\rgood,1\r"]))
    assert isinstance(row, BadLine)
    found = "x.csv line 1 must end in LF or CRLF; found a carriage return (CR) inside; convert the"
    assert str(row.error()).startswith(found)
    assert row.fix.endswith(r"tr '\r' '\n' < x.csv > x.lf.csv")
