"""Sentence splitting, and splitting of long text into segments, without losing a character.

A small rule set for Latin, Cyrillic, Greek, CJK, Arabic and Devanagari punctuation. It prefers to
leave two sentences together: a number or an abbreviation before a full stop, or a lower-case letter
after it, does not end a sentence. Documents of hierarchical classifiers are split by
`split_document` of tasks/classification_preprocessor.py.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# Possessive quantifiers: a million dots or spaces take linear time.
_CLOSERS = r"[\"'”’»›)\]}」』】》〉）＂＇]*+"
_STOPS = r"[.!?…؟۔‼⁇⁈⁉]"
_END = re.compile(
    rf"(?P<close>[。！？｡]++{_CLOSERS})\s*+"  # CJK: no space needed
    rf"|(?P<danda>[।॥]++{_CLOSERS})\s*+"  # Devanagari: no space needed
    rf"|(?P<stop>(?<!{_STOPS}){_STOPS}++{_CLOSERS})\s++"
)
_CLAUSE = re.compile(r"[、，；：]\s*+|[,;:،؛—–]\s++|(?<!\s)\s++[—–-]\s++")
_SPACE = re.compile(r"\s+")

# Abbreviations that end in a full stop, in lower case. Short words that also end sentences ("no",
# "art", "sun") are left out.
_ABBREVIATION_WORDS = """
    mr mrs ms mt dr prof st jr sr rev gen col lt sgt capt vs etc al approx dept figs nos vol pp eds
    inc ltd corp jan feb apr jun jul aug sep sept oct nov dec tue thu e.g i.e a.m p.m u.s u.k ph.d
    cf ca op cit bzw bspw dgl ggf hr fr frl inkl insb mind nr sog str tel usw vgl z.b d.h u.a o.ä
    v.a i.d.r z.t s.o s.u abb abs bd bsp geb gest jh jhd kap mio mrd mm mme mmes mlle mgr p.ex
    c.-à-d env chap cie sté sra srta dña ud uds pág págs aprox núm sig sig.ra dott ing avv pag dhr
    mevr mw drs bijv o.a d.w.z enz evt blz г гг т.е т.д т.п т.к др пр ул стр рис тыс млн млрд
"""
_ABBREVIATIONS = frozenset(_ABBREVIATION_WORDS.split())


class SplitText(NamedTuple):
    """Segments of a text and the white space between them: alternated, they are the text."""

    texts: list[str]
    gaps: list[str]  # one fewer than the texts


class _Span(NamedTuple):
    start: int
    end: int


def split_sentences(text: str) -> SplitText:
    """Split text at sentence ends."""
    return _to_split_text(text, _sentence_spans(text))


def split_long_text(text: str, fits: Callable[[str], bool]) -> SplitText:
    """Split text into segments that fit, at the largest possible breaks.

    Breaks are sentence ends, then clause ends, then spaces, then characters with their accents. A
    text that fits is one segment. A letter with thousands of accents is split between code points;
    a single code point is never dropped.
    """
    if fits(text):
        return SplitText([text], [])
    levels = (_break_at(_CLAUSE), _break_at(_SPACE), _break_at_characters, _break_at_code_points)
    return _to_split_text(
        text,
        [
            part
            for sentence in _sentence_spans(text)
            for part in _split_span(text, sentence, fits, levels)
        ],
    )


def _sentence_spans(text: str) -> list[_Span]:
    spans = []
    start = 0
    for match in _END.finditer(text):
        if match.end() >= len(text):
            break
        if match["stop"] and not _ends_sentence(text, start, match):
            continue
        spans.append(_Span(start, match.end(match.lastgroup or 0)))
        start = match.end()
    return [*spans, _Span(start, len(text))]


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether a full stop with a space after it ends a sentence."""
    after = text[match.end() : match.end() + 8]
    if after[0] in "»›" and (len(after) == 1 or not after[1].isalnum()):
        return False  # "« Bonjour ! » dit-il": French quotation marks have spaces inside
    following = after.lstrip("\"'“‘«‹„‚([{¿¡-–— ")
    if following[:1].islower():
        return False
    stop = match["stop"]
    if not stop.startswith(".") or stop.startswith(".."):
        return True
    words = text[max(start, match.start() - 32) : match.start()].split()
    word = words[-1].lstrip("\"'“‘«‹„‚([{") if words else ""
    if word.isdecimal() and len(word) <= 2:
        return False  # "am 3. Mai": a date or a heading's number
    if len(word) == 1 and word.isupper():
        return False  # an initial
    return word.lower() not in _ABBREVIATIONS


def _break_at(pattern: re.Pattern[str]) -> Callable[[str, _Span], Iterator[_Span]]:
    def find(text: str, span: _Span) -> Iterator[_Span]:
        start = span.start
        for match in pattern.finditer(text, span.start, span.end):
            # A clause keeps its comma; only the white space after it is a gap.
            end = match.start() + len(match.group().rstrip())
            if end > start and match.end() < span.end:
                yield _Span(start, end)
                start = match.end()
        yield _Span(start, span.end)

    return find


def _break_at_characters(text: str, span: _Span) -> Iterator[_Span]:
    """Split into single characters, each with its accents."""
    start = span.start
    for position in range(span.start + 1, span.end):
        if (
            not unicodedata.combining(text[position])
            and text[position] not in "\u200d\ufe0f"
            and text[position - 1] != "\u200d"
        ):
            yield _Span(start, position)
            start = position
    yield _Span(start, span.end)


def _break_at_code_points(text: str, span: _Span) -> Iterator[_Span]:
    """Split into single code points, for clusters with more accents than fit."""
    return (_Span(position, position + 1) for position in range(span.start, span.end))


def _split_span(
    text: str,
    span: _Span,
    fits: Callable[[str], bool],
    levels: Sequence[Callable[[str, _Span], Iterator[_Span]]],
) -> Iterator[_Span]:
    """Split a span at the first level's breaks, and parts still too long at the next level's.

    Neighbouring segments are joined as long as they fit.
    """
    if not levels or fits(text[span.start : span.end]):
        yield span
        return
    spans = list(levels[0](text, span))
    first = 0
    while first < len(spans):
        last = _last_fitting(text, spans, first, fits)
        if last < first:
            yield from _split_span(text, spans[first], fits, levels[1:])
            last = first
        else:
            yield _Span(spans[first].start, spans[last].end)
        first = last + 1


def _last_fitting(text: str, spans: list[_Span], first: int, fits: Callable[[str], bool]) -> int:
    """Return the last index up to which everything from `first` fits; `first - 1` if nothing does.

    It is found by doubling and halving the step.
    """
    good, step = first - 1, 1
    while good + step < len(spans) and fits(text[spans[first].start : spans[good + step].end]):
        good, step = good + step, step * 2
    while step > 1:
        step //= 2
        if good + step < len(spans) and fits(text[spans[first].start : spans[good + step].end]):
            good += step
    return good


def _to_split_text(text: str, spans: Sequence[_Span]) -> SplitText:
    texts = [text[span.start : span.end] for span in spans]
    gaps = [text[before.end : after.start] for before, after in itertools.pairwise(spans)]
    return SplitText(texts, gaps)
