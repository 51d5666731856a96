"""From a line to the parts that the model translates, and from their translations back to a line."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from dragoman.text.specials import UNK
from dragoman.text.tokenizer import Tokenizer
from dragoman.translator.translation import Translation, joined


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
            return Translation(text="")
        if len(answers) == 1 and not self.notes:
            return answers[0]
        gaps = [fitting_gap(before.text, gap, after.text) for before, gap, after in zip(answers, self.gaps, answers[1:], strict=False)]
        return joined(answers, gaps, self.notes)


def cut_lines(texts: Sequence[str], tokenizer: Tokenizer, *, first: int = 0, longest: int) -> list[Line]:
    """Cut lines: nothing where one is blank, and by sentences where one has more pieces than the model was trained on."""
    stripped = [text.strip() for text in texts]
    encoded = tokenizer.encode_batch(stripped)
    return [_cut(first + at, text, whole, tokenizer, longest) for at, (text, whole) in enumerate(zip(stripped, encoded, strict=True))]


def _cut(number: int, text: str, whole: list[int], tokenizer: Tokenizer, longest: int) -> Line:
    """Cut one line."""
    if not text:
        return Line([], [], [])
    texts, gaps, encoded, notes = [text], list[str](), [whole], list[str]()
    if len(whole) > longest:
        from dragoman.text.sentences import split_long

        texts, gaps = split_long(text, lambda each: len(tokenizer.encode(each)) <= longest)
        encoded = tokenizer.encode_batch(texts)
        notes.append(f"{len(whole)} pieces are more than the {longest} that the model was trained on: translated in {len(texts)} parts")
    unknown = sum(pieces.count(UNK) for pieces in encoded)
    if unknown:
        notes.append(f"{unknown} of its pieces are unknown to the model")
    return Line([Part(number, place, each, src) for place, (each, src) in enumerate(zip(texts, encoded, strict=True))], gaps, notes)


def fitting_gap(before: str, gap: str, after: str) -> str:
    """Separate two translated sentences as their script does: the source's gap belongs to the source's script."""
    if gap.strip() or "\n" in gap or not before or not after:
        return gap
    if _is_wide(before[-1]) and _is_wide(after[0]):
        return ""
    return gap or " "


def _is_wide(char: str) -> bool:
    """Say whether a character is of a script that writes sentences without spaces between them."""
    return unicodedata.east_asian_width(char) in ("W", "F")
