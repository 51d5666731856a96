"""Regular expressions against Python's `re`, on random patterns and strings."""

from __future__ import annotations

import random
import re

import pytest

from dragoman.decoding.regex_to_dfa import (
    Alphabet,
    CharacterSet,
    build_dfa,
    collect_sets,
    matches,
    parse_pattern,
)
from dragoman.errors import ConfigError

ATOMS = ["a", "b", "c", "春", ".", "[ab]", "[^a春]", r"\d", r"\w", "[a-c]", r"\.", r"\s", "1"]
ATOMS += [r"[\d\-x]", r"\W", r"\u6625", r"\x61", r"[^\s]", "[]a]", "[a-]", "，"]
REPEATS = ["*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "{0}", "{0,0}", "+?", "??"]


def random_pattern(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(ATOMS)
    one, other = random_pattern(rng, depth - 1), random_pattern(rng, depth - 1)
    if kind < 0.5:
        return one + other
    if kind < 0.65:
        return f"({one}|{other})"
    if kind < 0.7:
        return f"(?:{one}|)"
    return f"(?:{one}){rng.choice(REPEATS)}"


@pytest.mark.parametrize("seed", range(4))
def test_random_patterns_match_the_same_texts_as_in_python(seed: int) -> None:
    rng = random.Random(seed)
    matched = 0
    for _ in range(250):
        pattern = random_pattern(rng, 3)
        expression = parse_pattern(pattern)
        alphabet = Alphabet(collect_sets(expression))
        dfa = build_dfa(expression, alphabet)
        complement, both = dfa.complement(), dfa.intersect(dfa)
        for _ in range(30):
            text = "".join(rng.choice("abc春1. x-\n夏，]") for _ in range(rng.randrange(6)))
            classes = [alphabet.class_of(each) for each in text]
            expected = re.fullmatch(pattern, text) is not None
            assert matches(dfa, classes) is expected, (pattern, text)
            assert matches(complement, classes) is not expected
            assert matches(both, classes) is expected
            matched += expected
    assert matched > 300


@pytest.mark.parametrize(
    "pattern",
    ["a{", "a{x}", "a{,}", "{a", "]", "}", "[]a]", "[a-]", "[-a]", "a{1", "[^]]", "", "a|"],
)
def test_characters_without_syntax_are_literals_as_in_python(pattern: str) -> None:
    expression = parse_pattern(pattern)
    alphabet = Alphabet(collect_sets(expression))
    dfa = build_dfa(expression, alphabet)
    for text in ["a{", "a{x}", "aa", "{a", "]", "}", "a", "-", "", "a{1", "b", "ab"]:
        expected = re.fullmatch(pattern, text) is not None
        assert matches(dfa, [alphabet.class_of(each) for each in text]) is expected


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"\a", "\aa"),
        (r"\f|\v", "\f\vfv"),
        (r"\n|\r", "\n\rnr"),
        (r"\t", "\tt\n"),
        (r"[\b]", "\bb"),
        (r"\U00006625", "春夏"),
        (r"\U0010FFFF", "\U0010ffff\U0010fffe"),
        (r"\é|\，|\_", "é，_e"),
        (r"\d", "7٣²½x"),
        (r"\D", "7٣²½x"),
        (r"\w", "aé春_7²-‿"),
        (r"\W", "aé春_7²-‿"),
        (r"\s", " \t\n\u3000\xa0\u200b"),
        (r"\S", " \t\n\u3000\xa0\u200b"),
        (r".", "a\n\r\u2028\U0010ffff"),
        ("[a-gc-d]", "abcdefgh"),
        ("[c-da-g]", "abcdefgh"),
        ("[a-cd-f]", "abcdefgh"),
        ("[^a-ce-f]", "abcdefgh"),
        ("[a-c-e]", "abcde-"),
        (r"[\w-]", "a-+"),
        ("[^]^]", "]^a"),
        ("[(.*+?)]", "(.*+?)a"),
    ],
)
def test_a_set_holds_the_characters_that_it_holds_in_python(pattern: str, texts: str) -> None:
    expression = parse_pattern(pattern)
    alphabet = Alphabet(collect_sets(expression))
    dfa = build_dfa(expression, alphabet)
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        assert matches(dfa, [alphabet.class_of(text)]) is expected, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a(b", "must close its parentheses; found '(b' at position 2"),
        ("a)", "must have an opening parenthesis for each closing one; found ')' at position 2"),
        ("[a", "must close its brackets; found '[a' at position 1"),
        ("a|*b", "must have something before a repetition; found '*b' at position 3"),
        ("a{2}{3}", "must not repeat a repetition; found '{3}' at position 5"),
        ("春{3,1}", "must count up in {least,most}; found '{3,1}' at position 2; write {1,3}"),
        (r"(a)\1", r"found '\\1' at position 4; boundaries, anchors and back-references"),
        ("a(?=b)", "has groups ( ) and (?: ) only; found '(?=b)' at position 2"),
        ("a\\", "must not end in a backslash"),
        ("[z-a]", "must count up in a range; found 'z-a]' at position 2"),
        (r"[\d-z]", "must have a character at each end of a range"),
        (r"x\u12", "needs 4 hexadecimal digits after \\u; found '\\\\u12' at position 2"),
        (r"\x4g", "needs 2 hexadecimal digits after \\x"),
        (r"\U00110000", "needs 8 hexadecimal digits after \\U"),
        (r"\b", "boundaries, anchors and back-references are not supported"),
        (r"a\q", r"found '\\q' at position 2"),
        ("a$", "must not hold anchors: it matches the whole output; found '$' at position 2"),
        ("+a", "must have something before a repetition; found '+a' at position 1"),
        ("a|{2}", "must have something before a repetition; found '{2}' at position 3"),
        ("a*+", "must not repeat a repetition; found '+' at position 3"),
        ("^a", "must not hold anchors: it matches the whole output; found '^a' at position 1"),
        ("(" * 3000, "must not nest its parentheses so deeply; found 3000 of them"),
    ],
)
def test_an_error_points_at_the_position(pattern: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pattern(pattern)
    assert found in str(caught.value)


def test_too_many_states_are_an_error() -> None:
    expression = parse_pattern(".*a.{20}")  # remembers the last twenty characters
    with pytest.raises(ConfigError, match="at most 5,000 states; found more"):
        build_dfa(expression, Alphabet(collect_sets(expression)))
    expression = parse_pattern("(?:a{100}){200}")
    with pytest.raises(ConfigError, match="at most 10,000 positions; found more"):
        build_dfa(expression, Alphabet(collect_sets(expression)))


def test_sets_of_characters() -> None:
    vowels = CharacterSet.of_characters("aeiou")
    assert "e" in vowels
    assert "f" not in vowels
    assert vowels.complement().complement() == vowels
    assert vowels.intersect(CharacterSet.of([(ord("a"), ord("h"))])) == CharacterSet.of_characters(
        "ae"
    )
    assert CharacterSet.where(str.isdecimal).ranges[0] == (48, 57)


def test_classes_partition_the_characters() -> None:
    sets = [CharacterSet.of_characters("abc"), CharacterSet.of_characters("bcd春")]
    alphabet = Alphabet(sets)
    assert alphabet.size == 4  # {a}, {b, c}, {d, 春} and all others
    assert alphabet.class_of("b") == alphabet.class_of("c") != alphabet.class_of("a")
    assert alphabet.class_of("d") == alphabet.class_of("春")
    counts = alphabet.counts_between(ord("a"), ord("e"))
    assert counts == {
        alphabet.class_of("a"): 1,
        alphabet.class_of("b"): 2,
        alphabet.class_of("d"): 1,
        alphabet.class_of("e"): 1,
    }
    assert sum(alphabet.counts_between(0, 0x10FFFF).values()) == 0x110000
