"""Cutting text into sentences, and text that is too long into parts, without losing a character.

A small rule set for Latin, Cyrillic, Greek, CJK, Arabic and Devanagari punctuation. It would rather leave two sentences
together than cut one in two: a number or an abbreviation before a full stop, or a small letter after it, is no end.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

# Runs are matched from their first character and given back at no point: a million dots or spaces take linear time.
_CLOSERS = r"[\"'”’»›)\]}」』】》〉）＂＇]*+"
_STOPS = r"[.!?…؟۔‼⁇⁈⁉]"
_END = re.compile(
    rf"(?P<close>[。！？｡]++{_CLOSERS})\s*+"  # CJK: no space needed
    rf"|(?P<danda>[।॥]++{_CLOSERS})\s*+"  # Devanagari and its kin: neither
    rf"|(?P<stop>(?<!{_STOPS}){_STOPS}++{_CLOSERS})\s++"
)
_CLAUSE = re.compile(r"[、，；：]\s*+|[,;:،؛—–]\s++|(?<!\s)\s++[—–-]\s++")
_SPACE = re.compile(r"\s+")

# Words that a full stop does not end, in the languages that most text is in; compared in small letters.
# Short words that also end sentences ("no", "art", "sun") are left out.
_ABBREVIATION_WORDS = """
    mr mrs ms dr prof st jr sr rev gen col lt sgt capt vs etc al approx dept figs nos vol pp eds inc ltd corp
    jan feb apr jun jul aug sep sept oct nov dec tue thu e.g i.e a.m p.m u.s u.k ph.d cf ca op cit
    bzw bspw dgl ggf hr fr frl inkl insb mind nr sog str tel usw vgl z.b d.h u.a o.ä v.a i.d.r z.t s.o s.u abb abs bd bsp
    geb gest jh jhd kap mio mrd mm mme mmes mlle mgr p.ex c.-à-d env chap cie sté
    sra srta dña ud uds pág págs aprox núm sig sig.ra dott ing avv pag dhr mevr mw drs bijv o.a d.w.z enz evt blz
    г гг т.е т.д т.п т.к др пр ул стр рис тыс млн млрд
"""
_ABBREVIATIONS = frozenset(_ABBREVIATION_WORDS.split())


class SplitText(NamedTuple):
    """Parts of a text and the white space between them: alternated, they are the text again."""

    texts: list[str]
    gaps: list[str]  # one fewer than the texts


class _Span(NamedTuple):
    start: int
    end: int


def split_sentences(text: str) -> SplitText:
    """Cut text at the ends of its sentences."""
    return _to_split_text(text, _sentence_spans(text))


def split_long_text(text: str, fits: Callable[[str], bool]) -> SplitText:
    """Cut text into parts that fit: at sentence ends, then clause ends, then spaces, then between characters with their accents.

    A text that fits is one part. What is still too long, such as a letter under thousands of accents, is cut within; a single
    code point that does not fit stays, for nothing may be lost.
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
        end = match.end(match.lastgroup or 0)
        if text[start:end].strip():
            spans.append(_Span(start, end))
            start = match.end()
    return [*spans, _Span(start, len(text))]


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Tell whether a stop with a space after it ends a sentence."""
    following = text[match.end() : match.end() + 8].lstrip("\"'“‘«‹„‚([{¿¡-–— ")
    if following[:1].islower():
        return False
    stop = match["stop"]
    if not stop.startswith(".") or stop.startswith(".."):
        return True
    words = text[max(start, match.start() - 32) : match.start()].split()
    word = words[-1].lstrip("\"'“‘«‹„‚([{") if words else ""
    if word.isdecimal() and len(word) <= 2:
        return False  # "am 3. Mai": a day or a heading's number
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
    """Cut into single characters, each with the accents that belong to it."""
    start = span.start
    for place in range(span.start + 1, span.end):
        if (
            not unicodedata.combining(text[place])
            and text[place] not in "\u200d\ufe0f"
            and text[place - 1] != "\u200d"
        ):
            yield _Span(start, place)
            start = place
    yield _Span(start, span.end)


def _break_at_code_points(text: str, span: _Span) -> Iterator[_Span]:
    """Cut into single code points, for clusters that have more accents than fit."""
    return (_Span(place, place + 1) for place in range(span.start, span.end))


def _split_span(
    text: str,
    span: _Span,
    fits: Callable[[str], bool],
    levels: Sequence[Callable[[str, _Span], Iterator[_Span]]],
) -> Iterator[_Span]:
    """Cut a span at the first level's breaks, as many pieces together as fit; what is still too long at the next level's."""
    if not levels or fits(text[span.start : span.end]):
        yield span
        return
    pieces = list(levels[0](text, span))
    first = 0
    while first < len(pieces):
        last = _last_fitting(text, pieces, first, fits)
        if last < first:
            yield from _split_span(text, pieces[first], fits, levels[1:])
            last = first
        else:
            yield _Span(pieces[first].start, pieces[last].end)
        first = last + 1


def _last_fitting(text: str, pieces: list[_Span], first: int, fits: Callable[[str], bool]) -> int:
    """Find the last piece up to which everything from `first` fits together, doubling and halving; `first - 1` if none."""
    good, step = first - 1, 1
    while good + step < len(pieces) and fits(text[pieces[first].start : pieces[good + step].end]):
        good, step = good + step, step * 2
    while step > 1:
        step //= 2
        if good + step < len(pieces) and fits(text[pieces[first].start : pieces[good + step].end]):
            good += step
    return good


def _to_split_text(text: str, spans: Sequence[_Span]) -> SplitText:
    texts = [text[span.start : span.end] for span in spans]
    gaps = [text[before.end : after.start] for before, after in itertools.pairwise(spans)]
    return SplitText(texts, gaps)
