"""Corpus checks before training: one pass, a few dozen bytes per pair, one finding per check.

`corpus_cleaner.py` removes what they find.
"""

from __future__ import annotations

import math
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dragoman.data.line_shift_detection import (
    Misalignment,
    NumberedFeatures,
    find_misalignment,
    line_features,
)
from dragoman.data.parallel_corpus import BadPair, Corpus, LineCountError, SentencePair

_NO_LETTERS = re.compile(r"[\W_]+")
# Traces of word tokenizers: a space before a comma or full stop, split clitics, Moses escapes and
# hyphens.
_TOKENIZED = re.compile(
    r"\s[.,](?:\s|$)|\s(?:n't|'(?:s|re|ve|ll|d|m))\b|@@\s|\s@-@\s|&(?:apos|quot|amp|#91|#93);"
)
_MIN_LENGTH = 20  # characters of the longer side below which a length ratio is not checked


_CODES = {
    "line counts": "line-counts",
    "misaligned lines": "misaligned",
    "invalid UTF-8 or NUL": "invalid",
    "broken rows": "broken",
    "overlong lines": "overlong",
    "empty lines": "empty",
    "duplicate pairs": "duplicate",
    "length ratio": "length-ratio",
    "source equals target": "copy",
    "already tokenized text": "tokenised",
    "held-out pairs in the corpus": "leak",
    "held-out sources in the corpus": "source-leak",
}


@dataclass(frozen=True, slots=True)
class CorpusFinding:
    """The result of a check: number of pairs, their lines, and what to do about them."""

    check: str
    count: int
    lines: list[int]
    advice: str

    @property
    def code(self) -> str:
        """The check's name in one word, for options and JSON."""
        return _CODES[self.check]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.count


class _FindingLines:
    """The lines that a check found, eight bytes each."""

    def __init__(self, check: str, advice: str) -> None:
        self.check, self.advice = check, advice
        self.lines = array("Q")

    def add(self, number: int) -> None:
        self.lines.append(number)

    def finding(self) -> CorpusFinding:
        return CorpusFinding(
            self.check, len(self.lines), self.lines.tolist(), self.advice if self.lines else ""
        )


def check_corpus(
    corpus: Corpus, *, held_out: Corpus | None = None, progress: Callable[[int], None] | None = None
) -> list[CorpusFinding]:
    """Return a finding for every check, empty ones included.

    Leakage is checked if held-out pairs are given.
    """
    return examine_corpus(corpus, held_out=held_out, progress=progress).findings


def examine_corpus(
    corpus: Corpus, *, held_out: Corpus | None = None, progress: Callable[[int], None] | None = None
) -> CorpusReport:
    """Return the findings together with the data for removing their lines."""
    checker = _CorpusChecker(held_out, progress)
    findings = checker.run(corpus)
    return CorpusReport(findings, checker.pairs, checker.line_count_error, checker)


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """Findings of a corpus and its number of pairs."""

    findings: list[CorpusFinding]
    pairs: int
    line_count_error: LineCountError | None
    _checker: _CorpusChecker

    def lines_to_remove(self, codes: Sequence[str]) -> dict[str, NDArray[np.uint64]]:
        """Return the lines to remove for each code, in the order of the codes, no line twice.

        Length ratios are compared again without the lines removed for other reasons until all that
        are left agree, so that the cleaned corpus has no findings.
        """
        lines = {each.code: np.array(each.lines, np.uint64) for each in self.findings}
        removed = {code: np.zeros(0, np.uint64) for code in codes}
        removed_lines = np.zeros(0, np.uint64)
        for code in codes:
            if code != "length-ratio" and code in lines:
                removed[code] = np.setdiff1d(lines[code], removed_lines)
                removed_lines = np.union1d(removed_lines, removed[code])
        while "length-ratio" in codes and len(more := self._checker.outliers(removed_lines)):
            removed["length-ratio"] = np.union1d(removed["length-ratio"], more)
            removed_lines = np.union1d(removed_lines, more)
        return {code: each for code, each in removed.items() if len(each)}


def overlap_key(text: str) -> str:
    """Return a text as compared between corpora: NFKC, case folded, letters and digits only."""
    return _NO_LETTERS.sub("", unicodedata.normalize("NFKC", text).casefold())


class _CorpusChecker:
    """One pass over a corpus."""

    def __init__(self, held_out: Corpus | None, progress: Callable[[int], None] | None) -> None:
        self._progress = progress
        self.pairs = 0
        self.line_count_error: LineCountError | None = None
        self._held_out = _held_out_keys(held_out) if held_out else None
        self.bad = _FindingLines(
            "invalid UTF-8 or NUL",
            "convert the file to UTF-8 or repair the lines; data.on_bad_line=skip leaves the "
            "pairs out",
        )
        self.broken = _FindingLines(
            "broken rows",
            "repair their columns, quotes or JSON; data.on_bad_line=skip leaves the pairs out",
        )
        self.overlong = _FindingLines(
            "overlong lines",
            "split them into sentences, or raise data.max_line_bytes; training leaves the pairs "
            "out",
        )
        self.empty = _FindingLines(
            "empty lines", "nothing: training leaves the pairs out; many may mean misaligned files"
        )
        self.copies = _FindingLines(
            "source equals target",
            "remove those that should be translated, or the model learns to copy",
        )
        self.tokenized = _FindingLines(
            "already tokenized text",
            "use the raw text, or detokenise it (sacremoses): the model would learn to write ' ,' "
            'and " \'s"',
        )
        self.leaks = _FindingLines(
            "held-out pairs in the corpus",
            "remove these lines from the training text: they were seen before the test",
        )
        self.source_leaks = _FindingLines(
            "held-out sources in the corpus",
            "remove these lines from the training text if the test set should be unseen",
        )
        self._numbers, self._hashes, self._ratios = array("Q"), array("q"), array("f")

    def run(self, corpus: Corpus) -> list[CorpusFinding]:
        """Read the corpus and return the findings."""
        misalignment: Misalignment | None = None
        try:
            misalignment = find_misalignment(self._line_features(corpus))
            for _ in self._rest:
                pass
        except LineCountError as error:
            self.line_count_error, misalignment = error, error.misalignment
        if self._progress:
            self._progress(self.pairs)
        rows = [
            self._line_count_finding(self.line_count_error),
            self._misalignment_finding(misalignment),
            self.bad.finding(),
        ]
        # Only a file of pairs has rows.
        rows += [self.broken.finding()] if len(corpus.files) == 1 else []
        rows += [self.overlong.finding(), self.empty.finding()]
        rows += [
            self._duplicates(),
            self._outliers(),
            self.copies.finding(),
            self.tokenized.finding(),
        ]
        if self._held_out is not None:
            rows += [self.leaks.finding(), self.source_leaks.finding()]
        return rows

    def _line_features(self, corpus: Corpus) -> Iterator[NumberedFeatures]:
        """Check every record and yield the features for the misalignment check.

        That check may stop before the end.
        """
        self._rest = self._checked_pairs(corpus)
        for pair in self._rest:
            yield pair.number, line_features(pair.src), line_features(pair.tgt)

    def _checked_pairs(self, corpus: Corpus) -> Iterator[SentencePair]:
        for count, record in enumerate(corpus.records(), 1):
            self.pairs = count
            if self._progress and not count % 10_000:
                self._progress(count)
            if isinstance(record, BadPair):
                {"overlong": self.overlong, "broken": self.broken}.get(
                    record.line.kind, self.bad
                ).add(record.number)
                continue
            self._check_pair(record)
            yield record

    def _check_pair(self, pair: SentencePair) -> None:
        number, src, tgt = pair.number, pair.src.strip(), pair.tgt.strip()
        if not src or not tgt:
            self.empty.add(number)
            return
        self._numbers.append(number)
        self._hashes.append(hash((src, tgt)))
        self._ratios.append(
            math.log(len(src) / len(tgt)) if max(len(src), len(tgt)) >= _MIN_LENGTH else math.nan
        )
        if src == tgt and not src.isdecimal():
            self.copies.add(number)
        if _TOKENIZED.search(src) or _TOKENIZED.search(tgt):
            self.tokenized.add(number)
        if self._held_out is not None:
            src_key = overlap_key(src)
            targets = self._held_out.get(hash(src_key)) if src_key else None
            if targets is not None:
                self.source_leaks.add(number)
                if hash(overlap_key(tgt)) in targets:
                    self.leaks.add(number)

    def _line_count_finding(self, line_count_error: LineCountError | None) -> CorpusFinding:
        if not line_count_error:
            return CorpusFinding("line counts", 0, [], "")
        counts = line_count_error.counts
        shown = [min(counts) + 1]
        return CorpusFinding(
            "line counts",
            abs(counts[0] - counts[1]),
            shown,
            f"the files have {counts[0]} and {counts[1]} lines: find what is missing",
        )

    def _misalignment_finding(self, misalignment: Misalignment | None) -> CorpusFinding:
        if not misalignment:
            return CorpusFinding("misaligned lines", 0, [], "")
        which, by = (
            ("target", misalignment.shift)
            if misalignment.shift > 0
            else ("source", -misalignment.shift)
        )
        advice = (
            f"from near this line on the {which} seems to have {by} line{'s' if by > 1 else ''} "
            "too many: compare the files there"
        )
        return CorpusFinding("misaligned lines", 1, [misalignment.line], advice)

    def _duplicates(self) -> CorpusFinding:
        hashes = np.frombuffer(self._hashes, np.int64) if self._hashes else np.zeros(0, np.int64)
        order = np.argsort(hashes, kind="stable")
        # Stable: the first of equal pairs is not among them.
        repeats = order[1:][hashes[order][1:] == hashes[order][:-1]]
        return self._make_finding(
            "duplicate pairs", repeats, "remove them, or the model weighs them more than the rest"
        )

    def _outliers(self) -> CorpusFinding:
        """Return pairs whose length ratio is three times and six deviations off."""
        return self._make_finding(
            "length ratio",
            self._odd_ratios(
                np.frombuffer(self._ratios, np.float32) if self._ratios else np.zeros(0, np.float32)
            ),
            "look at these pairs: one side may be cut off, merged with the next, or not a "
            "translation",
        )

    def outliers(self, removed_lines: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the lines with outlying length ratios among the remaining ones."""
        numbers = np.array(self._numbers, np.uint64)
        left = ~np.isin(numbers, removed_lines)
        return numbers[left][self._odd_ratios(np.array(self._ratios, np.float32)[left])]

    @staticmethod
    def _odd_ratios(ratios: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the indices of outlying ratios."""
        known = ratios[~np.isnan(ratios)]
        middle = float(np.median(known)) if len(known) else 0.0
        usual = float(np.median(np.abs(known - middle))) if len(known) else 0.0
        # 1.4826 scales the median deviation to a standard deviation for normal data.
        return np.flatnonzero(np.abs(ratios - middle) > max(math.log(3), 6 * 1.4826 * usual))

    def _make_finding(self, check: str, indices: NDArray[np.int64], advice: str) -> CorpusFinding:
        lines = sorted(self._numbers[index] for index in indices.tolist())
        return CorpusFinding(check, len(indices), lines, advice if len(indices) else "")


def _held_out_keys(corpus: Corpus) -> dict[int, set[int]]:
    """Return the held-out pairs: by the hash of the source, the hashes of its targets."""
    keys: dict[int, set[int]] = {}
    for pair in corpus.pairs():
        src = overlap_key(pair.src)
        if src:
            keys.setdefault(hash(src), set()).add(hash(overlap_key(pair.tgt)))
    return keys
