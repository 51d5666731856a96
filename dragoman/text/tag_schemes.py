"""Tag schemes: how spans, such as chunks and entities, are written as one tag per token.

    IOB1    B-X only where a span follows another of its type, I-X otherwise
    IOB2    B-X starts a span, I-X continues it (also called BIO)
    IOBES   also E-X for a span's last token and S-X for a span of one token (BIOES, BILOU)
    BMES    B, M, E, S: words as spans of characters, without O
    plain   any labels, such as parts of speech; there are no spans

Ramshaw and Marcus (1995); Tjong Kim Sang and Veenstra (1999).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

OUTSIDE = "O"
_MAX_MISFITS = 0.1  # for each tag with a type: more are no mistakes
SCHEMES = ("plain", "iob1", "iob2", "iobes", "bmes")
# Other letters for the same positions in a span: BMES and BILOU.
_PREFIXES = {"B": "B", "I": "I", "M": "I", "E": "E", "L": "E", "S": "S", "U": "S"}


class Span(NamedTuple):
    """Tokens from `start` up to, but not including, `end`, of one type."""

    start: int
    end: int
    type: str


def split_tag(tag: str) -> tuple[str, str]:
    """Return the prefix B, I, E, S or O of a tag, and its type; the type of "B" is empty."""
    prefix, _, kind = tag.partition("-")
    return (OUTSIDE, "") if tag == OUTSIDE else (_PREFIXES.get(prefix, prefix), kind)


def is_span_tag(tag: str) -> bool:
    """Whether a tag is O, or a prefix with or without a type."""
    prefix, dash, kind = tag.partition("-")
    return tag == OUTSIDE or (prefix in _PREFIXES and (bool(kind) or not dash))


def find_spans(tags: Sequence[str]) -> list[Span]:
    """Return the spans of a tag sequence as conlleval finds them, in order.

    Illegal sequences are repaired: a span also starts at an I or E after O, after a span of another
    type, or after an E or S. For IOB1 and IOB2 these are the rules of the Perl script of
    CoNLL-2000; B and S after E, where the script continues the span, start one here.
    """
    spans: list[Span] = []
    start, open_type, previous = 0, "", OUTSIDE
    for position, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        continues = prefix in ("I", "E") and previous in ("B", "I") and kind == open_type
        if previous != OUTSIDE and not continues:
            spans.append(Span(start, position, open_type))
        if prefix != OUTSIDE and not continues:
            start, open_type = position, kind
        previous = prefix
    return spans


def write_tags(spans: Iterable[Span], length: int, scheme: str) -> list[str]:
    """Return the tags of `length` tokens for spans that do not overlap."""
    tags = [OUTSIDE] * length
    last: Span | None = None
    for span in sorted(spans):
        follows = last is not None and last.end == span.start and last.type == span.type
        prefixes = _WRITERS[scheme](span.end - span.start, follows)
        suffix = f"-{span.type}" if span.type else ""
        tags[span.start : span.end] = [prefix + suffix for prefix in prefixes]
        last = span
    return tags


def write_word_tags(words: Iterable[str]) -> list[str]:
    """Return the BMES tags of the characters of words."""
    return [tag for word in words for tag in _write_bmes(len(word), False)]


def _write_iob1(length: int, follows: bool) -> str:
    return ("B" if follows else "I") + "I" * (length - 1)


def _write_iob2(length: int, follows: bool) -> str:
    return "B" + "I" * (length - 1)


def _write_iobes(length: int, follows: bool) -> str:
    return "S" if length == 1 else "B" + "I" * (length - 2) + "E"


def _write_bmes(length: int, follows: bool) -> str:
    return "S" if length == 1 else "B" + "M" * (length - 2) + "E"


_WRITERS: dict[str, Callable[[int, bool], str]] = {
    "iob1": _write_iob1,
    "iob2": _write_iob2,
    "iobes": _write_iobes,
    "bmes": _write_bmes,
}


def convert_tags(tags: Sequence[str], scheme: str) -> list[str]:
    """Return the tags of the same spans in another scheme."""
    return write_tags(find_spans(tags), len(tags), scheme)


class SchemeDetector:
    """Finds the scheme that tag sequences are written in, from all of them."""

    def __init__(self) -> None:
        self._prefixes: set[str] = set()
        self._num_typed = 0
        self._misfits: Counter[str] = Counter()  # neither O nor a prefix with a type
        self._is_plain = False
        self._has_typeless = False
        self._starts_with_inside = False

    def add(self, tags: Sequence[str]) -> None:
        """Add the tags of a sentence."""
        previous = OUTSIDE
        for tag in tags:
            prefix, dash, kind = tag.partition("-")
            is_span = is_span_tag(tag)
            self._num_typed += is_span and bool(dash)
            if tag != OUTSIDE and not (is_span and dash):
                self._misfits[tag] += 1
            self._is_plain |= not is_span
            self._prefixes.add(prefix)
            self._has_typeless |= tag != OUTSIDE and not dash
            if prefix == "I" and previous.partition("-")[2] != kind:
                self._starts_with_inside = True
            previous = tag

    def scheme(self) -> str:
        """Return the scheme; "plain" if the tags are no spans."""
        inner = self._prefixes - {OUTSIDE}
        if self._is_plain or not inner:
            return "plain"
        if self._has_typeless:  # labels that happen to be single letters are no words
            return "bmes" if inner <= set("BMES") and OUTSIDE not in self._prefixes else "plain"
        if inner <= {"B", "I"}:
            return "iob1" if self._starts_with_inside else "iob2"
        return "iobes"

    def misfits(self) -> list[str]:
        """Return the tags for which the scheme is "plain" where nearly all others are of spans."""
        is_rare = self._misfits.total() < _MAX_MISFITS * self._num_typed
        return [tag for tag, _ in self._misfits.most_common()] if is_rare else []


def allowed_pairs(labels: Sequence[str]) -> tuple[list[bool], list[list[bool]], list[bool]]:
    """Return which IOBES or BMES labels may start, follow each other (row to column), and end."""
    parts = [split_tag(label) for label in labels]
    start = [prefix in ("B", "S", OUTSIDE) for prefix, _ in parts]
    end = [prefix in ("E", "S", OUTSIDE) for prefix, _ in parts]
    follow = [
        [
            prefix in ("I", "E") and kind == before_kind
            if before in ("B", "I")
            else prefix in ("B", "S", OUTSIDE)
            for prefix, kind in parts
        ]
        for before, before_kind in parts
    ]
    return start, follow, end
