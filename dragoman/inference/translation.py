"""Translations, the segments of a line that they are made from, and checks of the output."""

from __future__ import annotations

import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.text.sentence_splitter import SplitText, split_long_text
from dragoman.text.special_tokens import UNK
from dragoman.text.tokenizer import Tokenizer

_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # all but the tab
_MAX_PATTERN_TOKENS = 8  # pieces of a pattern
_MIN_REPEATS = 5  # repetitions that no sentence has
_MIN_REPEATED_TOKENS = 12  # pieces that they must take up, so that "ha ha ha ha ha" passes


def replace_control_chars(text: str) -> str:
    """Keep a line one line, and a terminal as it was: spaces for control characters (marian-dev#365)."""
    return _CONTROL_CHARS.sub(" ", text)


class Repetition(NamedTuple):
    """A pattern that an output repeats without a break."""

    pattern: tuple[int, ...]
    times: int


def find_repetition(tokens: Sequence[int]) -> Repetition | None:
    """Find the first short pattern that is written again and again, if there is one."""
    if (
        len(tokens) - len(set(tokens)) < _MIN_REPEATED_TOKENS - 2
    ):  # what every circle repeats at least: the dearest check is the one that is not made
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


MAX_ALIGNMENT_CELLS = (
    1 << 22
)  # of the alignment of a line that was translated in parts, most of which are zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """One line's translation."""

    text: str
    score: float = 0.0  # log-probability under the length penalty; closer to 0 is likelier
    tokens: list[str] = field(default_factory=list)
    log_probs: list[float] = field(
        default_factory=list
    )  # one a piece, and one for the end where it was reached
    src_tokens: list[str] = field(
        default_factory=list
    )  # with `</s>`, the end that the model also looks at
    # (T, S): cross-attention weights averaged over layers and heads; a row sums to 1. None unless asked for, and where a model has none.
    alignment: NDArray[np.float32] | None = None
    alternatives: Sequence[
        Translation
    ] = ()  # the n best, this one first; they have no alternatives of their own
    notes: Sequence[str] = ()  # whatever was out of the ordinary: split, stopped, tried again

    def __repr__(self) -> str:
        """Write the text and the score in one short line; numbers of tokens instead of the tokens."""
        counts = [f"{len(self.alternatives)} alternatives"] * (len(self.alternatives) > 1) + [
            f"notes={list(self.notes)}"
        ] * bool(self.notes)
        return f"Translation({', '.join([truncate_repr(self.text), f'score={self.score:.4f}', f'{len(self.tokens)} tokens', *counts])})"


def truncate_repr(text: str, longest: int = 60) -> str:
    """Return a text as Python writes it, cut where it is long."""
    return repr(text) if len(text) <= longest else f"{text[: longest - 1]!r}…"


def join_translations(
    segments: Sequence[Translation], gaps: Sequence[str], notes: Sequence[str]
) -> Translation:
    """Put the translations of a line's parts together: texts with the gaps between them, scores added."""
    text = "".join(segment.text + gap for segment, gap in zip(segments, [*gaps, ""], strict=True))
    ranks = min((len(segment.alternatives) for segment in segments), default=0)
    blocks = [segment.alignment for segment in segments if segment.alignment is not None]
    rows, columns = sum(block.shape[0] for block in blocks), sum(block.shape[1] for block in blocks)
    if rows * columns > MAX_ALIGNMENT_CELLS:
        blocks = []
        notes = [
            *notes,
            f"its alignment is left out: {rows:,} by {columns:,} are more than {MAX_ALIGNMENT_CELLS:,} numbers",
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
    )


def _count_notes(notes: Sequence[str]) -> list[str]:
    """Say once what holds for several parts."""
    return [
        note if times == 1 else f"{note} ({times} parts)" for note, times in Counter(notes).items()
    ]


def _block_diagonal(blocks: Sequence[NDArray[np.float32]]) -> NDArray[np.float32] | None:
    """Put alignments of parts along a diagonal: no part looked at another."""
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


MAX_LINE_CHARS = (
    1 << 18
)  # of one line: a quarter of a million are a book without line breaks, or no text at all
_TEXTS_PER_THREAD, _MAX_THREADS = 512, 8  # fewer texts are encoded sooner than a thread has started


@dataclass(frozen=True, slots=True)
class Segment:
    """What goes through the model at once: a line, or a sentence of a line that is too long."""

    line: int  # counted from 0 over the whole input
    index: int  # within its line
    text: str
    src: list[int]

    @property
    def key(self) -> int:
        """A number that only this part has: where chance starts when sampling."""
        return (self.line << 20) + self.index


@dataclass(frozen=True, slots=True)
class SegmentedLine:
    """A line of input, cut for the model."""

    segments: list[Segment]
    gaps: list[str]  # what stands between the parts
    notes: list[str]

    def translation(self, answers: Sequence[Translation]) -> Translation:
        """Put the answers to the parts together."""
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
    texts: Sequence[str], tokenizer: Tokenizer, *, first: int = 0, longest: int
) -> list[SegmentedLine]:
    """Cut lines: nothing where one is blank, and by sentences where one has more pieces than the model was trained on."""
    stripped = [text[:MAX_LINE_CHARS].strip() for text in texts]
    threads = min(1 + len(stripped) // _TEXTS_PER_THREAD, os.cpu_count() or 1, _MAX_THREADS)
    encoded = tokenizer.encode_batch(stripped, threads=threads)
    lines = [
        _split_line(first + at, text, whole, tokenizer, longest)
        for at, (text, whole) in enumerate(zip(stripped, encoded, strict=True))
    ]
    for text, line in zip(texts, lines, strict=True):
        if len(text) > MAX_LINE_CHARS and text[MAX_LINE_CHARS:].strip():
            note = f"only its first {MAX_LINE_CHARS:,} characters were translated: put a line break between its sentences"
            line.notes.insert(0, note)
    return lines


def _split_line(
    number: int, text: str, whole: list[int], tokenizer: Tokenizer, longest: int
) -> SegmentedLine:
    """Cut one line."""
    if not text:
        return SegmentedLine([], [], [])
    texts, gaps, encoded, notes = [text], list[str](), [whole], list[str]()
    if "\n" in text or len(whole) > longest:
        texts, gaps = _split_text(text, tokenizer, longest)
        encoded = tokenizer.encode_batch(texts)
    if len(whole) > longest:
        notes.append(
            f"{len(whole):,} pieces are more than the {longest:,} that the model was trained on: translated in {len(texts)} parts"
        )
    unknown = sum(pieces.count(UNK) for pieces in encoded)
    if unknown:
        notes.append(
            f"{unknown:,} of its pieces {'is' if unknown == 1 else 'are'} unknown to the model"
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
    """Cut a text at its line breaks, and its lines where they are too long."""
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
    """Separate two translated parts as their own script does: the gap after a part of the source belongs to its script.

    A Chinese source has none between its sentences where an English translation wants a space, and the other way
    round. Nothing goes between the parts of a word that was too long.
    """
    if "\n" in gap or not before or not after:
        return gap
    if _is_wide_char(before[-1]) and _is_wide_char(after[0]):
        return ""
    return gap or (" " if unicodedata.category(source[-1]).startswith("P") else "")


def _is_wide_char(char: str) -> bool:
    """Say whether a character is of a script that writes sentences without spaces between them."""
    return unicodedata.east_asian_width(char) in ("W", "F")
