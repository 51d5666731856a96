"""Input lines: type checks, segments of lines with too many tokens, their translations joined."""

from __future__ import annotations

import itertools
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dragoman.config import DecodeConfig
from dragoman.config.translation_directions import Direction
from dragoman.errors import DataError
from dragoman.inference.capitals_and_final_stops import ends_in_word, is_in_capitals
from dragoman.inference.translation_result import Translation, join_translations
from dragoman.text.sentence_splitter import SplitText, split_long_text, split_sentences
from dragoman.text.sentencepiece_tokenizer import Tokenizer, invalid_text_error
from dragoman.text.special_tokens import UNK

MAX_LINE_CHARS = 1 << 18  # a line with more is a book without line breaks, or no text at all
FOREIGN_FRACTION = 0.5  # of a line's characters outside of the vocabulary: in no language of it
_TEXTS_PER_THREAD, _MAX_THREADS = 512, 8  # fewer texts are encoded before a thread has started


@dataclass(frozen=True, slots=True)
class Segment:
    """The input of one search: a line, or a sentence of a line that is too long."""

    line: int  # counted from 0 over the whole input
    index: int  # within its line
    text: str
    src: list[int]  # token ids without EOS
    target_language: str = ""  # of a multilingual model

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
    other_language: str = ""  # that it clearly is in, and not in that of the direction
    is_foreign: bool = False  # most of its characters are outside of the vocabulary
    in_capitals: bool = False  # was recased: its translation is printed in capitals
    without_stop: bool = False  # its translation is printed without a full stop at the end

    def translation(self, answers: Sequence[Translation]) -> Translation:
        """Join the translations of the segments."""
        joined = self._join(answers)
        if self.in_capitals or self.without_stop:
            alternatives = [
                replace(each, text=self._printed(each.text)) for each in joined.alternatives
            ]
            joined = replace(joined, text=self._printed(joined.text), alternatives=alternatives)
        if self.direction is None:
            return joined
        source, target = self.direction
        return replace(
            joined,
            source_language=source,
            target_language=target,
            other_language=self.other_language,
        )

    def _printed(self, text: str) -> str:
        """Return a translation in the form of its line."""
        if self.without_stop and text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        return text.upper() if self.in_capitals else text

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


def is_foreign(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether most characters of a text are outside of the vocabulary."""
    return (
        not tokenizer.unknown_ids.isdisjoint(ids)
        and tokenizer.unknown_fraction(ids) > FOREIGN_FRACTION
    )


def mark_adapted(
    lines: Sequence[SegmentedLine], texts: Sequence[str], decode: DecodeConfig
) -> list[SegmentedLine]:
    """Return the lines of these texts with the form that their translations are printed in."""
    if not (decode.recase_capitals or decode.mirror_final_stop):
        return list(lines)
    return [
        replace(
            line,
            in_capitals=decode.recase_capitals and is_in_capitals(text),
            without_stop=decode.mirror_final_stop and ends_in_word(text),
        )
        for line, text in zip(lines, texts, strict=True)
    ]


def split_lines(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    longest: int,
    by_sentence: bool = False,
    line_numbers: Iterator[int] | None = None,
    directions: Sequence[Direction] | None = None,
) -> list[SegmentedLine]:
    """Split lines of more than `longest` tokens into sentences; a blank line has no segments.

    All lines are split `by_sentence`, for models that were trained on single sentences.
    With `directions`, one for each line, every segment begins with the tag of its target language.
    """
    numbers = itertools.count() if line_numbers is None else line_numbers
    stripped = [text[:MAX_LINE_CHARS].strip() for text in texts]
    threads = min(1 + len(stripped) // _TEXTS_PER_THREAD, os.cpu_count() or 1, _MAX_THREADS)
    encoded = tokenizer.encode_batch(stripped, threads=threads)
    foreign = [is_foreign(row, tokenizer) for row in encoded]
    if directions is None:
        lines = [
            _split_line(
                next(numbers),
                text,
                whole,
                tokenizer,
                longest,
                by_sentence=by_sentence,
                foreign=is_other,
            )
            for text, whole, is_other in zip(stripped, encoded, foreign, strict=True)
        ]
    else:
        tagged = {each: tokenizer.tagged(each.target) for each in set(directions)}
        lines = [
            _split_line(
                next(numbers),
                text,
                [*tagged[direction].first_ids, *whole],
                tagged[direction],
                longest,
                direction,
                by_sentence=by_sentence,
                foreign=is_other,
            )
            for text, whole, direction, is_other in zip(
                stripped, encoded, directions, foreign, strict=True
            )
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
    number: int,
    text: str,
    whole: list[int],
    tokenizer: Tokenizer,
    longest: int,
    direction: Direction | None = None,
    *,
    by_sentence: bool,
    foreign: bool,
) -> SegmentedLine:
    """Split one line."""
    if not text:
        return SegmentedLine([], [], [], direction)
    texts, gaps, encoded, notes = [text], list[str](), [whole], list[str]()
    has_sentences = by_sentence and len(split_sentences(text).texts) > 1
    if has_sentences or "\n" in text or len(whole) > longest:
        texts, gaps = _split_text(text, tokenizer, longest, by_sentence=by_sentence)
        encoded = tokenizer.encode_batch(texts)
    if len(whole) > longest:
        notes.append(
            f"{len(whole):,} tokens are more than the {longest:,} that the model was trained on: "
            f"translated in {len(texts)} segments"
        )
    unknown = sum(tokens.count(UNK) for tokens in encoded)
    if foreign:
        notes.append(
            "most of its characters are not in the model's vocabulary: it seems to be in none of "
            "the model's languages, and its translation means little"
        )
    elif unknown:
        notes.append(
            f"{unknown:,} of its tokens {'is' if unknown == 1 else 'are'} unknown to the model"
        )
    language = "" if direction is None else direction.target
    return SegmentedLine(
        [
            Segment(number, index, each, src, language)
            for index, (each, src) in enumerate(zip(texts, encoded, strict=True))
        ],
        gaps,
        notes,
        direction,
        is_foreign=foreign,
    )


def _split_text(text: str, tokenizer: Tokenizer, longest: int, *, by_sentence: bool) -> SplitText:
    """Split a text at its line breaks, and lines that are too long, or all, into sentences."""

    def fits(part: str) -> bool:
        is_whole = not by_sentence or len(split_sentences(part).texts) == 1
        return is_whole and len(tokenizer.encode(part)) <= longest

    texts, gaps, gap = list[str](), list[str](), ""
    for line in text.split("\n"):
        if line.strip():
            segments = split_long_text(line.strip(), fits)
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
    """Raise DataError unless `texts` is an iterable of texts; a string is one of characters."""
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


def check_unicode(value: Any) -> None:
    """Raise DataError for a lone surrogate in a text, or in the texts of a list."""
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise invalid_text_error([value])
    elif isinstance(value, (list, tuple)):
        for each in value:
            check_unicode(each)


def _describe_value(value: Any) -> str:
    """Return the repr and the type of a value that is not a text."""
    return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
