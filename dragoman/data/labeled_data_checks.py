"""Checks of a task's files before training: labels, duplicates, contradictions, leakage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dragoman.data.corpus_checks import overlap_key
from dragoman.data.labeled_records import (
    TAG_NAMES,
    TOKEN_NAMES,
    Record,
    find_field,
    find_label_field,
    find_pair_fields,
    find_text_field,
)
from dragoman.data.text_lines import BadLine
from dragoman.errors import DataError

TEXT_OPTION, LABEL_OPTION = "--text-field", "--label-field"  # of dragoman data check
_RARE = 2  # a label with fewer examples cannot be both learned and validated
_MIN_LABELS = 2  # of a file; one where a text has any number of them


class LabeledText(NamedTuple):
    """One example: its line, with the file where there are several, its text and its labels."""

    line: int | str
    text: str
    labels: tuple[str, ...]
    target: object  # what is compared between equal texts: a set of labels, or a tag sequence
    is_multi_label: bool = False  # whether the labels are a list, of any length


class FieldNames(NamedTuple):
    """Names of the columns, as given; empty ones are found by their usual names."""

    text: str = ""
    label: str = ""
    second: str = ""  # of a sentence pair


class RecordExample(NamedTuple):
    """The text and the labels of a record."""

    text: str
    labels: tuple[str, ...]
    target: object
    is_multi_label: bool = False


def _read_text(record: Record, names: FieldNames) -> RecordExample:
    """Return a text with its labels, of which the order does not matter."""
    text = find_text_field(record, names.text, setting=TEXT_OPTION)
    field = find_label_field(record, names.label, setting=LABEL_OPTION, used=(text,))
    labels = tuple(record.texts(field))
    is_list = isinstance(record.value(field), list)
    return RecordExample(record.text(text), labels, frozenset(labels), is_list)


def _read_pair(record: Record, names: FieldNames) -> RecordExample:
    """Return two sentences as one text, with their label."""
    first, second = find_pair_fields(
        record, names.text, names.second, settings=(TEXT_OPTION, TEXT_OPTION)
    )
    field = find_label_field(record, names.label, setting=LABEL_OPTION, used=(first, second))
    labels = tuple(record.texts(field))
    return RecordExample(f"{record.text(first)}\t{record.text(second)}", labels, labels)


def _read_tags(record: Record, names: FieldNames) -> RecordExample:
    """Return the tokens of a sentence as one text, with a tag for each."""
    used = [name for name in TAG_NAMES if name not in TOKEN_NAMES]
    field = find_field(record, names.text, TOKEN_NAMES, setting=TEXT_OPTION, used=used)
    tokens = record.tokens(field)
    tags = record.texts(
        find_field(record, names.label, TAG_NAMES, setting=LABEL_OPTION, used=(field,))
    )
    if "" in tokens:
        raise record.error("must have no empty token", f"{tokens!r}", "remove it and its tag")
    if len(tokens) != len(tags):
        raise record.error(
            "must have a tag for each token",
            f"{len(tokens)} tokens and {len(tags)} tags",
            "repair the line",
        )
    return RecordExample(" ".join(tokens), tuple(tags), tuple(tags))


def _read_language(record: Record, names: FieldNames) -> RecordExample:
    """Return a text without labels."""
    return RecordExample(
        record.text(find_text_field(record, names.text, setting=TEXT_OPTION)), (), ()
    )


def _read_set(record: Record, names: FieldNames) -> RecordExample:
    """Return the elements of a set as one text, in order, with the target of the set."""
    targets = ("target", "label")
    field = find_field(record, names.text, ("set",), setting=TEXT_OPTION, used=targets)
    elements = record.value(field)
    if not isinstance(elements, list):
        raise record.error("must have a list in the field of the set", elements, "write [1, 2]")
    if not _are_numbers(elements):
        raise record.error(
            "must have finite numbers, or equally long lists of them", elements, "write [1, 2]"
        )
    target = find_field(record, names.label, targets, setting=LABEL_OPTION, used=(field,))
    return RecordExample(" ".join(sorted(map(repr, elements))), (), record.label(target))


def _are_numbers(elements: list[object]) -> bool:
    """Whether elements are numbers that float32 has, or equally long lists of them."""
    try:
        array = np.array(elements)
    except ValueError:  # lists of different lengths
        return False
    return array.dtype.kind in "if" and bool((np.abs(array) <= np.finfo(np.float32).max).all())


READERS: dict[str, Callable[[Record, FieldNames], RecordExample]] = {
    "classify": _read_text,
    "pairs": _read_pair,
    "tag": _read_tags,
    "language": _read_language,
    "sets": _read_set,
}
# Checks of tasks that do not have all; lines of a text may be empty, and short ones recur.
_TASK_CHECKS = {
    "language": ("broken", "duplicate", "leak"),
    "sets": ("broken", "empty", "duplicate", "contradiction", "leak"),
    "tag": ("broken", "empty", "no-label", "duplicate", "contradiction", "rare-label", "leak"),
}
_MIN_REPEATED_WORDS = 8  # of a text for a language model that counts as a duplicate


@dataclass(frozen=True, slots=True)
class RecordFinding:
    """The result of a check: number of examples, their lines, and what to do about them."""

    check: str
    code: str
    count: int
    lines: list[int | str]
    advice: str

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.count


@dataclass(frozen=True, slots=True)
class RecordReport:
    """The labels of a file with their counts, and the findings."""

    examples: int
    labels: dict[str, int]  # most frequent first
    multi_label: bool  # whether labels are lists, so that a text has any number of them
    mean_words: float
    findings: list[RecordFinding]


def check_labels(
    records: Iterable[Record | BadLine],
    *,
    held_out: Iterable[Record] = (),
    task: str = "classify",
    text_field: str = "",
    label_field: str = "",
    second_field: str = "",
    progress: Callable[[int], None] | None = None,
) -> RecordReport:
    """Check the records of a task's labelled file; overlap is checked with `held_out` records.

    Two texts are equal if their letters and digits are, whatever their case.
    """
    names = FieldNames(text_field, label_field, second_field)
    held_out_keys = {_text_key(each.text) for each in read_examples(held_out, task, names)}
    examples = 0
    words = 0
    counts: Counter[str] = Counter()
    multi_label = False
    lines: dict[str, list[int | str]] = {name: [] for name in _CHECKS}
    first_seen: dict[int, LabeledText] = {}  # by the hash of a text's letters
    label_lines: dict[str, list[int | str]] = {}
    for example in read_examples(records, task, names, bad=lines["broken"]):
        examples += 1
        if progress is not None and not examples % 10_000:
            progress(examples)
        counts.update(example.labels)
        multi_label |= example.is_multi_label
        if len(counts) < _MIN_LABELS:
            lines["few-labels"].append(example.line)
        for label in example.labels:
            if counts[label] <= _RARE:
                label_lines.setdefault(label, []).append(example.line)
        words += len(example.text.split())
        if not example.text.strip():
            lines["empty"].append(example.line)
            continue
        if not all(label.strip() for label in example.labels):
            lines["no-label"].append(example.line)
        key = _text_key(example.text)
        # Sentences that differ in punctuation have different tags.
        exact = task in ("tag", "sets")
        known = first_seen.setdefault(hash(example.text) if exact else key, example)
        short = task == "language" and len(example.text.split()) < _MIN_REPEATED_WORDS
        if known is not example and not short:
            same = known.target == example.target
            lines["duplicate" if same else "contradiction"].append(example.line)
        if key in held_out_keys and not short:
            lines["leak"].append(example.line)
    if progress is not None:
        progress(examples)
    if len(counts) >= (1 if multi_label else _MIN_LABELS):
        lines["few-labels"].clear()
    for label, where in label_lines.items():
        if counts[label] < _RARE:
            lines["rare-label"] += where
    lines["rare-label"].sort(key=lambda line: (isinstance(line, str), line))
    findings = [
        RecordFinding(check, code, len(lines[code]), lines[code], advice if lines[code] else "")
        for code, (check, advice) in _CHECKS.items()
        if (code != "leak" or held_out_keys) and code in _TASK_CHECKS.get(task, _CHECKS)
    ]
    return RecordReport(
        examples,
        dict(sorted(counts.items(), key=lambda each: (-each[1], each[0]))),
        multi_label,
        words / examples if examples else 0.0,
        findings,
    )


_CHECKS = {
    "broken": (
        "broken rows",
        "repair their columns, quotes, JSON, encoding or values; data.on_bad_line=skip leaves out "
        "what cannot be read",
    ),
    "empty": ("empty texts", "remove them: there is nothing to learn from"),
    "no-label": ("empty labels", "write the label, or remove the line"),
    "duplicate": ("duplicate texts", "remove them, or the model weighs them more than the rest"),
    "contradiction": (
        "texts with two labels",
        "decide which is right: no model can predict both",
    ),
    "rare-label": (
        "labels with one example",
        "add examples, merge the label with another, or check its spelling",
    ),
    "few-labels": (
        "too few labels",
        "check the column of the label, or add texts with others: training needs two, or one where "
        "labels are lists",
    ),
    "leak": (
        "texts of the held-out file",
        "remove them from one of the files: they were seen before the test",
    ),
}


def _text_key(text: str) -> int:
    """Return the hash of a text's letters and digits; the texts of a pair are kept apart.

    A text of punctuation alone has no letters, and is compared as it is.
    """
    parts = [overlap_key(part) for part in text.split("\t")]
    return hash("\t".join(parts) if any(parts) else text)


def read_examples(
    records: Iterable[Record | BadLine],
    task: str,
    names: FieldNames,
    *,
    bad: list[int | str] | None = None,
) -> Iterator[LabeledText]:
    """Yield the text and the labels of each record.

    A line of another file than the first is given with the file's name. The lines of rows that
    cannot be read are appended to `bad`; in the first record of a file they are an error.
    """
    files = set[Path]()
    first: Path | None = None
    bad_lines: dict[Path, BadLine] = {}  # the first of each file

    def line_of(row: Record | BadLine) -> int | str:
        return row.number if row.file == first else f"{row.file.name}:{row.number}"

    for record in records:
        first = first or record.file
        if not isinstance(record, Record):
            if bad is None:
                raise record.error()
            bad.append(line_of(record))
            bad_lines.setdefault(record.file, record)
            continue
        try:
            example = READERS[task](record, names)
        except DataError:
            if record.file in bad_lines and record.file not in files:
                # A file that cannot be read well, such as one in another encoding: that comes
                # before its columns.
                raise bad_lines[record.file].error() from None
            if bad is None or record.file not in files:
                raise
            bad.append(line_of(record))
            continue
        files.add(record.file)
        yield LabeledText(line_of(record), *example)
    if bad_lines and not files:
        raise next(iter(bad_lines.values())).error()
