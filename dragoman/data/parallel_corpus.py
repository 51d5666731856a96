"""Parallel corpora: sentence pairs streamed from two aligned files or one tabular file."""

from __future__ import annotations

import abc
import bisect
import csv
import io
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config.root_config import DataConfig, file_names
from dragoman.config.translation_directions import Direction, parse_direction
from dragoman.data.compressed_input_streams import DecompressionLimits, FileStream
from dragoman.data.line_shift_detection import Misalignment, find_misalignment, line_features
from dragoman.data.tabular_files import (
    ROW_READERS,
    ColumnSelection,
    PairColumns,
    TableRow,
    detect_csv_delimiter,
    find_columns,
)
from dragoman.data.text_lines import BadLine, read_line_blocks
from dragoman.errors import ConfigError, DataError

_LINE_BREAKS = re.compile(r"[\r\n]+")


class SentencePair(NamedTuple):
    """A source text and its translation, with their line number from 1."""

    number: int
    src: str
    tgt: str
    direction: str = ""  # such as de-en, in a multilingual corpus


class BadPair(NamedTuple):
    """A pair with an unusable side or record."""

    number: int
    line: BadLine


class Corpus(abc.ABC):
    """Sentence pairs, streamed from their files on every iteration."""

    def __init__(
        self,
        *,
        max_line_bytes: int = 65_536,
        on_bad_line: str = "stop",
        limits: DecompressionLimits | None = None,
    ) -> None:
        self.max_line_bytes, self.on_bad_line, self._limits = max_line_bytes, on_bad_line, limits
        self.streams: list[FileStream] = []  # of the last iteration: progress and digests

    @property
    @abc.abstractmethod
    def files(self) -> list[Path]:
        """The files of the corpus."""

    @abc.abstractmethod
    def records(self) -> Iterator[SentencePair | BadPair]:
        """Yield every pair, bad ones included."""

    def describe_line(self, number: int) -> int | str:
        """Return the line of a pair's number, or "12 of b.src" if there are several files."""
        return number

    def part_counts(self) -> list[int]:
        """Return the pairs of each part after a full iteration; empty for a single corpus."""
        return []

    @abc.abstractmethod
    def layout(self) -> dict[str, object]:
        """Return all that decides which pairs are read, besides the files' contents; part of the
        store's key.
        """

    def pairs(self) -> Iterator[SentencePair]:
        """Yield the good pairs; a bad line is an error, or is skipped with `on_bad_line=skip`."""
        for record in self.records():
            if isinstance(record, SentencePair):
                yield record
            elif self.on_bad_line == "stop" and record.line.kind != "overlong":
                raise record.line.error(training=True)

    def src_texts(self) -> Iterator[str]:
        """Yield the source side of the good pairs."""
        return (pair.src for pair in self.pairs())

    def tgt_texts(self) -> Iterator[str]:
        """Yield the target side of the good pairs."""
        return (pair.tgt for pair in self.pairs())

    def fraction_read(self) -> float:
        """Return the fraction of the files read so far, from 0 to 1."""
        total = sum(stream.size for stream in self.streams)
        return sum(stream.position for stream in self.streams) / total if total else 0.0

    def _lines(self, path: Path) -> Iterator[str | BadLine]:
        stream = FileStream(path, self._limits)
        self.streams.append(stream)
        return itertools.chain.from_iterable(read_line_blocks(stream, self.max_line_bytes))


class ParallelFiles(Corpus):
    """Two aligned files; line n of one is the translation of line n of the other."""

    def __init__(
        self,
        src: Path,
        tgt: Path,
        *,
        max_line_bytes: int = 65_536,
        on_bad_line: str = "stop",
        limits: DecompressionLimits | None = None,
    ) -> None:
        super().__init__(max_line_bytes=max_line_bytes, on_bad_line=on_bad_line, limits=limits)
        self.src, self.tgt = Path(src), Path(tgt)

    @property
    def files(self) -> list[Path]:
        """The source file and the target file."""
        return [self.src, self.tgt]

    def layout(self) -> dict[str, object]:
        """Two files, by line."""
        return {"reader": "lines", "packing": [self.src.suffix, self.tgt.suffix]}

    def records(self) -> Iterator[SentencePair | BadPair]:
        """Yield the pairs of both files; different numbers of lines are an error."""
        self.streams = []
        src_lines, tgt_lines = self._lines(self.src), self._lines(self.tgt)
        number = 0
        for number, (src, tgt) in enumerate(itertools.zip_longest(src_lines, tgt_lines), 1):
            if isinstance(src, str) and isinstance(tgt, str):
                yield SentencePair(number, src, tgt)
            elif src is None or tgt is None:
                more = number + sum(1 for _ in (src_lines if tgt is None else tgt_lines))
                counts = (more, number - 1) if tgt is None else (number - 1, more)
                raise LineCountError(self, counts)
            else:
                yield BadPair(number, src if isinstance(src, BadLine) else tgt)  # type: ignore[arg-type]

    def misalignment(self, common: int) -> Misalignment | None:
        """Return the first position where the sides are misaligned, in the lines that both have."""
        lines = zip(
            range(1, common + 1), self._lines(self.src), self._lines(self.tgt), strict=False
        )
        return find_misalignment(
            (number, line_features(src), line_features(tgt))
            for number, src, tgt in lines
            if isinstance(src, str) and isinstance(tgt, str)
        )


class LineCountError(DataError):
    """Two parallel files with different numbers of lines."""

    def __init__(self, corpus: ParallelFiles, counts: tuple[int, int]) -> None:
        self.counts, self.misalignment = counts, corpus.misalignment(min(counts))
        command = f"dragoman data check --src {corpus.src} --tgt {corpus.tgt}"
        super().__init__(
            f"{corpus.src} and {corpus.tgt} must have equally many lines",
            found=f"{counts[0]} and {counts[1]}",
            fix=f"a line may be missing or added near line {self.misalignment.line}; see {command}"
            if self.misalignment
            else f"see {command}",
        )


class TabularCorpus(Corpus):
    """One TSV, CSV or JSONL file with both sides; a line break in a field is read as a space."""

    def __init__(
        self,
        path: Path,
        wanted: ColumnSelection | None = None,
        *,
        max_line_bytes: int = 65_536,
        on_bad_line: str = "stop",
        limits: DecompressionLimits | None = None,
    ) -> None:
        super().__init__(max_line_bytes=max_line_bytes, on_bad_line=on_bad_line, limits=limits)
        self.path, self.wanted = Path(path), wanted or ColumnSelection()
        suffixes = [
            suffix.lower() for suffix in self.path.suffixes if suffix.lower() not in (".gz", ".xz")
        ]
        self.format = suffixes[-1] if suffixes else ""
        self.columns: PairColumns | None = None  # of the last iteration, after its first row
        self.header: list[str] = []  # column names, if the first row has them
        if self.format not in ROW_READERS:
            raise DataError(
                "a file of pairs must be .tsv, .csv or .jsonl, plain or with .gz or .xz appended",
                found=self.path.name,
                fix="rename it if it is one of them, else convert it, or use --src and --tgt for "
                "two files",
            )

    @property
    def files(self) -> list[Path]:
        """The only file."""
        return [self.path]

    def layout(self) -> dict[str, object]:
        """The format and the column settings."""
        return {"reader": self.format, "packing": [self.path.suffix], "columns": list(self.wanted)}

    def records(self) -> Iterator[SentencePair | BadPair]:
        """Yield the rows; a row without both texts is bad."""
        self.streams = []
        columns: PairColumns | None = None
        for row in ROW_READERS[self.format](self.path, self._lines(self.path)):
            if isinstance(row, BadLine):
                yield BadPair(row.number, row)
                continue
            if columns is None:
                if not row.values:
                    continue
                columns = self.columns = find_columns(self.path, row, self.wanted)
                self.header = (
                    [str(name) for name in row.values]
                    if columns.header or isinstance(row.values, Mapping)
                    else []
                )
                if columns.header:
                    continue
            yield self._pair(row, columns)

    def raw_records(self) -> Iterator[tuple[int, str]]:
        """Yield each record's number and its text with all columns, header included.

        Undecodable records are left out. A line of TSV or JSONL is as in the file; a row of CSV is
        written again, quoted where necessary.
        """
        self.streams = []
        lines = self._lines(self.path)
        if self.format != ".csv":
            yield from (
                (number, line) for number, line in enumerate(lines, 1) if isinstance(line, str)
            )
            return
        head = []  # up to the first line that can be used, which decides the delimiter
        for line in lines:
            head.append(line)
            if isinstance(line, str):
                break
        between = detect_csv_delimiter(head[-1]) if head and isinstance(head[-1], str) else ","
        for row in ROW_READERS[self.format](self.path, itertools.chain(head, lines)):
            if isinstance(row, TableRow):
                written = io.StringIO()
                csv.writer(written, delimiter=between, lineterminator="\r\n").writerow(row.values)
                yield row.number, written.getvalue()[:-2]  # fields with line ends are quoted

    def _pair(self, row: TableRow, columns: PairColumns) -> SentencePair | BadPair:
        values = row.values
        if not values or values == [""]:
            return SentencePair(row.number, "", "")
        if isinstance(values, Mapping):
            src, tgt = values.get(str(columns.src)), values.get(str(columns.tgt))
            if not isinstance(src, str) or not isinstance(tgt, str):
                found = f"{columns.src}={src!r:.40} and {columns.tgt}={tgt!r:.40}"
                return self._bad(row, f"must have text in {columns.src} and {columns.tgt}", found)
        else:
            if len(values) != columns.width:
                return self._bad(row, f"must have {columns.width} columns", str(len(values)))
            src, tgt = values[int(columns.src)], values[int(columns.tgt)]
        return SentencePair(row.number, _LINE_BREAKS.sub(" ", src), _LINE_BREAKS.sub(" ", tgt))

    def _bad(self, row: TableRow, must: str, found: str) -> BadPair:
        fix = "repair the row"
        return BadPair(row.number, BadLine(self.path, row.number, "broken", must, found, fix))


class CorpusView(Corpus):
    """A corpus whose pairs are those of another: its files and positions are that one's."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(max_line_bytes=corpus.max_line_bytes, on_bad_line=corpus.on_bad_line)
        self._corpus = corpus

    @property
    def files(self) -> list[Path]:
        """The files of the corpus."""
        return self._corpus.files

    @property
    def streams(self) -> list[FileStream]:
        """The open streams of the corpus."""
        return self._corpus.streams

    @streams.setter
    def streams(self, streams: list[FileStream]) -> None:
        """Ignore the assignment: the corpus itself opens its streams."""

    def describe_line(self, number: int) -> int | str:
        """Return the position of a pair in the corpus."""
        return self._corpus.describe_line(number)

    def fraction_read(self) -> float:
        """Return the fraction of the corpus read so far."""
        return self._corpus.fraction_read()


class DirectedCorpus(CorpusView):
    """A corpus in one of its two directions: the pairs of de-en, or swapped those of en-de."""

    def __init__(self, corpus: Corpus, direction: Direction, *, swapped: bool) -> None:
        super().__init__(corpus)
        self.direction, self._swapped = direction, swapped

    def layout(self) -> dict[str, object]:
        """Return the layout of the corpus, its direction and whether its sides are swapped."""
        return {
            **self._corpus.layout(),
            "direction": [str(self.direction), self._swapped],
        }

    def records(self) -> Iterator[SentencePair | BadPair]:
        """Yield the pairs with their direction."""
        direction = str(self.direction)
        for record in self._corpus.records():
            if isinstance(record, BadPair):
                yield record
            else:
                sides = (record.tgt, record.src) if self._swapped else (record.src, record.tgt)
                yield SentencePair(record.number, *sides, direction)


class ConcatCorpus(Corpus):
    """Several corpora in order; pairs are numbered through."""

    def __init__(self, parts: Sequence[Corpus]) -> None:
        super().__init__(max_line_bytes=parts[0].max_line_bytes, on_bad_line=parts[0].on_bad_line)
        self.parts = list(parts)
        # Of the current iteration: the number before each part's first pair ...
        self._starts: list[int] = []
        self._counts: list[int] = []  # ... and each part's number of pairs, once it is complete

    @property
    def files(self) -> list[Path]:
        """The files of all parts, in order."""
        return [path for part in self.parts for path in part.files]

    @property
    def streams(self) -> list[FileStream]:
        """The streams of all parts; new ones for parts that have not been reached."""
        return [
            stream
            for part in self.parts
            for stream in part.streams or [FileStream(path) for path in part.files]
        ]

    @streams.setter
    def streams(self, streams: list[FileStream]) -> None:
        """Ignore the assignment: the parts have the streams."""

    def layout(self) -> dict[str, object]:
        """The layouts of all parts, in order."""
        return {"reader": "concatenation", "parts": [part.layout() for part in self.parts]}

    def records(self) -> Iterator[SentencePair | BadPair]:
        """Yield the pairs of the parts in order."""
        for part in self.parts:
            part.streams = []
        starts: list[int] = []
        counts: list[int] = []
        self._starts, self._counts = starts, []
        last = 0
        for part in self.parts:
            starts.append(last)
            counts.append(0)
            for record in part.records():
                last = starts[-1] + record.number
                counts[-1] += 1
                yield record._replace(number=last)
        self._counts = counts

    def describe_line(self, number: int) -> int | str:
        """Return the line within its own file, and the file."""
        index = max(0, bisect.bisect_left(self._starts, number) - 1)
        return (
            f"{self.parts[index].describe_line(number - self._starts[index])} of "
            f"{self.parts[index].files[0]}"
        )

    def part_counts(self) -> list[int]:
        """Return the pairs of each part after a full iteration."""
        return self._counts

    def fraction_read(self) -> float:
        """Return the fraction of all files read so far."""
        sizes = [path.stat().st_size for path in self.files]
        return sum(stream.position for stream in self.streams) / max(1, sum(sizes))


def build_corpus(config: DataConfig, part: str) -> Corpus:
    """Return the corpus of a configuration, for `train` or `valid`."""
    if config.directions:
        return build_directed_corpus(config, part)
    parts = build_file_corpora(config, part)
    return parts[0] if len(parts) == 1 else ConcatCorpus(parts)


def build_directed_corpus(
    config: DataConfig, part: str, select: Callable[[Corpus], Corpus] = lambda corpus: corpus
) -> ConcatCorpus:
    """Return the corpus of a multilingual model, one part for each file pair and direction.

    `select` chooses pairs of each file pair, so that both directions have the same.
    """
    languages = config.languages if part == "train" else config.valid_languages
    parts = list[Corpus]()
    # Opened once for each use: a part has its own streams.
    for number in range(len(build_file_corpora(config, part))):
        given = parse_direction(languages[number])
        assert given is not None, "languages were validated with the configuration"
        for direction in (given, given.reverse):
            if str(direction) in config.directions:
                corpus = select(build_file_corpora(config, part)[number])
                parts.append(DirectedCorpus(corpus, direction, swapped=direction != given))
    return ConcatCorpus(parts)


def build_file_corpora(config: DataConfig, part: str) -> list[Corpus]:
    """Return a corpus for each file pair, or file of pairs, of a configuration."""
    prefix = {"train": "", "valid": "valid_"}[part]
    src, tgt, pairs = (
        file_names(getattr(config, prefix + name)) for name in ("src", "tgt", "pairs")
    )
    limits: dict[str, Any] = {
        "max_line_bytes": config.max_line_bytes,
        "on_bad_line": config.on_bad_line,
    }
    if not pairs and not (src and tgt):
        flag = prefix.replace("_", "-")
        problem = (
            f"data.{prefix}src and data.{prefix}tgt, or data.{prefix}pairs, must name files; "
            "found none; "
            f"pass --{flag}src FILE --{flag}tgt FILE, or --{flag}pairs FILE"
        )
        raise ConfigError([problem])
    wanted = ColumnSelection(config.src_field, config.tgt_field, config.src_lang, config.tgt_lang)
    parts: list[Corpus] = [TabularCorpus(Path(path), wanted, **limits) for path in pairs]
    parts += [
        ParallelFiles(Path(one), Path(other), **limits) for one, other in zip(src, tgt, strict=True)
    ]
    return parts
