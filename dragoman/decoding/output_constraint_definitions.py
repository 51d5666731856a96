"""Constraints on generated text, each with a plain predicate that defines it.

`EqualLength`, `Mirror`, `NoCopy` and `Punctuation` compare the output with its source, character by
character; `Require`, `Forbid` and `Regex` look at the output alone. `constraint_automaton.py`
compiles any number of them to one automaton over tokens, which no search can leave, and
`ConstrainedRows.mask` in `constrained_logits.py` applies it to the logits. `holds` is the
definition: tests compare the automaton with it, and evaluation counts violations by it.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dragoman.decoding.regex_to_dfa import (
    ANYTHING,
    EMPTY,
    Alternation,
    Characters,
    CharacterSet,
    Concatenation,
    Expression,
    literal,
    parse_pattern,
    word_characters,
)
from dragoman.errors import ConfigError, suggest_name

# Scripts written without spaces between words, where a word has no boundaries to respect.
_UNSPACED_SCRIPTS = CharacterSet.of(
    [
        (0x0E00, 0x0EFF),  # Thai, Lao
        (0x0F00, 0x109F),  # Tibetan, Burmese
        (0x1780, 0x17FF),  # Khmer
        (0x2E80, 0xA4CF),  # Chinese, Japanese, Yi
        (0xAC00, 0xD7FF),  # Korean, whose particles follow a word without a space
        (0xF900, 0xFAFF),  # Chinese, compatibility forms
        (0xFF66, 0xFFDC),  # Japanese and Korean, half width
        (0x1B000, 0x1B2FF),  # Japanese, historic
        (0x20000, 0x3FFFF),  # Chinese, rare characters
    ]
)


@functools.cache
def is_mark(character: str) -> bool:
    """Whether a character is punctuation or white space: no character of a verse."""
    return character.isspace() or unicodedata.category(character).startswith("P")


@functools.cache
def mark_characters() -> CharacterSet:
    """Return the set of all marks."""
    return CharacterSet.where(
        lambda each: each.isspace() or unicodedata.category(each).startswith("P")
    )


class Constraint(ABC):
    """A condition that every output must fulfil."""

    name: ClassVar[str]  # what users write

    @abstractmethod
    def holds(self, source: str, output: str) -> bool:
        """Whether an output fulfils the constraint."""

    @property
    def label(self) -> str:
        """The constraint as messages and JSON name it."""
        return self.name

    def describe(self, source: str) -> str:
        """Return the constraint with its requirement for a source, for an error message."""
        return self.label

    def expressions(self) -> Iterable[tuple[Expression, bool]]:
        """Yield expressions over the output, each with whether it must match or must not."""
        return ()

    @property
    def words(self) -> Sequence[str]:
        """The texts that must occur in the output."""
        return ()

    def normalized(self, normalize: Callable[[str], str]) -> Constraint:
        """Return the constraint with its words in the normalization form of the output."""
        return self


@dataclass(frozen=True, slots=True)
class EqualLength(Constraint):
    """The output has as many characters as the source."""

    name = "equal_length"

    def holds(self, source: str, output: str) -> bool:
        """Whether both have the same number of characters."""
        return len(source) == len(output)

    def describe(self, source: str) -> str:
        """Return the name with the length."""
        return f"{self.name} ({len(source)} characters)"


@dataclass(frozen=True, slots=True)
class Mirror(Constraint):
    """Where the source repeats a character, the output repeats one; marks are left aside."""

    name = "mirror"

    def holds(self, source: str, output: str) -> bool:
        """Whether positions that are equal in the source are equal in the output."""
        answer = dict[str, str]()
        return all(
            answer.setdefault(first, second) == second
            for first, second in zip(source, output, strict=False)
            if not is_mark(first)
        )


@dataclass(frozen=True, slots=True)
class NoCopy(Constraint):
    """No character of the source, and none twice but where the source repeats; marks may be."""

    name = "no_copy"

    def holds(self, source: str, output: str) -> bool:
        """Whether no character is copied from the source or from elsewhere in the output."""
        written = dict[str, object]()  # the source's character, or the position after its end
        return all(
            second not in source and written.setdefault(second, first) == first
            for first, second in zip([*source, *range(len(output))], output, strict=False)
            if not is_mark(second)
        )


@dataclass(frozen=True, slots=True)
class Punctuation(Constraint):
    """Punctuation and spaces of the source at the same positions, and none elsewhere."""

    name = "punctuation"

    def holds(self, source: str, output: str) -> bool:
        """Whether both have the same marks at the same positions."""
        return [(at, each) for at, each in enumerate(source) if is_mark(each)] == [
            (at, each) for at, each in enumerate(output) if is_mark(each)
        ]


@dataclass(frozen=True, slots=True)
class _Words(Constraint):
    """A constraint on words: where letters of a spaced script end one, no such letter follows."""

    given: tuple[str, ...]

    def __init__(self, words: str | Iterable[str]) -> None:
        given = (words,) if isinstance(words, str) else tuple(words)
        wrong = [each for each in given if not isinstance(each, str) or not each.strip()]
        if wrong or not given:
            raise ConfigError(
                [
                    f"{self.name} needs words; found {wrong[0]!r:.60}; leave it out"
                    if wrong
                    else f"{self.name} needs at least one word; found none; leave it out"
                ]
            )
        object.__setattr__(self, "given", given)

    def normalized(self, normalize: Callable[[str], str]) -> _Words:
        """Return the constraint with normalized words."""
        return type(self)(map(normalize, self.given))

    @property
    def label(self) -> str:
        """The name and the words."""
        return " ".join([self.name, *self.given])


class Require(_Words):
    """Every one of these words occurs in the output."""

    __slots__ = ()
    name = "require"

    @property
    def words(self) -> tuple[str, ...]:
        """The words."""
        return self.given

    def holds(self, source: str, output: str) -> bool:
        """Whether all words occur."""
        return all(contains_word(output, each) for each in self.given)

    def expressions(self) -> Iterable[tuple[Expression, bool]]:
        """Yield one expression for each word."""
        return ((_containing([each]), True) for each in self.given)


class Forbid(_Words):
    """None of these words occurs in the output."""

    __slots__ = ()
    name = "forbid"

    def holds(self, source: str, output: str) -> bool:
        """Whether no word occurs."""
        return not any(contains_word(output, each) for each in self.given)

    def expressions(self) -> Iterable[tuple[Expression, bool]]:
        """Yield one expression for all words, which must not match."""
        return [(_containing(self.given), False)]


@dataclass(frozen=True, slots=True)
class Regex(Constraint):
    """The whole output matches a regular expression."""

    pattern: str
    name = "regex"

    def __post_init__(self) -> None:
        """Raise ConfigError with the position of the error in the pattern."""
        if not isinstance(self.pattern, str):
            raise ConfigError(
                [f"regex needs a pattern; found {self.pattern!r:.60}; write it in quotes"]
            )
        parse_pattern(self.pattern)

    @property
    def label(self) -> str:
        """The name and the pattern."""
        return f"{self.name} {self.pattern}"

    def holds(self, source: str, output: str) -> bool:
        """Whether Python's `re` matches the whole output."""
        return re.fullmatch(self.pattern, output) is not None

    def expressions(self) -> Iterable[tuple[Expression, bool]]:
        """Yield the expression."""
        return [(parse_pattern(self.pattern), True)]


@functools.cache
def _spaced_letters() -> CharacterSet:
    """Return letters and digits of scripts that separate words by spaces."""
    return word_characters().intersect(_UNSPACED_SCRIPTS.complement())


def _is_spaced_letter(character: str) -> bool:
    return (character.isalnum() or character == "_") and character not in _UNSPACED_SCRIPTS


def contains_word(text: str, word: str) -> bool:
    """Whether a word occurs in a text, not within a longer word of a script with spaces."""
    at = text.find(word)
    while at >= 0:
        before, after = text[max(at - 1, 0) : at], text[at + len(word) :][:1]
        if not (before and _is_spaced_letter(word[0]) and _is_spaced_letter(before)) and not (
            after and _is_spaced_letter(word[-1]) and _is_spaced_letter(after)
        ):
            return True
        at = text.find(word, at + 1)
    return False


def _containing(words: Sequence[str]) -> Expression:
    """Return the expression of all texts that contain one of some words.

    What follows a word is written once: an automaton would else remember which words occurred.
    """
    other = Characters(_spaced_letters().complement()) if any(map(_has_edge, words)) else EMPTY

    def ending(word: str) -> Expression:
        before = (
            Alternation((EMPTY, Concatenation((ANYTHING, other))))
            if _is_spaced_letter(word[0])
            else ANYTHING
        )
        return Concatenation((before, literal(word)))

    spaced = [ending(each) for each in words if _is_spaced_letter(each[-1])]
    others = [ending(each) for each in words if not _is_spaced_letter(each[-1])]
    bounded = Alternation(tuple(spaced))
    anywhere = Alternation((*others, Concatenation((bounded, other))) if spaced else (*others,))
    followed = Concatenation((anywhere, ANYTHING))
    return Alternation((followed, bounded)) if spaced else followed


def _has_edge(word: str) -> bool:
    return _is_spaced_letter(word[0]) or _is_spaced_letter(word[-1])


SOURCE_CONSTRAINTS: Mapping[str, type[Constraint]] = {
    each.name: each for each in (EqualLength, Mirror, NoCopy, Punctuation)
}


def constraint_problems(constraints: Any) -> Iterator[str]:
    """Yield the problems of the constraints of a call: they must be a list of Constraint."""
    is_list = isinstance(constraints, Collection) and not isinstance(constraints, str)
    if not is_list or not all(isinstance(each, Constraint) for each in constraints):
        yield (
            "constraints must be a list of constraints; "
            f"found {constraints!r:.80}; write [EqualLength(), Forbid(['…'])]"
        )


def parse_constraints(
    names: Iterable[str] = (),
    *,
    require: Iterable[str] = (),
    forbid: Iterable[str] = (),
    regex: Iterable[str] = (),
) -> tuple[Constraint, ...]:
    """Return constraints by their names on the command line; raise ConfigError for unknown ones."""
    names, require, forbid = list(names), list(require), list(forbid)
    wrong = [each for each in names if each.replace("-", "_") not in SOURCE_CONSTRAINTS]
    if wrong:
        raise ConfigError(
            [
                f"a constraint must be {', '.join(SOURCE_CONSTRAINTS)}; found {each!r:.60}; "
                f"{suggest_name(each, SOURCE_CONSTRAINTS, listed=True)}"
                for each in wrong
            ]
        )
    chosen = [SOURCE_CONSTRAINTS[each.replace("-", "_")]() for each in names]
    chosen += [Require(require)] if require else []
    chosen += [Forbid(forbid)] if forbid else []
    return (*dict.fromkeys(chosen), *map(Regex, regex))
