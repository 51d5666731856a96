"""Records of labelled data: JSONL, CSV, TSV, CoNLL, CoNLL-U and plain text, read as a stream."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config.root_config import Config
from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.data.compressed_input_streams import FileStream
from dragoman.data.tabular_files import ROW_READERS, TableRow
from dragoman.data.text_lines import BadLine, read_line_blocks
from dragoman.errors import DataError, suggest_name
from dragoman.registry import import_object

TEXT = "text"  # field of a line of plain text
_TEXT_NAMES = ("text", "sentence", "document", "content", "review", "question", "body", "input")
_LABEL_NAMES = ("label", "labels", "class", "category", "target", "coarse", "sentiment", "tag")
# Usual names of the fields of a pair of sentences, and of the tokens and tags of a sentence.
PAIR_LABEL_NAMES = ("label", "gold_label", "entailment_label", "entailment_judgment", "class")
SCORE_NAMES = ("relatedness", "score", "relatedness_score", "similarity")
FIRST_NAMES = ("a", "sentence1", "sentence_a", "premise", "text_a", "first")
SECOND_NAMES = ("b", "sentence2", "sentence_b", "hypothesis", "text_b", "second")
TOKEN_NAMES = ("tokens", "words", "form", "forms", "token", "word")
TAG_NAMES = ("tags", "ner_tags", "labels", "ner", "chunks", "upos", "tag", "pos_tags", "pos")
TOKEN_FORMATS = (".conll", ".conllu", ".iob", ".bio", ".jsonl", ".ndjson", ".json")
MAX_RECORD_BYTES = 64 << 20  # of a JSONL line, such as a book
MAX_NAMED_LINES = 5  # of the bad lines that were left out


class Record(NamedTuple):
    """One example of a file: its first line's number and its fields by name."""

    file: Path
    number: int
    fields: Mapping[str, Any]

    def error(self, must: str, found: object, fix: str) -> DataError:
        """Return the error of a bad record, with its file and line."""
        return DataError(f"{self.file} line {self.number} {must}", found=f"{found!s:.120}", fix=fix)

    def value(self, field: str) -> Any:
        """Return a field's value; raise DataError if the record has no such field."""
        if field not in self.fields:
            names = [str(name) for name in self.fields]
            close = difflib.get_close_matches(field, names, n=1)
            raise self.error(
                f"must have a field {field!r}",
                ", ".join(names[:8]) or "no fields",
                f"did you mean {close[0]}?" if close else "name the field that holds it",
            )
        return self.fields[field]

    def text(self, field: str) -> str:
        """Return a field's text; raise DataError if it is not text."""
        value = self.value(field)
        if not isinstance(value, str):
            raise self.error(
                f"must have text in {field!r}",
                json.dumps(value, ensure_ascii=False),
                "write it as a JSON string",
            )
        return value

    def label(self, field: str) -> str:
        """Return a field's label, number or boolean as text; raise DataError if it is none."""
        value = self.value(field)
        if not _is_label(value):
            raise self.error(
                f"must have a label or a number in {field!r}",
                json.dumps(value, ensure_ascii=False),
                "write one label or number",
            )
        return _label_text(value)

    def score(self, field: str) -> float:
        """Return a field's number; raise DataError if it is none, or not finite."""
        try:
            score = float(self.label(field))
        except (ValueError, OverflowError):
            score = math.nan
        if not math.isfinite(score):
            raise self.error(
                f"must have a number in {field!r}", repr(self.value(field)), "correct it"
            )
        return score

    def labels(self, field: str) -> list[str]:
        """Return a field's list of labels, as `label` reads each; one label is a list of one."""
        value = self.value(field)
        labels = value if isinstance(value, list) else [value]
        if not all(map(_is_label, labels)):
            raise self.error(
                f"must have a label or a list of labels in {field!r}",
                json.dumps(value, ensure_ascii=False),
                'write "one" or ["one", "two"]',
            )
        return [_label_text(each) for each in labels]

    def tokens(self, field: str) -> list[str]:
        """Return a field's list of tokens; raise DataError for a text, which is not split."""
        value = self.value(field)
        if isinstance(value, list) and all(map(_is_text, value)):
            return [str(each) for each in value]
        raise self.error(
            f"must have a list of tokens in {field!r}",
            json.dumps(value, ensure_ascii=False),
            'write ["one", "two"]',
        )


def _is_text(value: object) -> bool:
    """Whether a JSON value is a text, or a number that stands for one."""
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _is_label(value: object) -> bool:
    """Whether a JSON value is a label: a text, a number or a boolean, but not NaN."""
    return isinstance(value, (str, int, float)) and value == value


def _label_text(value: object) -> str:
    """Return a label as text; booleans are written as in JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_records(
    files: Sequence[Path | str],
    *,
    fields: Collection[str] = (),
    max_line_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Record]:
    """Yield the records of files in order; the reader is chosen by the end of the file's name.

    .jsonl and .ndjson: an object per line. .csv and .tsv: columns named by the first row, if it has
    a usual name or one of `fields`, or by their numbers from "1". .conll and .conllu: a sentence
    per record. Others: a line of text per record, field "text".
    """
    for record in read_rows(files, fields=fields, max_line_bytes=max_line_bytes):
        if isinstance(record, BadLine):
            raise record.error()
        yield record


def read_rows(
    files: Sequence[Path | str],
    *,
    fields: Collection[str] = (),
    max_line_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[Record | BadLine]:
    """Yield the records of files, and a BadLine for each that cannot be read."""
    for name in files:
        path = Path(name)
        yield from _reader(path, fields)(path, _lines(path, max_line_bytes))


def record_format(path: Path) -> str:
    """Return the end of a file's name that decides its format, without compression: ".jsonl"."""
    suffixes = [each.lower() for each in path.suffixes if each.lower() not in (".gz", ".xz")]
    return suffixes[-1] if suffixes else ""


class RecordFiles:
    """Files whose records are read from the start at each call, by the settings."""

    def __init__(self, config: Config, files: Sequence[Path | str]) -> None:
        self._config, self._files = config, files
        self._bad: set[tuple[Path, int]] = set()

    def __call__(self) -> Iterator[Record]:
        """Yield the records; raise DataError at a bad line, or leave it out and remember it."""
        for record in read_rows(self._files, fields=self._config.record_fields):
            if isinstance(record, Record):
                yield record
            elif self._config.data.on_bad_line != "skip":
                raise record.error(training=True)
            else:
                self._bad.add((record.file, record.number))

    @property
    def skipped(self) -> dict[str, int]:
        """The number of bad lines that were left out, with the first ones as the reason."""
        if not self._bad:
            return {}
        first = sorted((str(file), number) for file, number in self._bad)[:MAX_NAMED_LINES]
        named = ", ".join(f"{Path(file).name} {number}" for file, number in first)
        more = " …" if len(self._bad) > len(first) else ""
        lines = "bad line" if len(self._bad) == 1 else "bad lines"
        return {f"{lines} ({named}{more})": len(self._bad)}


def open_records(config: Config, files: Sequence[Path | str]) -> RecordFiles:
    """Return a function that reads the records of files from the start, by the settings."""
    return RecordFiles(config, files)


def find_field(
    record: Record,
    wanted: str,
    usual: Sequence[str] = _TEXT_NAMES,
    *,
    setting: str,
    used: Sequence[str] = (),
) -> str:
    """Return the field that `wanted` names (a name, or a column's number), or the usual one.

    `setting` is named in the error: a setting such as data.text_field, or an option such as
    --text-field. Fields that are `used` for something else are not suggested.
    """
    names = [str(name) for name in record.fields]
    if wanted in record.fields:
        return wanted
    # Whether numbers are names of other columns than in their places, as in CoNLL files.
    has_numbers = any(name.isdecimal() and str(at) != name for at, name in enumerate(names, 1))
    if wanted.isdecimal() and 1 <= int(wanted) <= len(names) and not has_numbers:
        return names[int(wanted) - 1]
    found = _describe_fields(record)
    if wanted:
        raise DataError(
            f"{record.file} line {record.number} must have the field {wanted!r} of {setting}",
            found=found,
            fix=suggest_name(wanted, names) if names else "check the file",
        )
    lower = {name.lower(): name for name in reversed(names)}
    for choice in usual:
        if choice in lower:
            return lower[choice]
    taken = [value for name, value in record.fields.items() if str(name).lower() in used]
    free = [  # a column of a CoNLL file has a number besides its name
        name
        for name in names
        if name not in used
        and name.lower() not in used
        and not any(record.fields.get(name) is value for value in taken)
    ]
    if not free:
        role = setting.rpartition(".")[2].lstrip("-").replace("_", " ").replace("-", " ")
        raise DataError(
            f"{record.file} must have a {role}, such as {usual[0] if usual else 'NAME'!r}",
            found=f"only {found}" if names else found,
            fix="add it to every record, or check that this is the right file",
        )
    header = f"call it {usual[0]} in the first row; without such a row, "
    raise DataError(
        f"the field of {setting} must be known in {record.file}",
        found=found,
        fix=f"{header if _is_numbered(record) and usual else ''}name it: "
        f"{_write_setting(setting, free[0])}",
    )


def _is_numbered(record: Record) -> bool:
    """Whether the columns of a record have numbers in place of names."""
    return bool(record.fields) and list(record.fields) == [
        str(number) for number in range(1, len(record.fields) + 1)
    ]


def _describe_fields(record: Record) -> str:
    """Return the names of a record's fields, or the values of numbered columns."""
    if not _is_numbered(record):
        return ", ".join(map(str, [*record.fields][:8])) or "no fields"
    values = ", ".join(f"{value!s:.30}" for value in [*record.fields.values()][:8])
    return f"columns without names, with {values} in line {record.number}"


def _write_setting(setting: str, value: str) -> str:
    """Return how a setting or an option is given in a command."""
    return f"{setting} {value}" if setting.startswith("--") else f"--set {setting}={value}"


def find_text_field(record: Record, wanted: str, *, setting: str = "data.text_field") -> str:
    """Return the field with the text, as `setting` names it or by its usual names."""
    return find_field(record, wanted, _TEXT_NAMES, setting=setting, used=_LABEL_NAMES)


def find_pair_fields(
    record: Record,
    first: str,
    second: str,
    *,
    settings: tuple[str, str] = ("pairs.first_field", "pairs.second_field"),
) -> tuple[str, str]:
    """Return the fields with the two sentences of a pair, as named or by their usual names."""
    names = {str(name).lower(): str(name) for name in record.fields}
    one, other = (
        find_field(record, wanted, usual, setting=setting) if wanted or names.keys() & usual else ""
        for wanted, usual, setting in zip(
            (first, second), (FIRST_NAMES, SECOND_NAMES), settings, strict=True
        )
    )
    if one and other:
        return one, other
    free = [name for key, name in names.items() if key not in _LABEL_NAMES]
    free = [name for name in free if name not in (one, other)]
    example = [each or (free.pop(0) if free else "") for each in (one, other)]
    raise DataError(
        f"the fields of both sentences must be known in {record.file}",
        found=_describe_fields(record),
        fix=f"name them: {_write_setting(settings[0], example[0])} "
        f"{_write_setting(settings[1], example[1])}"
        if all(example)
        else "give each record two sentences, such as a and b",
    )


class PairFields(NamedTuple):
    """The fields of a pair; None for a target that the file does not have."""

    first: str
    second: str
    label: str | None
    score: str | None


class PairFieldFinder:
    """Finds the fields of pairs, as named or by their usual names, in the first one of a file.

    `settings` are named in errors: of the two sentences, the label and the score.
    """

    def __init__(
        self,
        pairs: PairsConfig,
        *,
        settings: tuple[str, str, str, str] = (
            "pairs.first_field",
            "pairs.second_field",
            "pairs.label_field",
            "pairs.score_field",
        ),
    ) -> None:
        self._pairs, self._settings = pairs, settings
        self._found: dict[Path, tuple[Record, PairFields]] = {}

    def __call__(self, record: Record) -> PairFields:
        """Return the fields; raise DataError for a target that the file's first pair has not."""
        pairs = self._pairs
        if record.file not in self._found:
            sides = find_pair_fields(
                record, pairs.first_field, pairs.second_field, settings=self._settings[:2]
            )
            self._found[record.file] = record, PairFields(*sides, *self._targets(record))
        first, fields = self._found[record.file]
        known = fields.label, fields.score
        if record is not first and None in known:
            for name, later in zip(known, self._targets(record), strict=True):
                if name is None and later is not None:
                    raise first.error(
                        f"must have a field {later!r}, as line {record.number}",
                        ", ".join(map(str, first.fields)),
                        "add it, or remove the line",
                    )
        return fields

    def _targets(self, record: Record) -> tuple[str | None, str | None]:
        """Return the fields of the label and the score."""
        pairs, (label, score) = self._pairs, self._settings[2:]
        return (
            _find_optional(record, pairs.label_field, PAIR_LABEL_NAMES, setting=label),
            _find_optional(record, pairs.score_field, SCORE_NAMES, setting=score),
        )


def _find_optional(
    record: Record, wanted: str, usual: Sequence[str], *, setting: str
) -> str | None:
    """Return the field that `wanted` names or the usual one; None if the record has neither."""
    if not wanted and not {str(name).lower() for name in record.fields} & set(usual):
        return None
    if wanted and wanted not in record.fields and not wanted.isdecimal():
        return None
    return find_field(record, wanted, usual, setting=setting)


def find_label_field(
    record: Record,
    wanted: str,
    *,
    setting: str = "data.label_field",
    used: Sequence[str] = _TEXT_NAMES,
) -> str:
    """Return the field with the label, as `setting` names it or by its usual names."""
    return find_field(record, wanted, _LABEL_NAMES, setting=setting, used=used)


def _lines(path: Path, max_line_bytes: int) -> Iterator[str | BadLine]:
    return itertools.chain.from_iterable(read_line_blocks(FileStream(path), max_line_bytes))


RecordReader = Callable[[Path, Iterator[str | BadLine]], Iterator[Record | BadLine]]


def _reader(path: Path, fields: Collection[str]) -> RecordReader:
    """Return the reader of a file's format; `fields` are names that a header may have."""
    format_ = record_format(path)
    if format_ in (".conll", ".conllu", ".iob", ".bio"):
        name = "read_conllu" if format_ == ".conllu" else "read_conll"
        reader: RecordReader = import_object(f"dragoman.data.conll_reader:{name}")
        return reader
    if format_ in (".jsonl", ".ndjson", ".json"):
        return _read_jsonl
    if format_ in ROW_READERS:
        return functools.partial(_read_table, fields=fields)
    return _read_text


def _read_text(path: Path, lines: Iterator[str | BadLine]) -> Iterator[Record | BadLine]:
    """Yield lines of plain text, empty ones included."""
    for number, line in enumerate(lines, 1):
        yield line if isinstance(line, BadLine) else Record(path, number, {TEXT: line})


def _read_jsonl(path: Path, lines: Iterator[str | BadLine]) -> Iterator[Record | BadLine]:
    """Yield JSON objects; empty lines are left out."""
    for row in ROW_READERS[".jsonl"](path, lines):
        if isinstance(row, BadLine):
            is_other = row.must == "must be a JSON object"
            yield row._replace(fix="write one JSON object per line") if is_other else row
        elif isinstance(row.values, Mapping):
            yield Record(path, row.number, row.values)


def _read_table(
    path: Path, lines: Iterator[str | BadLine], *, fields: Collection[str]
) -> Iterator[Record | BadLine]:
    """Yield rows with the columns that the first row names.

    A first row without a usual name or one of `fields` is data, and its columns are numbered from
    "1".
    """
    names: list[str] = []
    for row in ROW_READERS[record_format(path)](path, lines):
        if isinstance(row, BadLine):
            yield row
            continue
        values = [str(value) for value in row.values]
        if not names:
            if values in ([], [""]):
                continue
            _check_header(path, row.number, values)
            is_header = _is_header(values, fields)
            names = (  # a column without a name, such as the index of a data frame, has its number
                [value.strip() or str(number) for number, value in enumerate(values, 1)]
                if is_header
                else [str(number) for number in range(1, len(values) + 1)]
            )
            if is_header:
                continue
        if values in ([], [""]):
            continue
        if len(values) != len(names):
            yield _wrong_width(path, row, len(names))
            continue
        yield Record(path, row.number, dict(zip(names, values, strict=True)))


def _is_header(values: Sequence[str], fields: Collection[str]) -> bool:
    """Whether a first row names the columns: distinct names, one usual or one of `fields`.

    One column may have no name if two others are usual ones. Of the names of sentence pairs, such
    as "first", both are needed.
    """
    names = [value.strip().lower() for value in values]
    known = {*_TEXT_NAMES, *_LABEL_NAMES, "a", "b", "sentence1", "sentence2", "premise", "id"}
    known |= {field.lower() for field in fields if not field.isdecimal()}  # no column's number
    is_pair = not {*FIRST_NAMES}.isdisjoint(names) and not {*SECOND_NAMES}.isdisjoint(names)
    is_known = is_pair or not known.isdisjoint(names)
    if "" in names:
        is_known = is_pair or len(known.intersection(names)) > 1
    return len(set(names)) == len(names) and is_known


def _check_header(path: Path, number: int, values: Sequence[str]) -> None:
    """Raise DataError for a first row with the usual name of a text or a label twice."""
    names = [value.strip().lower() for value in values]
    for name in (*_TEXT_NAMES, *_LABEL_NAMES):
        if names.count(name) > 1:
            raise DataError(
                f"{path} line {number} must name each column once",
                found=f"column {name} {'twice' if names.count(name) == 2 else 'several times'}",
                fix="rename all but one of them",
            )


def _wrong_width(path: Path, row: TableRow, width: int) -> BadLine:
    return BadLine(
        path,
        row.number,
        "broken",
        f"must have {width} columns, as the first row",
        str(len(row.values)),
        "repair the row",
    )
