"""Checks of labelled files before training: labels, duplicates, contradictions, leakage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dragoman.data.corpus_checks import overlap_key
from dragoman.data.line_reader import BadLine
from dragoman.data.records import Record, find_label_field, find_text_field

_RARE = 2  # a label with fewer examples cannot be both learned and validated


class LabelledText(NamedTuple):
    """One example: its line, with the file where there are several, its text and its labels."""

    line: int | str
    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LabelFinding:
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
class LabelReport:
    """The labels of a file with their counts, and the findings."""

    examples: int
    labels: dict[str, int]  # most frequent first
    multi_label: bool  # whether some text has more or fewer labels than one
    mean_words: float
    findings: list[LabelFinding]


def check_labels(
    records: Iterable[Record | BadLine],
    *,
    held_out: Iterable[Record] = (),
    text_field: str = "",
    label_field: str = "",
    progress: Callable[[int], None] | None = None,
) -> LabelReport:
    """Check the records of a labelled file; overlap is checked with `held_out` records.

    Two texts are equal if their letters and digits are, whatever their case.
    """
    held_out_keys = {
        hash(overlap_key(each.text))
        for each in read_examples(held_out, text_field=text_field, label_field=label_field)
    }
    examples = 0
    words = 0
    counts: Counter[str] = Counter()
    sizes: Counter[int] = Counter()  # labels per text
    lines: dict[str, list[int | str]] = {name: [] for name in _CHECKS}
    first_seen: dict[int, tuple[str, ...]] = {}  # labels of each text, by the hash of its letters
    label_lines: dict[str, list[int | str]] = {}
    for example in read_examples(
        records, text_field=text_field, label_field=label_field, bad=lines["broken"]
    ):
        examples += 1
        if progress is not None and not examples % 10_000:
            progress(examples)
        counts.update(example.labels)
        sizes[len(example.labels)] += 1
        for label in example.labels:
            if counts[label] <= _RARE:
                label_lines.setdefault(label, []).append(example.line)
        words += len(example.text.split())
        if not example.text.strip():
            lines["empty"].append(example.line)
            continue
        if not all(label.strip() for label in example.labels):
            lines["no-label"].append(example.line)
        # A text of punctuation alone has no letters to compare.
        key = hash(overlap_key(example.text) or example.text)
        known = first_seen.setdefault(key, example.labels)
        if known is not example.labels:
            same = set(known) == set(example.labels)
            lines["duplicate" if same else "contradiction"].append(example.line)
        if key in held_out_keys:
            lines["leak"].append(example.line)
    if progress is not None:
        progress(examples)
    multi_label = any(size != 1 for size in sizes)
    for label, where in label_lines.items():
        if counts[label] < _RARE:
            lines["rare-label"] += where
    lines["rare-label"].sort(key=lambda line: (isinstance(line, str), line))
    findings = [
        LabelFinding(check, code, len(lines[code]), lines[code], advice if lines[code] else "")
        for code, (check, advice) in _CHECKS.items()
        if code != "leak" or held_out_keys
    ]
    return LabelReport(
        examples,
        dict(sorted(counts.items(), key=lambda each: (-each[1], each[0]))),
        multi_label,
        words / examples if examples else 0.0,
        findings,
    )


_CHECKS = {
    "broken": (
        "broken rows",
        "repair their columns, quotes, JSON or encoding; data.on_bad_line=skip leaves them out",
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
    "leak": (
        "texts of the held-out file",
        "remove them from one of the files: they were seen before the test",
    ),
}


def read_examples(
    records: Iterable[Record | BadLine],
    *,
    text_field: str = "",
    label_field: str = "",
    bad: list[int | str] | None = None,
) -> Iterator[LabelledText]:
    """Yield the text and the labels of each record; fields are found in a file's first record.

    A line of another file than the first is given with the file's name. The lines of rows that
    cannot be read are appended to `bad`.
    """
    names: dict[Path, tuple[str, str]] = {}
    first: Path | None = None

    def line_of(row: Record | BadLine) -> int | str:
        return row.number if row.file == first else f"{row.file.name}:{row.number}"

    for record in records:
        first = first or record.file
        if not isinstance(record, Record):
            if bad is None:
                raise record.error()
            bad.append(line_of(record))
            continue
        if record.file not in names:
            names[record.file] = (
                find_text_field(record, text_field),
                find_label_field(record, label_field),
            )
        text_name, label_name = names[record.file]
        yield LabelledText(line_of(record), record.text(text_name), tuple(record.texts(label_name)))
