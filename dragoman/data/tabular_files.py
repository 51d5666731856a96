"""Rows of TSV, CSV and JSONL files, and the columns of source and target."""

from __future__ import annotations

import csv
import difflib
import functools
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.data.text_lines import BadLine
from dragoman.errors import DataError
from dragoman.text.language_tags_and_script_detection import parse_language, script_of_language

logger = logging.getLogger(__name__)

_SRC_NAMES = ("src", "source", "src_text", "source_text", "source_sentence", "input", "original")
_TGT_NAMES = (
    "tgt",
    "target",
    "tgt_text",
    "target_text",
    "target_sentence",
    "trg",
    "output",
    "translation",
    "translated",
)
# English names of languages, as headers of translation memories have them.
_LANGUAGE_NAMES = {
    "arabic": "ar", "bulgarian": "bg", "catalan": "ca", "chinese": "zh", "croatian": "hr",
    "czech": "cs", "danish": "da", "dutch": "nl", "english": "en", "estonian": "et",
    "finnish": "fi", "french": "fr", "german": "de", "greek": "el", "hebrew": "he", "hindi": "hi",
    "hungarian": "hu", "icelandic": "is", "indonesian": "id", "irish": "ga", "italian": "it",
    "japanese": "ja", "korean": "ko", "latvian": "lv", "lithuanian": "lt", "malay": "ms",
    "norwegian": "no", "persian": "fa", "polish": "pl", "portuguese": "pt", "romanian": "ro",
    "russian": "ru", "serbian": "sr", "slovak": "sk", "slovenian": "sl", "spanish": "es",
    "swahili": "sw", "swedish": "sv", "thai": "th", "turkish": "tr", "ukrainian": "uk",
    "urdu": "ur", "vietnamese": "vi",
}  # fmt: skip


class TableRow(NamedTuple):
    """A record's first line number and its columns: by index in TSV and CSV, by name in JSONL."""

    number: int
    values: Sequence[str] | Mapping[str, Any]


class ColumnSelection(NamedTuple):
    """Column settings of the user; empty if not given."""

    src_field: str = ""
    tgt_field: str = ""
    src_lang: str = ""
    tgt_lang: str = ""


def read_tsv_rows(path: Path, lines: Iterable[str | BadLine]) -> Iterator[TableRow | BadLine]:
    """Yield rows split at tabs; quotes have no meaning in TSV."""
    for number, line in enumerate(lines, 1):
        yield line if isinstance(line, BadLine) else TableRow(number, line.split("\t"))


def read_csv_rows(path: Path, lines: Iterable[str | BadLine]) -> Iterator[TableRow | BadLine]:
    """Yield CSV rows; quoted fields may contain line breaks.

    The delimiter is the comma, or the semicolon if only that splits the first line. A row with a
    bad line inside is bad as a whole.
    """
    fed = start = 0  # lines read, and the first line of the current row
    before: list[BadLine] = []
    inside: list[BadLine] = []

    def feed(numbered: Iterable[tuple[int, str | BadLine]]) -> Iterator[str]:
        nonlocal fed, start
        for fed, line in numbered:
            if isinstance(line, BadLine):
                (inside if start else before).append(line)
            else:
                start = start or fed
                yield line + "\n"

    numbered = enumerate(lines, 1)
    head = []  # the first good line
    for number, line in numbered:
        if isinstance(line, str):
            head.append((number, line))
            break
        yield line
    else:
        return
    reader = csv.reader(
        feed(itertools.chain(head, numbered)),
        delimiter=detect_csv_delimiter(line),
        strict=True,
    )
    while True:
        start, problem, values = 0, "", None
        must = "must be a row of CSV"
        fix = 'write a quote inside a field as ""; close every quote'
        try:
            values = next(reader, None)
        except csv.Error as error:
            problem = f"{error} (by line {fed})"
            if "new-line character" in str(error):
                must, problem = "must end in LF or CRLF", "a carriage return (CR) inside"
                fix = (
                    f"convert the file: tr '\\r' '\\n' < {path.name} > {path.stem}.lf{path.suffix}"
                )
        yield from before
        before.clear()
        if problem:
            yield BadLine(path, start, "broken", must, problem, fix)
        elif inside:
            found = f"{inside[0].found} (by line {inside[0].number})"
            yield inside[0]._replace(number=start, found=found)
        elif values is None:
            return
        else:
            yield TableRow(start, values)
        inside.clear()


def detect_csv_delimiter(first: str) -> str:
    """Return the CSV delimiter: comma, or semicolon if only that splits the first line."""
    if ";" not in first:
        return ","
    for each in (",", ";"):
        try:
            if len(next(csv.reader([first], delimiter=each, strict=True), [])) > 1:
                return each
        except csv.Error:  # a quote that does not end at this delimiter
            continue
    return ","


def read_jsonl_rows(path: Path, lines: Iterable[str | BadLine]) -> Iterator[TableRow | BadLine]:
    """Yield one JSON object per line; `{"translation": {...}}` is unwrapped."""
    for number, line in enumerate(lines, 1):
        if isinstance(line, BadLine):
            yield line
            continue
        if not line.strip():
            yield TableRow(number, [])  # as in a table; {} is an object without fields
            continue
        try:
            value = _DECODER.decode(line)
            if _ESCAPED.search(line):
                _check_strings(value)
        except (ValueError, RecursionError) as error:
            yield BadLine(path, number, "broken", *_describe_json_error(line, error))
            continue
        if isinstance(value, dict) and isinstance(value.get("translation"), dict):
            value = value["translation"]
        if isinstance(value, dict):
            yield TableRow(number, value)
        else:
            yield BadLine(
                path,
                number,
                "broken",
                "must be a JSON object",
                f"{line:.60}",
                'write {"src": "...", "tgt": "..."}',
            )


class _FieldError(ValueError):
    """A valid JSON value that is not one record: what must hold, what was found, what to do."""


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's fields; raise an error for a name that occurs twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in fields if names.count(name) > 1)
        raise _FieldError("must have each field once", f"{twice!r:.60} twice", "keep one of them")
    return fields


def _check_strings(value: Any) -> None:
    """Raise an error for a NUL or a lone surrogate, which JSON can write and a text cannot have."""
    if isinstance(value, dict):
        for name, each in value.items():
            _check_strings(name)
            _check_strings(each)
    elif isinstance(value, list):
        for each in value:
            _check_strings(each)
    elif isinstance(value, str) and (found := _INVALID.search(value)):
        what = "a NUL" if found.group() == "\0" else "a lone surrogate"
        raise _FieldError(
            "must be valid Unicode",
            f"U+{ord(found.group()):04X}, {what}",
            "write the whole character, or remove it",
        )


def _describe_json_error(line: str, error: Exception) -> tuple[str, str, str]:
    """Return what must hold in a line that is not JSON, what was found and what to do."""
    if isinstance(error, _FieldError):
        must, found, fix = error.args
        return must, found, fix
    if isinstance(error, json.JSONDecodeError):
        reason = f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos + 1}"
    else:
        reason = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
    shown = line if len(line) <= 60 else f"{line[:60]}…"
    return "must be a JSON object", f"{shown} ({reason})", "write one object a line"


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_fields)
_ESCAPED = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")  # how a line can have an invalid character
_INVALID = re.compile("[\0\ud800-\udfff]")

ROW_READERS: dict[str, Callable[[Path, Iterable[str | BadLine]], Iterator[TableRow | BadLine]]] = {
    ".tsv": read_tsv_rows,
    ".tab": read_tsv_rows,
    ".csv": read_csv_rows,
    ".jsonl": read_jsonl_rows,
    ".ndjson": read_jsonl_rows,
}
"""How a file with both sides is read, by the end of its name."""


class PairColumns(NamedTuple):
    """The columns of the two sides, and whether the first row is a header."""

    src: int | str
    tgt: int | str
    header: bool
    width: int


def find_columns(path: Path, first: TableRow, wanted: ColumnSelection) -> PairColumns:
    """Return the source and target columns from the first row and the settings."""
    if isinstance(first.values, Mapping):
        names = [str(name) for name in first.values]
        src, tgt = _find_columns_by_name(path, names, wanted)
        return PairColumns(names[src], names[tgt], False, 0)
    width = len(first.values)
    if width < 2:
        fix = (
            "write one pair per line with a tab (.tsv) or a comma (.csv) between, or use --src and "
            "--tgt for two files"
        )
        raise DataError(
            f"{path} line {first.number} must have two columns or more", found=f"{width}", fix=fix
        )
    numbers = [_column_index(path, field, width) for field in (wanted.src_field, wanted.tgt_field)]
    names = [value.strip() for value in first.values]
    header = _looks_like_header(names, wanted) or (
        _are_languages(names) and bool(wanted.src_lang or wanted.tgt_lang)
    )
    if numbers[0] is not None and numbers[0] == numbers[1]:
        raise DataError(
            f"the source's and the target's column of {path} must be two",
            found=f"{wanted.src_field} for both",
            fix="name another for one",
        )
    if numbers[0] is not None and numbers[1] is not None:
        return PairColumns(numbers[0], numbers[1], header, width)
    if not header and not wanted.src_field and not wanted.tgt_field:
        if width > 2:
            _warn_first_two_columns(path, width)
        return PairColumns(0, 1, _are_languages(names), width)
    src, tgt = _find_columns_by_name(path, names, wanted)
    return PairColumns(src, tgt, True, width)


@functools.cache  # a corpus is read several times; warn once
def _warn_first_two_columns(path: Path, width: int) -> None:
    """Warn that the first two of several unnamed columns are used."""
    logger.warning(
        "%s has %d columns without names: using 1 as source and 2 as target; for others, set "
        "data.src_field and data.tgt_field",
        path,
        width,
    )


def _column_index(path: Path, field: str, width: int) -> int | None:
    if not field.isdecimal():
        return None
    if not 1 <= int(field) <= width:
        raise DataError(
            f"a column of {path} must be from 1 to {width}",
            found=field,
            fix="set data.src_field and data.tgt_field",
        )
    return int(field) - 1


def _looks_like_header(names: list[str], wanted: ColumnSelection) -> bool:
    known = {
        *_column_names(wanted.src_lang, _SRC_NAMES),
        *_column_names(wanted.tgt_lang, _TGT_NAMES),
    }
    return sum(name.lower() in known for name in names) >= 2 or bool(
        {wanted.src_field, wanted.tgt_field} & set(names) - {""}
    )


def _are_languages(names: Sequence[str]) -> bool:
    """Whether a row is two different languages, as codes or in English: a header, not a pair."""
    codes = {_language_code(name) for name in names}
    return len(names) == len(codes) == 2 and all(
        len(code) == 2 and script_of_language(code) is not None for code in codes
    )


def _language_code(name: str) -> str:
    """Return the language code of a code or of an English name; empty if it is neither."""
    return _LANGUAGE_NAMES.get(name.lower()) or parse_language(name).language


def _column_names(language: str, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that a column may have, those with the language first."""
    code = language.lower()
    if not code:
        return usual
    called = [name for name, each in _LANGUAGE_NAMES.items() if each == parse_language(code)[0]]
    return (code, *called, f"text_{code}", f"{code}_text", f"sentence_{code}", *usual)


def _find_columns_by_name(path: Path, names: list[str], wanted: ColumnSelection) -> tuple[int, int]:
    """Match column names: given names, languages, common words, then the remaining one of two."""
    found: list[int | None] = []
    for field, language, usual in (
        (wanted.src_field, wanted.src_lang, _SRC_NAMES),
        (wanted.tgt_field, wanted.tgt_lang, _TGT_NAMES),
    ):
        lower = [name.lower() for name in names]
        if field and not field.isdecimal() and field not in names:
            shown = [f"{name:.30}…" if len(name) > 31 else name for name in names[:8]] + ["…"] * (
                len(names) > 8
            )
            close = difflib.get_close_matches(field, names, n=1)
            fix = (
                f"did you mean {close[0]}?"
                if close
                else "name a column by its name in the first row, or by its number, from 1"
            )
            raise DataError(
                f"a column of {path} must be called {field}", found=", ".join(shown), fix=fix
            )
        choices = (field.lower(),) if field else _column_names(language, usual)
        match = next((lower.index(choice) for choice in choices if choice in lower), None)
        found.append(int(field) - 1 if field.isdecimal() else match)
    if len(names) == 2 and found.count(None) == 1:
        known = next(index for index in found if index is not None)
        found = [1 - known if index is None else index for index in found]
    src, tgt = found
    if src is None or tgt is None or src == tgt:
        example = [*names, "", ""][:2]
        raise DataError(
            f"the source's and the target's column of {path} must be known",
            found=", ".join(names) or "no names",
            fix=f"name them: --src-lang {_language_code(example[0])} "
            f"--tgt-lang {_language_code(example[1])}"
            if _are_languages(names) and not wanted.src_field
            else f"name them: --src-field {example[0]} --tgt-field {example[1]}, in training --set "
            f"data.src_field={example[0]} --set data.tgt_field={example[1]}",
        )
    return src, tgt
