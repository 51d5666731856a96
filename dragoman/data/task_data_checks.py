"""Checks of a task's files before training: labels, duplicates, contradictions, leakage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.data.corpus_checks import overlap_key
from dragoman.data.labeled_records import (
    TAG_NAMES,
    TOKEN_NAMES,
    PairFieldFinder,
    Record,
    find_field,
    find_label_field,
    find_text_field,
)
from dragoman.data.text_lines import BadLine
from dragoman.data.unordered_set_parser import is_label, parse_number, parse_set
from dragoman.errors import DataError
from dragoman.text.tag_schemes import write_word_tags

TEXT_OPTION, LABEL_OPTION = "--text-field", "--label-field"  # of dragoman data check
_RARE = 2  # a label with fewer examples cannot be both learned and validated
_MAX_CHECKED_SIZE = 1_000_000  # elements of a set, the most that sets.max_size allows
_MIN_SCORE, _MAX_SCORE = PairsConfig().min_score, PairsConfig().max_score
_MIN_LABELS = 2  # of a file; one where a text has any number of them


class LabeledText(NamedTuple):
    """One example: its line, with the file where there are several, its text and its labels."""

    line: int | str
    text: str
    labels: tuple[str, ...]
    target: object  # compared between equal texts: a set of labels, or a tag sequence
    is_multi_label: bool = False  # whether the labels are a list, of any length
    codes: tuple[str, ...] = ()  # findings of the reader


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
    codes: tuple[str, ...] = ()


def _read_text(record: Record, names: FieldNames) -> RecordExample:
    """Return a text with its labels, of which the order does not matter."""
    text = find_text_field(record, names.text, setting=TEXT_OPTION)
    field = find_label_field(record, names.label, setting=LABEL_OPTION, used=(text,))
    labels = tuple(record.labels(field))
    is_list = isinstance(record.value(field), list)
    return RecordExample(record.text(text), labels, frozenset(labels), is_list)


class _PairReader:
    """Reads pairs of sentences, with the targets that the first pair of each file has."""

    def __init__(self) -> None:
        self._finder: PairFieldFinder | None = None

    def __call__(self, record: Record, names: FieldNames) -> RecordExample:
        """Return two sentences as one text, with their label or score."""
        if self._finder is None:
            pairs = PairsConfig(
                first_field=names.text, second_field=names.second, label_field=names.label
            )
            settings = (TEXT_OPTION, TEXT_OPTION, LABEL_OPTION, LABEL_OPTION)
            self._finder = PairFieldFinder(pairs, settings=settings)
        fields = self._finder(record)
        if fields.label is None and fields.score is None:
            find_label_field(  # names the fields that there are
                record, names.label, setting=LABEL_OPTION, used=(fields.first, fields.second)
            )
        labels = () if fields.label is None else (record.label(fields.label),)
        score = None if fields.score is None else record.score(fields.score)
        codes = () if score is None or _MIN_SCORE <= score <= _MAX_SCORE else ("score-range",)
        text = f"{record.text(fields.first)}\t{record.text(fields.second)}"
        return RecordExample(text, labels, labels or score, codes=codes)


class _TagReader:
    """Reads tagged sentences, or texts for word segmentation if the first record is one."""

    def __init__(self) -> None:
        self._is_segmented: bool | None = None

    def __call__(self, record: Record, names: FieldNames) -> RecordExample:
        """Return the tokens of a sentence as one text, with a tag for each."""
        is_segmented = self._is_segmented
        if is_segmented is None:
            is_segmented = _is_segmented(record, names)
        read = _read_segmented if is_segmented else _read_tags
        example = read(record, names)
        self._is_segmented = is_segmented
        return example


def _is_segmented(record: Record, names: FieldNames) -> bool:
    """Whether a record is a text for word segmentation: it has no tokens and no tags.

    Beside tokens, a field that is named and holds a text is one too.
    """
    if names.label:
        return False
    if names.text:
        field = find_field(record, names.text, setting=TEXT_OPTION)
        return isinstance(record.fields[field], str)
    return not {str(name).lower() for name in record.fields} & {*TOKEN_NAMES, *TAG_NAMES}


def _read_segmented(record: Record, names: FieldNames) -> RecordExample:
    """Return the characters of a text as tokens, with BMES tags by the spaces between words."""
    words = record.text(find_text_field(record, names.text, setting=TEXT_OPTION)).split()
    tags = tuple(write_word_tags(words))
    return RecordExample(" ".join("".join(words)), tags, tags)


def _read_tags(record: Record, names: FieldNames) -> RecordExample:
    """Return the tokens of a sentence as one text, with a tag for each."""
    used = [name for name in TAG_NAMES if name not in TOKEN_NAMES]
    field = find_field(record, names.text, TOKEN_NAMES, setting=TEXT_OPTION, used=used)
    tokens = record.tokens(field)
    tags = record.labels(
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


class _SetReader:
    """Reads sets, of which the first decides the width of elements and the kind of targets."""

    def __init__(self) -> None:
        self._width: int | None = None
        self._has_labels: bool | None = None

    def __call__(self, record: Record, names: FieldNames) -> RecordExample:
        """Return the elements of a set as one text, in order, with the target of the set."""
        targets = ("target", "label")
        field = find_field(record, names.text, ("set",), setting=TEXT_OPTION, used=targets)
        name = find_field(record, names.label, targets, setting=LABEL_OPTION, used=(field,))
        elements = record.value(field)
        width, size = self._width, 0
        if elements != []:
            settings = SetsConfig(set_field=field, max_size=_MAX_CHECKED_SIZE)
            array = parse_set(elements, settings, record, images=True, width=width)
            size, width = array.shape
        has_labels = self._has_labels
        if has_labels is None:
            has_labels = is_label(record.value(name))
        target = record.label(name) if has_labels else parse_number(record, name)
        labels = (str(target),) if has_labels else ()
        self._width, self._has_labels = width, has_labels
        text = " ".join(sorted(map(repr, elements)))
        codes = ("large",) if size > SetsConfig().max_size else ()
        return RecordExample(text, labels, target, codes=codes)


READERS: dict[str, Callable[[], Callable[[Record, FieldNames], RecordExample]]] = {
    "classify": lambda: _read_text,
    "pairs": _PairReader,
    "tag": _TagReader,
    "language": lambda: _read_language,
    "sets": _SetReader,
}
"""Constructors of the readers of records, by task."""
_LABEL_CHECKS = ("broken", "empty", "no-label", "duplicate", "contradiction", "rare-label", "leak")
# Lines of a text may be empty, and short ones recur.
_TASK_CHECKS = {
    "classify": (*_LABEL_CHECKS, "few-labels"),
    "pairs": (*_LABEL_CHECKS, "few-labels", "score-range"),
    "tag": _LABEL_CHECKS,
    "language": ("broken", "duplicate", "leak"),
    "sets": (*_LABEL_CHECKS, "few-labels", "large"),
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

    Two texts are equal if their letters and digits are, ignoring case.
    """
    checks = _TASK_CHECKS[task]
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
        for code in example.codes:
            lines[code].append(example.line)
        if len(counts) < _MIN_LABELS and "few-labels" in checks:
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
    has_only_numbers = task in ("pairs", "sets") and not counts
    if has_only_numbers or len(counts) >= (1 if multi_label else _MIN_LABELS):
        lines["few-labels"].clear()
    for label, where in label_lines.items():
        if counts[label] < _RARE:
            lines["rare-label"] += where
    lines["rare-label"].sort(key=lambda line: (isinstance(line, str), line))
    findings = [
        RecordFinding(check, code, len(lines[code]), lines[code], advice if lines[code] else "")
        for code, (check, advice) in _CHECKS.items()
        if (code != "leak" or held_out_keys) and code in checks
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
    "large": (
        "sets above sets.max_size",
        f"split them, or raise sets.max_size, {SetsConfig().max_size:,} by default",
    ),
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
    "score-range": (
        "scores out of range",
        f"correct them, or set pairs.min_score and pairs.max_score, {_MIN_SCORE} and {_MAX_SCORE} "
        "by default",
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
    read = READERS[task]()

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
            example = read(record, names)
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
