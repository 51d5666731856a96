"""Translation, and the segments of an input line that it is joined from; checks of texts."""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.config.directions import Direction
from dragoman.errors import DataError
from dragoman.evaluate.confidence import ConfidenceMap
from dragoman.text.sentence_splitter import SplitText, split_long_text
from dragoman.text.special_tokens import UNK
from dragoman.text.tokenizer import Tokenizer

_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # all but the tab
_MAX_PATTERN_TOKENS = 8
_MIN_REPEATS = 5  # in a row: more than in any sentence
_MIN_REPEATED_TOKENS = 12  # in total, so that "ha ha ha ha ha" is not reported
MAX_ALIGNMENT_CELLS = 1 << 22  # of a line in several segments: most cells are zero
MAX_LINE_CHARS = 1 << 18  # a line with more is a book without line breaks, or no text at all
_TEXTS_PER_THREAD, _MAX_THREADS = 512, 8  # fewer texts are encoded before a thread has started


def replace_control_chars(text: str) -> str:
    """Replace control characters but the tab by spaces: outputs stay one line (marian-dev#365)."""
    return _CONTROL_CHARS.sub(" ", text)


class Repetition(NamedTuple):
    """A pattern of tokens that an output repeats."""

    pattern: tuple[int, ...]
    times: int


def find_repetition(tokens: Sequence[int]) -> Repetition | None:
    """Return the first short pattern repeated many times in a row; None if there is none."""
    if len(tokens) - len(set(tokens)) < _MIN_REPEATED_TOKENS - 2:  # a quick test first
        return None
    for length in range(1, _MAX_PATTERN_TOKENS + 1):
        run = 0
        for at in range(length, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - length] else 0
            times = run // length + 1
            if times >= _MIN_REPEATS and run + length >= _MIN_REPEATED_TOKENS:
                start = at - run - length + 1
                while at + 1 < len(tokens) and tokens[at + 1] == tokens[at + 1 - length]:
                    at, run = at + 1, run + 1
                return Repetition(tuple(tokens[start : start + length]), run // length + 1)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """The translation of one line."""

    text: str
    score: float = 0.0  # log-probability under the length penalty; closer to 0 is likelier
    tokens: list[str] = field(default_factory=list)
    # One log-probability per token, and one for EOS if the output is finished.
    log_probs: list[float] = field(default_factory=list)
    src_tokens: list[str] = field(default_factory=list)  # with `</s>`, which is attended to as well
    # (T, S): cross-attention weights averaged over layers and heads; a row sums to 1. None unless
    # requested, and for models without cross-attention.
    alignment: NDArray[np.float32] | None = None
    alternatives: Sequence[Translation] = ()  # the n best, this one first; without alternatives
    notes: Sequence[str] = ()  # anything unusual: split, truncated, retried
    constraints: Sequence[str] = ()  # those that were applied
    utility: float | None = None  # expected, of 100: only from minimum Bayes risk decoding
    # Probability that the translation is good, calibrated on validation data; None if the model
    # has no calibration, for samples, and without log-probabilities.
    confidence: float | None = None
    # Of a model of several directions; empty for others.
    source_language: str = ""
    target_language: str = ""

    def __repr__(self) -> str:
        """Return text, score and number of tokens in one line."""
        counts = [f"{len(self.alternatives)} alternatives"] * (len(self.alternatives) > 1) + [
            f"notes={list(self.notes)}"
        ] * bool(self.notes)
        parts = [truncate_repr(self.text), f"score={self.score:.4f}", f"{len(self.tokens)} tokens"]
        return f"Translation({', '.join([*parts, *counts])})"


def add_confidence(translation: Translation, calibration: ConfidenceMap) -> Translation:
    """Return a translation with its confidence; unchanged without log-probabilities."""
    confidence = calibration.confidence(
        tokens=translation.tokens,
        log_probs=translation.log_probs,
        src_tokens=translation.src_tokens,
    )
    return translation if confidence is None else replace(translation, confidence=confidence)


def truncate_repr(text: str, longest: int = 60) -> str:
    """Return the repr of a text, truncated if it is long."""
    return repr(text) if len(text) <= longest else f"{text[: longest - 1]!r}…"


def join_translations(
    segments: Sequence[Translation], gaps: Sequence[str], notes: Sequence[str]
) -> Translation:
    """Join the translations of a line's segments: texts with separators, scores added."""
    text = "".join(segment.text + gap for segment, gap in zip(segments, [*gaps, ""], strict=True))
    ranks = min((len(segment.alternatives) for segment in segments), default=0)
    blocks = [segment.alignment for segment in segments if segment.alignment is not None]
    rows, columns = sum(block.shape[0] for block in blocks), sum(block.shape[1] for block in blocks)
    if rows * columns > MAX_ALIGNMENT_CELLS:
        blocks = []
        notes = [
            *notes,
            f"its alignment is left out: {rows:,} by {columns:,} is more than "
            f"{MAX_ALIGNMENT_CELLS:,} numbers",
        ]
    return Translation(
        text=text,
        score=sum(segment.score for segment in segments),
        tokens=[token for segment in segments for token in segment.tokens],
        log_probs=[number for segment in segments for number in segment.log_probs],
        src_tokens=[token for segment in segments for token in segment.src_tokens],
        alignment=_block_diagonal(blocks),
        alternatives=[
            join_translations([segment.alternatives[rank] for segment in segments], gaps, ())
            for rank in range(ranks)
        ],
        notes=[*notes, *_count_notes([note for segment in segments for note in segment.notes])],
        utility=_mean_utility(segments),
    )


def _mean_utility(segments: Sequence[Translation]) -> float | None:
    """Return the mean of the segments' utilities, None if there are none."""
    known = [segment.utility for segment in segments if segment.utility is not None]
    return sum(known) / len(known) if known else None


def _count_notes(notes: Sequence[str]) -> list[str]:
    """Return each distinct note once, with the number of segments that have it."""
    return [
        note if times == 1 else f"{note} ({times} segments)"
        for note, times in Counter(notes).items()
    ]


def _block_diagonal(blocks: Sequence[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    """Return the block-diagonal alignment: segments do not attend to one another."""
    if not blocks:
        return None
    whole = np.zeros(
        (sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks)), dtype=np.float32
    )
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


@dataclass(frozen=True, slots=True)
class Segment:
    """The input of one search: a line, or a sentence of a line that is too long."""

    line: int  # counted from 0 over the whole input
    index: int  # within its line
    text: str
    src: list[int]  # token ids without EOS

    @property
    def sample_id(self) -> int:
        """A number unique to this segment in the whole input: seeds its sampling."""
        return (self.line << 20) + self.index


@dataclass(frozen=True, slots=True)
class SegmentedLine:
    """A line of input as segments."""

    segments: list[Segment]
    gaps: list[str]  # separators between the segments
    notes: list[str]
    direction: Direction | None = None  # of a multilingual model

    def translation(self, answers: Sequence[Translation]) -> Translation:
        """Join the translations of the segments."""
        joined = self._join(answers)
        if self.direction is None:
            return joined
        source, target = self.direction
        return replace(joined, source_language=source, target_language=target)

    def _join(self, answers: Sequence[Translation]) -> Translation:
        if not self.segments:
            return Translation(text="", alternatives=[Translation(text="")])
        if len(answers) == 1:
            return (
                replace(answers[0], notes=[*self.notes, *answers[0].notes])
                if self.notes
                else answers[0]
            )
        texts = itertools.pairwise(answer.text for answer in answers)
        gaps = [
            target_gap(segment.text, before, gap, after)
            for segment, (before, after), gap in zip(self.segments, texts, self.gaps, strict=False)
        ]
        return join_translations(answers, gaps, self.notes)


def split_lines(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    longest: int,
    line_numbers: Iterator[int] | None = None,
    directions: Sequence[Direction] | None = None,
) -> list[SegmentedLine]:
    """Split lines of more than `longest` tokens into sentences; a blank line has no segments.

    With `directions`, one for each line, every segment begins with the tag of its target language.
    """
    numbers = itertools.count() if line_numbers is None else line_numbers
    stripped = [text[:MAX_LINE_CHARS].strip() for text in texts]
    threads = min(1 + len(stripped) // _TEXTS_PER_THREAD, os.cpu_count() or 1, _MAX_THREADS)
    encoded = tokenizer.encode_batch(stripped, threads=threads)
    if directions is None:
        lines = [
            _split_line(next(numbers), text, whole, tokenizer, longest)
            for text, whole in zip(stripped, encoded, strict=True)
        ]
    else:
        tagged = {each: tokenizer.tagged(each.target) for each in set(directions)}
        lines = [
            replace(
                _split_line(
                    next(numbers),
                    text,
                    [*tagged[direction].first_ids, *whole],
                    tagged[direction],
                    longest,
                ),
                direction=direction,
            )
            for text, whole, direction in zip(stripped, encoded, directions, strict=True)
        ]
    for text, line in zip(texts, lines, strict=True):
        if len(text) > MAX_LINE_CHARS and text[MAX_LINE_CHARS:].strip():
            line.notes.insert(
                0,
                f"only its first {MAX_LINE_CHARS:,} characters were translated: "
                "put a line break between its sentences",
            )
    return lines


def _split_line(
    number: int, text: str, whole: list[int], tokenizer: Tokenizer, longest: int
) -> SegmentedLine:
    """Split one line."""
    if not text:
        return SegmentedLine([], [], [])
    texts, gaps, encoded, notes = [text], list[str](), [whole], list[str]()
    if "\n" in text or len(whole) > longest:
        texts, gaps = _split_text(text, tokenizer, longest)
        encoded = tokenizer.encode_batch(texts)
    if len(whole) > longest:
        notes.append(
            f"{len(whole):,} tokens are more than the {longest:,} that the model was trained on: "
            f"translated in {len(texts)} segments"
        )
    unknown = sum(tokens.count(UNK) for tokens in encoded)
    if unknown:
        notes.append(
            f"{unknown:,} of its tokens {'is' if unknown == 1 else 'are'} unknown to the model"
        )
    return SegmentedLine(
        [
            Segment(number, index, each, src)
            for index, (each, src) in enumerate(zip(texts, encoded, strict=True))
        ],
        gaps,
        notes,
    )


def _split_text(text: str, tokenizer: Tokenizer, longest: int) -> SplitText:
    """Split a text at its line breaks, and lines that are too long into sentences."""
    texts, gaps, gap = list[str](), list[str](), ""
    for line in text.split("\n"):
        if line.strip():
            segments = split_long_text(
                line.strip(), lambda each: len(tokenizer.encode(each)) <= longest
            )
            gaps += [gap, *segments.gaps] if texts else segments.gaps
            texts += segments.texts
            gap = ""
        gap += "\n"
    return SplitText(texts, gaps)


def target_gap(source: str, before: str, gap: str, after: str) -> str:
    """Return the separator of two translated segments in the target's script.

    A Chinese source has none between sentences where an English translation needs a space, and the
    other way round. The segments of a word that was too long have none.
    """
    if "\n" in gap or not before or not after:
        return gap
    if _is_wide_char(before[-1]) and _is_wide_char(after[0]):
        return ""
    return gap or (" " if unicodedata.category(source[-1]).startswith("P") else "")


def _is_wide_char(char: str) -> bool:
    """Whether a character is of a script without spaces between sentences."""
    return unicodedata.east_asian_width(char) in ("W", "F")


def check_text_iterable(lines: Any) -> Iterable[Any]:
    """Raise DataError for what is not an iterable of texts: a string is one of characters."""
    if isinstance(lines, str):
        raise DataError(
            "texts must be a list of texts",
            found=f"one text, {lines!r:.60}",
            fix="put it in brackets: [text]",
        )
    if isinstance(lines, (bytes, Mapping)) or not isinstance(lines, Iterable):
        raise DataError(
            "texts must be a list of texts",
            found=_describe_value(lines),
            fix='pass a list such as ["Guten Morgen."], or an open text file',
        )
    return lines


def iter_texts(lines: Iterable[Any]) -> Iterator[str]:
    """Yield the texts; raise DataError for the first value that is not a string."""
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, str):
            raise DataError(
                f"text {number} must be a text",
                found=_describe_value(line),
                fix='pass "" for an empty one, and decode bytes as UTF-8',
            )
        yield line


def _describe_value(value: Any) -> str:
    """Return the repr and the type of a value that is not a text."""
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
