"""Readers of CoNLL and CoNLL-U files: one token per line, a blank line after each sentence."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dragoman.data.labeled_records import Record
from dragoman.data.text_lines import BadLine

# Universal Dependencies, version 2. The names are those of our JSONL files.
CONLLU_FIELDS = (
    "ids",
    "tokens",
    "lemmas",
    "upos",
    "xpos",
    "feats",
    "heads",
    "deprels",
    "deps",
    "misc",
)
_WORD_ID = re.compile(r"[1-9][0-9]*")
_RANGE_OR_EMPTY_ID = re.compile(r"[0-9]+-[0-9]+|[0-9]+\.[0-9]+")
_COMMENT = "#"
_DOCUMENT_START = "-DOCSTART-"


def read_conll(path: Path, lines: Iterable[str | BadLine]) -> Iterator[Record | BadLine]:
    """Yield the sentences of a file whose columns are separated by white space.

    Fields are the columns' numbers from "1", and by the customs of the shared tasks "tokens" for
    the first, "tags" for the last and "pos" for the second of three or more. Sentences may be
    separated by -DOCSTART- lines too. Comments, "# …" before a sentence, are left out where they
    have another number of columns, for "#" may be a token. All sentences have as many columns as
    the first. One with a bad line is skipped; the line is reported.
    """
    rows: list[list[str]] = []
    first = 0
    width, first_of_file = 0, 0  # columns of the first sentence, and its line
    skips = False  # the rest of a sentence with a bad line
    for number, line in enumerate(itertools.chain(lines, [""]), 1):
        if isinstance(line, BadLine):
            yield line
            skips = True
            continue
        columns = line.split()
        if columns and columns[0] != _DOCUMENT_START:
            is_other = bool(rows) and len(columns) != len(rows[0])
            if is_other and all(row[0] == _COMMENT for row in rows):
                rows, is_other = [], False
                if columns[0] == _COMMENT:
                    continue
            if is_other:
                must = f"{len(rows[0])} columns, as line {first}, where its sentence begins"
                fix = "repair the line, or end the sentence before it by an empty line"
                yield _bad_columns(path, number, must, len(columns), fix)
                skips = True
            if not rows:
                first = number
            rows.append(columns)
        elif rows or skips:
            is_comment = all(row[0] == _COMMENT for row in rows)
            if not (width or skips or is_comment):
                width, first_of_file = len(rows[0]), first
            if not skips and (not width or len(rows[0]) == width):
                yield Record(path, first, _name_columns(rows))
            elif not skips and not is_comment:
                must = f"{width} columns, as line {first_of_file}"
                yield _bad_columns(path, first, must, len(rows[0]), "add or remove columns")
            rows, skips = [], False


def read_conllu(path: Path, lines: Iterable[str | BadLine]) -> Iterator[Record | BadLine]:
    """Yield the sentences of a CoNLL-U file: its ten columns, and "id" if `# sent_id` gives it.

    Multiword tokens (1-2) and empty nodes (1.1) are left out: the words are the syntactic ones. A
    sentence with a bad line is skipped, and the line is reported.
    """
    rows: list[list[str]] = []
    first, sentence_id = 0, ""
    skips = False
    for number, line in enumerate(itertools.chain(lines, [""]), 1):
        if isinstance(line, BadLine):
            yield line
            skips = True
            continue
        if line.startswith("#") and not rows:
            name, _, value = line[1:].partition("=")
            sentence_id = value.strip() if name.strip() == "sent_id" else sentence_id
            continue
        if line.strip():
            columns = line.split("\t")
            if problem := _conllu_problem(path, number, columns):
                yield problem
                skips = True
            elif _WORD_ID.fullmatch(columns[0]):
                first = first or number
                rows.append(columns)
            continue
        if rows and not skips:
            fields: dict[str, object] = {
                name: list(values)
                for name, values in zip(CONLLU_FIELDS, zip(*rows, strict=True), strict=True)
            }
            yield Record(path, first, {"id": sentence_id, **fields} if sentence_id else fields)
        rows, first, sentence_id, skips = [], 0, "", False


def _name_columns(rows: list[list[str]]) -> dict[str, list[str]]:
    """Return the columns of a sentence by number and by their usual names."""
    columns = [list(values) for values in zip(*rows, strict=True)]
    fields = {"tokens": columns[0]}
    if len(columns) > 1:
        fields["tags"] = columns[-1]
    if len(columns) > 2:
        fields["pos"] = columns[1]
    return fields | {str(number): values for number, values in enumerate(columns, 1)}


def _bad_columns(path: Path, number: int, must: str, found: int, fix: str) -> BadLine:
    return BadLine(path, number, "broken", f"must have {must}", str(found), fix)


def _conllu_problem(path: Path, number: int, columns: list[str]) -> BadLine | None:
    """Return the problem with a line of a token, or None."""
    if len(columns) != len(CONLLU_FIELDS):
        found = f"{len(columns)}"
        must = f"must have {len(CONLLU_FIELDS)} columns separated by tabs"
    elif not (_WORD_ID.fullmatch(columns[0]) or _RANGE_OR_EMPTY_ID.fullmatch(columns[0])):
        found = f"{columns[0]:.40}"
        must = "must have an ID such as 1, 1-2 or 1.1 in column 1"
    elif not all(columns):
        empty = columns.index("")
        found = f"nothing in column {empty + 1}, {CONLLU_FIELDS[empty]}"
        must = "must have a value or _ in every column"
    else:
        return None
    return BadLine(path, number, "broken", must, found, "write the line in CoNLL-U format")
