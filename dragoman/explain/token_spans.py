"""Spans of tokens, which tile their text; words, graphemes and direction."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

import regex  # type: ignore[import-untyped]

from dragoman.explain.explanation import Token, TokenizedText
from dragoman.text.sentencepiece_tokenizer import Tokenizer, escape_space_marks
from dragoman.text.special_tokens import BOS, EOS, PAD, byte_of_token

_GRAPHEME = regex.compile(r"\X")
# Scripts without spaces between words: each token is a word of its own.
_UNSPACED = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"
)
_WORD_CHARACTER = regex.compile(r"[\p{L}\p{M}\p{N}\p{Cf}_'’]")
_CONTROL_CHARACTERS = dict.fromkeys([*range(32), 127], " ")
_MAX_SKIPPED = 256  # characters that a tokenizer may drop or normalize away between two tokens
_SPECIAL_IDS = (PAD, BOS, EOS)
_RTL_LANGUAGES = frozenset(
    [
        "ar",
        "arc",
        "ckb",
        "dv",
        "fa",
        "he",
        "iw",
        "ks",
        "ku",
        "nqo",
        "pnb",
        "ps",
        "sd",
        "syr",
        "ug",
        "ur",
        "yi",
    ]
)


def tokenize_text(
    tokenizer: Tokenizer, text: str, ids: Sequence[int], *, lang: str = ""
) -> TokenizedText:
    """Return a text with its tokens, whose spans tile it in order, and its words.

    A grapheme belongs to the token that begins it; further tokens of it, such as the other bytes of
    a character, have an empty span at its end. `text` is the normalized input or the decoded output
    of `ids`; special tokens have empty spans too.
    """
    texts = token_texts(tokenizer, ids)
    special = {*_SPECIAL_IDS, *tokenizer.tag_ids.values()}
    spans = find_token_spans(text, texts, [int(each) in special for each in ids])
    ranks = tokenizer.frequency_ranks
    tokens = [
        Token(
            id=int(each),
            text=token,
            span=span,
            special=int(each) in special,
            rank=None if each < len(_SPECIAL_IDS) + 1 else ranks[each],
        )
        for each, token, span in zip(ids, texts, spans, strict=True)
    ]
    return TokenizedText(
        text=text,
        dir=text_direction(text, lang),
        lang=lang,
        tokens=tokens,
        words=find_words(text, tokens),
    )


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the texts of tokens without SentencePiece's mark: a space is " "."""
    return [token.replace("\u2581", " ") for token in tokenizer.tokens(ids)]


def find_token_spans(
    text: str, tokens: Sequence[str], special: Sequence[bool]
) -> list[tuple[int, int]]:
    """Return the spans of tokens, which tile the text in order and split no grapheme."""
    prepared = escape_space_marks(text).translate(_CONTROL_CHARACTERS)
    to_text = _escaped_positions(text)
    first = next((token for token, skip in zip(tokens, special, strict=True) if not skip), "")
    if first.startswith(" "):  # SentencePiece puts a space before the first token
        prepared, to_text = f" {prepared}", [0, *to_text]
    ends = _find_ends(prepared, tokens, special)
    edges = grapheme_ends(text)
    last = max((at for at, is_special in enumerate(special) if not is_special), default=-1)
    spans, start = list[tuple[int, int]](), 0
    for at, found in enumerate(ends):
        end = len(text) if at == last else edges[to_text[found]]
        end = max(start, start if special[at] else end)
        spans.append((start, end))
        start = end
    return spans


def _find_ends(text: str, tokens: Sequence[str], special: Sequence[bool]) -> list[int]:
    """Return where each token ends in a text; a token that is not there ends where it begins."""
    ends, at = list[int](), 0
    waiting = list[int]()  # unknown tokens, which get the text before the next known one
    rest = b""  # of a character: the bytes after those that tokens had
    for number, token in enumerate(tokens):
        if special[number]:
            ends.append(at)
            continue
        if (byte := byte_of_token(token)) is not None:
            at, rest = _match_byte(text, at, bytes([byte]), rest)
            ends.append(at)
            continue
        rest = b""
        if token == "<unk>":
            waiting.append(number)
            ends.append(at)
            continue
        surface = token.translate(_CONTROL_CHARACTERS)
        begin, end = _find_surface(text, at, surface, skip=bool(waiting))
        if end > at or not surface:
            for index, unknown in enumerate(waiting):
                ends[unknown] = begin if index == len(waiting) - 1 else min(begin, at + index + 1)
            waiting = []
            at = max(at, end)
        ends.append(at)
    for index, unknown in enumerate(waiting):
        ends[unknown] = min(len(text), at + index + 1)
    return _monotone(ends)


def _find_surface(text: str, at: int, surface: str, *, skip: bool) -> tuple[int, int]:
    """Return where a token's surface begins and ends; (at, at) if it is not found."""
    if text.startswith(surface, at) and not (skip and not surface.strip()):
        return at, at + len(surface)
    bare = surface.lstrip(" ")
    if not bare:
        return at, at
    candidates = [
        (found, found + len(wanted))
        for wanted in (surface, bare)
        if (found := text.find(wanted, at, at + _MAX_SKIPPED + len(wanted))) >= 0
    ]
    return min(candidates, default=(at, at))


def _match_byte(text: str, at: int, byte: bytes, rest: bytes) -> tuple[int, bytes]:
    """Return where a byte token ends, and the bytes of its character that are still to come.

    The first byte takes the whole character. A byte that is no text was decoded as U+FFFD, and one
    that is a control character may have been replaced by a space.
    """
    if rest.startswith(byte):
        return at, rest[1:]
    if at >= len(text):
        return at, b""
    character = text[at].encode("utf-8", "surrogatepass")
    if character.startswith(byte):
        return at + 1, character[1:]
    is_replaced = text[at] == "\ufffd" or (text[at] == " " and byte < b" ")
    return at + is_replaced, b""


def _monotone(ends: Sequence[int]) -> list[int]:
    """Return the ends in ascending order."""
    result, largest = list[int](), 0
    for end in ends:
        largest = max(largest, end)
        result.append(largest)
    return result


def _escaped_positions(text: str) -> list[int]:
    """Return for each position of the escaped text the position in the text."""
    positions = list[int]()
    for at, char in enumerate(text):
        positions += [at] * len(escape_space_marks(char))
    return [*positions, len(text)]


def grapheme_ends(text: str) -> list[int]:
    """Return for each position the next border of a grapheme: itself if it is one."""
    ends = [0]
    for found in _GRAPHEME.finditer(text):
        ends += [found.end()] * (found.end() - found.start())
    return ends


def find_words(text: str, tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Return the ranges of tokens that form words; special tokens are in none."""
    words = list[tuple[int, int]]()
    for at, token in enumerate(tokens):
        if token.special:
            continue
        previous = tokens[at - 1] if at and not tokens[at - 1].special else None
        if previous is not None and words and _joins(text, previous, token):
            words[-1] = (words[-1][0], at + 1)
        else:
            words.append((at, at + 1))
    return words


def _joins(text: str, previous: Token, token: Token) -> bool:
    """Whether a token continues the word of the one before it."""
    start, end = token.span
    if start == end:  # another byte or mark of the same grapheme
        return True
    if not previous.text.strip():  # a space that is a token of its own
        return True
    before, after = text[start - 1], text[start]
    return (
        _WORD_CHARACTER.match(before) is not None
        and _WORD_CHARACTER.match(after) is not None
        and not (_UNSPACED.match(before) and _UNSPACED.match(after))
    )


def text_direction(text: str, lang: str = "") -> Literal["ltr", "rtl"]:
    """Return the direction of the first character that has one, else that of the language."""
    for char in text:
        direction = unicodedata.bidirectional(char)
        if direction == "L":
            return "ltr"
        if direction in ("R", "AL"):
            return "rtl"
    return "rtl" if lang and _language_code(lang) in _RTL_LANGUAGES else "ltr"


@functools.cache
def _language_code(tag: str) -> str:
    """Return the language of a tag: "ar" of "ar-EG"."""
    return re.split(r"[-_]", tag.lower())[0]
