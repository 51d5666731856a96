"""From a line to the parts that the model translates, and from their translations back to a line."""

from __future__ import annotations

import itertools
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dragoman.text.sentences import Split, split_long
from dragoman.text.specials import UNK
from dragoman.text.tokenizer import Tokenizer
from dragoman.translator.translation import Translation, joined

MOST_CHARACTERS = 1 << 18  # of one line: a quarter of a million are a book without line breaks, or no text at all
_TEXTS_A_THREAD, _MOST_THREADS = 512, 8  # fewer texts are encoded sooner than a thread has started


@dataclass(frozen=True, slots=True)
class Part:
    """What goes through the model at once: a line, or a sentence of a line that is too long."""

    line: int  # counted from 0 over the whole input
    place: int  # within its line
    text: str
    src: list[int]

    @property
    def key(self) -> int:
        """A number that only this part has: where chance starts when sampling."""
        return (self.line << 20) + self.place


@dataclass(frozen=True, slots=True)
class Line:
    """A line of input, cut for the model."""

    parts: list[Part]
    gaps: list[str]  # what stands between the parts
    notes: list[str]

    def translation(self, answers: Sequence[Translation]) -> Translation:
        """Put the answers to the parts together."""
        if not self.parts:
            return Translation(text="", alternatives=[Translation(text="")])
        if len(answers) == 1:
            return replace(answers[0], notes=[*self.notes, *answers[0].notes]) if self.notes else answers[0]
        texts = itertools.pairwise(answer.text for answer in answers)
        gaps = [
            fitting_gap(part.text, before, gap, after) for part, (before, after), gap in zip(self.parts, texts, self.gaps, strict=False)
        ]
        return joined(answers, gaps, self.notes)


def cut_lines(texts: Sequence[str], tokenizer: Tokenizer, *, first: int = 0, longest: int) -> list[Line]:
    """Cut lines: nothing where one is blank, and by sentences where one has more pieces than the model was trained on."""
    stripped = [text[:MOST_CHARACTERS].strip() for text in texts]
    threads = min(1 + len(stripped) // _TEXTS_A_THREAD, os.cpu_count() or 1, _MOST_THREADS)
    encoded = tokenizer.encode_batch(stripped, threads=threads)
    lines = [_cut(first + at, text, whole, tokenizer, longest) for at, (text, whole) in enumerate(zip(stripped, encoded, strict=True))]
    for text, line in zip(texts, lines, strict=True):
        if len(text) > MOST_CHARACTERS and text[MOST_CHARACTERS:].strip():
            note = f"only its first {MOST_CHARACTERS:,} characters were translated: put a line break between its sentences"
            line.notes.insert(0, note)
    return lines


def _cut(number: int, text: str, whole: list[int], tokenizer: Tokenizer, longest: int) -> Line:
    """Cut one line."""
    if not text:
        return Line([], [], [])
    texts, gaps, encoded, notes = [text], list[str](), [whole], list[str]()
    if "\n" in text or len(whole) > longest:
        texts, gaps = _split(text, tokenizer, longest)
        encoded = tokenizer.encode_batch(texts)
    if len(whole) > longest:
        notes.append(f"{len(whole):,} pieces are more than the {longest:,} that the model was trained on: translated in {len(texts)} parts")
    unknown = sum(pieces.count(UNK) for pieces in encoded)
    if unknown:
        notes.append(f"{unknown:,} of its pieces {'is' if unknown == 1 else 'are'} unknown to the model")
    return Line([Part(number, place, each, src) for place, (each, src) in enumerate(zip(texts, encoded, strict=True))], gaps, notes)


def _split(text: str, tokenizer: Tokenizer, longest: int) -> Split:
    """Cut a text at its line breaks, and its lines where they are too long."""
    texts, gaps, gap = list[str](), list[str](), ""
    for line in text.split("\n"):
        if line.strip():
            parts = split_long(line.strip(), lambda each: len(tokenizer.encode(each)) <= longest)
            gaps += [gap, *parts.gaps] if texts else parts.gaps
            texts += parts.texts
            gap = ""
        gap += "\n"
    return Split(texts, gaps)


def fitting_gap(source: str, before: str, gap: str, after: str) -> str:
    """Separate two translated parts as their own script does: the gap after a part of the source belongs to its script.

    A Chinese source has none between its sentences where an English translation wants a space, and the other way
    round. Nothing goes between the parts of a word that was too long.
    """
    if "\n" in gap or not before or not after:
        return gap
    if _is_wide(before[-1]) and _is_wide(after[0]):
        return ""
    return gap or (" " if unicodedata.category(source[-1]).startswith("P") else "")


def _is_wide(char: str) -> bool:
    """Say whether a character is of a script that writes sentences without spaces between them."""
    return unicodedata.east_asian_width(char) in ("W", "F")
