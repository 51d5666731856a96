"""Regular expressions as deterministic automata over Unicode characters.

A pattern is parsed to an expression, sets of characters are split into classes that no expression
tells apart, and the expression becomes a DFA by subset construction. The syntax is a subset of
Python's `re`, with the meaning of `re.fullmatch`; a test compares the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import ConfigError

MAX_CODE_POINT = 0x10FFFF
MAX_NFA_STATES = 10_000  # after counted repetitions were written out
MAX_DFA_STATES = 5_000
DEAD = 0  # the state of every DFA from which no string is accepted

BoolArray = NDArray[np.bool_]
StateArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """A set of code points: sorted, disjoint ranges, ends included."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> CharacterSet:
        """Return the union of ranges in any order."""
        joined = list[tuple[int, int]]()
        for low, high in sorted(ranges):
            if joined and low <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], high))
            else:
                joined.append((low, high))
        return cls(tuple(joined))

    @classmethod
    def of_characters(cls, characters: Iterable[str]) -> CharacterSet:
        """Return the set of these characters."""
        return cls.of((ord(each), ord(each)) for each in characters)

    @classmethod
    def where(cls, predicate: Callable[[str], bool]) -> CharacterSet:
        """Return the set of all characters for which a predicate holds."""
        is_member = np.fromiter(
            (predicate(chr(code)) for code in range(MAX_CODE_POINT + 1)), bool, MAX_CODE_POINT + 1
        )
        edges = np.flatnonzero(np.diff(np.concatenate([[False], is_member, [False]]).astype(int)))
        return cls(tuple((int(low), int(end) - 1) for low, end in edges.reshape(-1, 2)))

    def complement(self) -> CharacterSet:
        """Return all characters that are not in the set."""
        starts = [0, *(high + 1 for _, high in self.ranges)]
        ends = [*(low - 1 for low, _ in self.ranges), MAX_CODE_POINT]
        pairs = zip(starts, ends, strict=True)
        return CharacterSet(tuple((low, high) for low, high in pairs if low <= high))

    def union(self, other: CharacterSet) -> CharacterSet:
        """Return all characters that are in either set."""
        return CharacterSet.of([*self.ranges, *other.ranges])

    def intersect(self, other: CharacterSet) -> CharacterSet:
        """Return all characters that are in both sets."""
        return self.complement().union(other.complement()).complement()

    def __contains__(self, character: str) -> bool:
        """Whether a character is in the set."""
        return any(low <= ord(character) <= high for low, high in self.ranges)


ANY = CharacterSet(((0, MAX_CODE_POINT),))
NOT_NEWLINE = CharacterSet.of_characters("\n").complement()


@functools.cache
def word_characters() -> CharacterSet:
    r"""Return `\w`: letters, digits and the underscore."""
    return CharacterSet.where(lambda each: each.isalnum() or each == "_")


@functools.cache
def digits() -> CharacterSet:
    r"""Return `\d`: decimal digits of any script."""
    return CharacterSet.where(str.isdecimal)


@functools.cache
def whitespace() -> CharacterSet:
    r"""Return `\s`."""
    return CharacterSet.where(str.isspace)


@dataclass(frozen=True, slots=True)
class Characters:
    """Matches one character of a set."""

    members: CharacterSet


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Matches its parts one after the other; without parts, the empty string."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Matches the union of its choices."""

    choices: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches its part `least` to `most` times; None for any number of times."""

    part: Expression
    least: int
    most: int | None


Expression = Characters | Concatenation | Alternation | Repeat
EMPTY = Concatenation(())
ANYTHING = Repeat(Characters(ANY), 0, None)


def literal(text: str) -> Expression:
    """Return the expression that matches a text."""
    return Concatenation(tuple(Characters(CharacterSet.of_characters(each)) for each in text))


class _Parser:
    """Recursive descent over a pattern."""

    _ESCAPES: dict[str, str] = {  # noqa: RUF012
        "n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a",
    }  # fmt: skip
    _HEX_DIGITS: dict[str, int] = {"x": 2, "u": 4, "U": 8}  # noqa: RUF012

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def error(self, must: str, fix: str, at: int | None = None) -> ConfigError:
        """Return the error for a position of the pattern."""
        at = self.at if at is None else at
        found = repr(self.pattern[at : at + 8]) if at < len(self.pattern) else "the end"
        return ConfigError(
            [
                f"the regular expression {self.pattern!r:.100} {must}; "
                f"found {found} at position {at + 1}; {fix}"
            ]
        )

    def parse(self) -> Expression:
        """Parse the whole pattern."""
        whole = self._alternation()
        if self.at < len(self.pattern):
            raise self.error("must have an opening parenthesis for each closing one", "write \\)")
        return whole

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _accept(self, text: str) -> bool:
        if self.pattern.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def _alternation(self) -> Expression:
        choices = [self._concatenation()]
        while self._accept("|"):
            choices.append(self._concatenation())
        return choices[0] if len(choices) == 1 else Alternation(tuple(choices))

    def _concatenation(self) -> Expression:
        parts = list[Expression]()
        while self._peek() not in ("", "|", ")"):
            parts.append(self._repetition())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _repetition(self) -> Expression:
        part = self._atom()
        counts = self._quantifier()
        if counts is None:
            return part
        self._accept("?")  # lazy: the whole output is matched, so the same strings
        again = self.at
        if self._quantifier() is not None:
            raise self.error(
                "must not repeat a repetition", "put the inner one in parentheses", at=again
            )
        return Repeat(part, *counts)

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return counts
        if self._peek() != "{":
            return None
        end = self.pattern.find("}", self.at)
        least, comma, most = self.pattern[self.at + 1 : max(end, 0)].partition(",")
        is_count = all(not each or (each.isascii() and each.isdigit()) for each in (least, most))
        if end < 0 or not is_count or not (least or comma):
            return None  # as in Python: a brace that is no count is a literal
        low, high = int(least or 0), int(most) if most else (None if comma else int(least))
        if high is not None and high < low:
            raise self.error("must count up in {least,most}", f"write {{{high},{low}}}", at=self.at)
        self.at = end + 1
        return low, high

    def _atom(self) -> Expression:
        start, sign = self.at, self._peek()
        if sign in ("*", "+", "?") or (sign == "{" and self._is_count()):
            raise self.error("must have something before a repetition", f"write \\{sign}")
        self.at += 1
        if sign == "(":
            return self._group(start)
        if sign == "[":
            return Characters(self._class(start))
        if sign == ".":
            return Characters(NOT_NEWLINE)
        if sign in ("^", "$"):
            raise self.error(
                "must not hold anchors: it matches the whole output",
                f"drop it, or write \\{sign}",
                at=start,
            )
        if sign == "\\":
            return Characters(self._escape(start, in_class=False))
        return Characters(CharacterSet.of_characters(sign))

    def _is_count(self) -> bool:
        start = self.at
        try:
            return self._quantifier() is not None
        finally:
            self.at = start

    def _group(self, start: int) -> Expression:
        if self._accept("?:") or self._peek() != "?":
            inner = self._alternation()
            if not self._accept(")"):
                raise self.error("must close its parentheses", "add )", at=start)
            return inner
        raise self.error(
            "has groups ( ) and (?: ) only",
            "flags, names and look-around are not supported",
            at=start,
        )

    def _escape(self, start: int, *, in_class: bool) -> CharacterSet:
        sign = self._peek()
        self.at += 1
        if not sign:
            raise self.error("must not end in a backslash", "write \\\\", at=start)
        named = {"d": digits, "w": word_characters, "s": whitespace}
        if sign.lower() in named:
            members = named[sign.lower()]()
            return members.complement() if sign.isupper() else members
        if sign in self._HEX_DIGITS:
            code = self.pattern[self.at : self.at + self._HEX_DIGITS[sign]]
            is_hex = all(each in "0123456789abcdefABCDEF" for each in code)
            if len(code) < self._HEX_DIGITS[sign] or not is_hex or int(code, 16) > MAX_CODE_POINT:
                raise self.error(
                    f"needs {self._HEX_DIGITS[sign]} hexadecimal digits after \\{sign}",
                    "write a code point such as \\u6625",
                    at=start,
                )
            self.at += len(code)
            return CharacterSet.of_characters(chr(int(code, 16)))
        if in_class and sign == "b":
            return CharacterSet.of_characters("\b")
        if sign in self._ESCAPES:
            return CharacterSet.of_characters(self._ESCAPES[sign])
        if sign.isalnum() and sign.isascii():
            raise self.error(
                "has the escapes \\d \\w \\s \\n \\t \\r \\f \\v \\a \\x \\u and their like only",
                "boundaries, anchors and back-references are not supported",
                at=start,
            )
        return CharacterSet.of_characters(sign)

    def _class(self, start: int) -> CharacterSet:
        negated = self._accept("^")
        ranges = list[tuple[int, int]]()
        first = True
        while first or self._peek() != "]":
            first = False
            low_at, low = self.at, self._class_member(start)
            if self._peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._class_member(start)
                both = [each.ranges for each in (low, high)]
                if any(len(each) != 1 or each[0][0] != each[0][1] for each in both):
                    raise self.error(
                        "must have a character at each end of a range", "write \\-", at=low_at
                    )
                if both[1][0][0] < both[0][0][0]:
                    raise self.error("must count up in a range", "swap its ends", at=low_at)
                ranges.append((both[0][0][0], both[1][0][0]))
            else:
                ranges += low.ranges
        self.at += 1
        members = CharacterSet.of(ranges)
        return members.complement() if negated else members

    def _class_member(self, start: int) -> CharacterSet:
        at, sign = self.at, self._peek()
        if not sign:
            raise self.error("must close its brackets", "add ]", at=start)
        self.at += 1
        if sign == "\\":
            return self._escape(at, in_class=True)
        return CharacterSet.of_characters(sign)


def parse_pattern(pattern: str) -> Expression:
    """Return the expression of a pattern; raise ConfigError with the position of the error."""
    try:
        return _Parser(pattern).parse()
    except RecursionError:
        raise ConfigError(
            [
                "a regular expression must not nest its parentheses so deeply; "
                f"found {pattern.count('(')} of them in {pattern!r:.60}; simplify it"
            ]
        ) from None


class Alphabet:
    """Classes of characters that none of some sets tells apart; they partition all characters."""

    def __init__(self, sets: Iterable[CharacterSet]) -> None:
        distinct = list(dict.fromkeys([ANY, *sets]))
        starts = {0}
        for each in distinct:
            for low, high in each.ranges:
                starts |= {low, high + 1}
        self._starts = np.array(sorted(starts - {MAX_CODE_POINT + 1}), dtype=np.int64)
        members = np.stack([self._contains(each, self._starts) for each in distinct])
        _, first, classes = np.unique(members, axis=1, return_index=True, return_inverse=True)
        self._classes = classes.reshape(-1).astype(np.int64)  # of each range
        self._first_codes = self._starts[first]  # a member of each class
        self.size = len(first)

    @staticmethod
    def _contains(members: CharacterSet, codes: NDArray[np.int64]) -> BoolArray:
        edges = np.array([edge for low, high in members.ranges for edge in (low, high + 1)])
        return np.searchsorted(edges, codes, side="right") % 2 == 1

    def classes_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the class of each code point."""
        return self._classes[np.searchsorted(self._starts, codes, side="right") - 1]

    def class_of(self, character: str) -> int:
        """Return the class of a character."""
        return int(self.classes_of(np.array([ord(character)]))[0])

    def members(self, characters: CharacterSet) -> BoolArray:
        """Return which classes a set consists of, (M,); it must be one that the alphabet knows."""
        return self._contains(characters, self._first_codes)

    def counts_between(self, low: int, high: int) -> dict[int, int]:
        """Return the number of code points of each class from `low` to `high`."""
        counts = dict[int, int]()
        first = int(np.searchsorted(self._starts, low, side="right")) - 1
        for at in range(first, len(self._starts)):
            start = max(low, int(self._starts[at]))
            if start > high:
                break
            end = int(self._starts[at + 1]) - 1 if at + 1 < len(self._starts) else MAX_CODE_POINT
            number = int(self._classes[at])
            counts[number] = counts.get(number, 0) + min(high, end) - start + 1
        return counts


@dataclass(frozen=True, slots=True)
class DFA:
    """A deterministic automaton over the classes of an alphabet; state 0 is dead."""

    transitions: StateArray  # (S, M)
    accepts: BoolArray  # (S,)
    start: int

    def complement(self) -> DFA:
        """Return the automaton of all other strings."""
        return _minimize(DFA(self.transitions, ~self.accepts, self.start))

    def intersect(self, other: DFA) -> DFA:
        """Return the product automaton: strings that both accept."""
        pairs = {(self.start, other.start): 0}
        order = [(self.start, other.start)]
        rows = list[list[int]]()
        for left, right in order:  # grows while it is read
            row = list[int]()
            following = zip(
                self.transitions[left].tolist(), other.transitions[right].tolist(), strict=True
            )
            for pair in following:
                pair = (DEAD, DEAD) if DEAD in pair else pair
                if pair not in pairs:
                    pairs[pair] = len(order)
                    order.append(pair)
                    _check_states(len(order))
                row.append(pairs[pair])
            rows.append(row)
        accepts = [bool(self.accepts[left] and other.accepts[right]) for left, right in order]
        return _minimize(DFA(np.array(rows, np.int32), np.array(accepts), 0))


def _check_states(count: int) -> None:
    if count > MAX_DFA_STATES:
        raise ConfigError(
            [
                f"the constraints together must need at most {MAX_DFA_STATES:,} states; "
                "found more; shorten a counted repetition such as {1,500}, or require fewer words"
            ]
        )


def _minimize(dfa: DFA) -> DFA:
    """Return the least automaton of the same strings, by refining partitions (Moore 1956)."""
    labels = dfa.accepts.astype(np.int64)
    count = len(np.unique(labels))
    while True:
        rows = np.concatenate([labels[:, None], labels[dfa.transitions]], axis=1)
        _, first, labels = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        labels = labels.reshape(-1)
        if len(first) == count:
            break
        count = len(first)
    transitions, accepts = labels[dfa.transitions[first]], dfa.accepts[first]
    # The dead state, if there is one, rejects and leads to itself only.
    is_dead = ~accepts & (transitions == np.arange(count)[:, None]).all(axis=1)
    order = [int(labels[dfa.start])]
    for state in order:  # states that can be reached; grows while it is read
        order += [each for each in dict.fromkeys(transitions[state].tolist()) if each not in order]
    number = np.full(count, DEAD)
    live = [state for state in order if not is_dead[state]]
    number[live] = np.arange(1, len(live) + 1)
    dead_row = np.full((1, transitions.shape[1]), DEAD)
    return DFA(
        np.concatenate([dead_row, number[transitions[live]].reshape(-1, transitions.shape[1])])
        .astype(np.int32),
        np.concatenate([[False], accepts[live]]),
        int(number[labels[dfa.start]]),
    )  # fmt: skip


class _NFA:
    """States with labelled and with empty transitions, built from an expression."""

    def __init__(self, expression: Expression) -> None:
        self.labeled = list[list[tuple[CharacterSet, int]]]()
        self.empty = list[list[int]]()
        self.start = self._add()
        self.end = self._build(expression, self.start)

    def _add(self) -> int:
        if len(self.empty) >= MAX_NFA_STATES:
            raise ConfigError(
                [
                    f"a regular expression must need at most {MAX_NFA_STATES:,} positions; "
                    "found more; shorten a counted repetition such as {1,500}"
                ]
            )
        self.labeled.append([])
        self.empty.append([])
        return len(self.empty) - 1

    def _build(self, node: Expression, at: int) -> int:
        """Add the states of an expression that begins in a state; return the one where it ends."""
        if isinstance(node, Characters):
            end = self._add()
            self.labeled[at].append((node.members, end))
            return end
        if isinstance(node, Concatenation):
            for part in node.parts:
                at = self._build(part, at)
            return at
        end = self._add()
        if isinstance(node, Alternation):
            for choice in node.choices:
                start = self._add()
                self.empty[at].append(start)
                self.empty[self._build(choice, start)].append(end)
            return end
        for _ in range(node.least):
            at = self._build(node.part, at)
        if node.most is None:
            loop = self._add()
            self.empty[at].append(loop)
            self.empty[self._build(node.part, loop)].append(loop)
            self.empty[loop].append(end)
            return end
        for _ in range(node.most - node.least):
            self.empty[at].append(end)
            start = self._add()  # so that nothing leads back from within the part
            self.empty[at].append(start)
            at = self._build(node.part, start)
        self.empty[at].append(end)
        return end

    def closures(self) -> list[int]:
        """Return the states reached from each state by empty transitions, as bits."""
        closures = list[int]()
        for state in range(len(self.empty)):
            seen, waiting = 1 << state, [state]
            while waiting:
                for other in self.empty[waiting.pop()]:
                    if not seen >> other & 1:
                        seen |= 1 << other
                        waiting.append(other)
            closures.append(seen)
        return closures


def collect_sets(node: Expression) -> Iterator[CharacterSet]:
    """Yield the sets of characters of an expression."""
    if isinstance(node, Characters):
        yield node.members
    elif isinstance(node, Repeat):
        yield from collect_sets(node.part)
    else:
        for part in node.parts if isinstance(node, Concatenation) else node.choices:
            yield from collect_sets(part)


def build_dfa(expression: Expression, alphabet: Alphabet) -> DFA:
    """Return the least automaton of an expression; the alphabet must know its sets."""
    nfa = _NFA(expression)
    closures = nfa.closures()
    members = {each: alphabet.members(each) for row in nfa.labeled for each, _ in row}
    moves = [
        [(np.flatnonzero(members[each]).tolist(), closures[target]) for each, target in row]
        for row in nfa.labeled
    ]
    start = closures[nfa.start]
    numbers, order, rows = {start: 0}, [start], list[list[int]]()
    for subset in order:  # grows while it is read
        reached = [0] * alphabet.size
        for state in _bits(subset):
            for classes, target in moves[state]:
                for each in classes:
                    reached[each] |= target
        for each in reached:
            if each not in numbers:
                numbers[each] = len(order)
                order.append(each)
                _check_states(len(order))
        rows.append([numbers[each] for each in reached])
    accepts = np.array([bool(subset >> nfa.end & 1) for subset in order])
    return _minimize(DFA(np.array(rows, np.int32), accepts, 0))


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def matches(dfa: DFA, classes: Sequence[int]) -> bool:
    """Whether the automaton accepts a string, given as the classes of its characters."""
    state = dfa.start
    for each in classes:
        state = int(dfa.transitions[state, each])
    return bool(dfa.accepts[state])
