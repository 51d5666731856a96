"""Sentence splitting in many scripts, without losing text or splitting names and numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.text.sentence_splitter import SplitText, split_long_text, split_sentences


def joined(split: SplitText) -> str:
    return "".join(itertools.chain.from_iterable(zip(split.texts, [*split.gaps, ""], strict=True)))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ('He said "Go." Then he left.', ['He said "Go."', "Then he left."]),
        ("(Why?) Because.", ["(Why?)", "Because."]),
        ("Wait... What? No…  Yes", ["Wait...", "What?", "No…", "Yes"]),
        ("你好。世界！“再见。”他说。走吧", ["你好。", "世界！", "“再见。”", "他说。", "走吧"]),
        ("明日は晴れ？はい。", ["明日は晴れ？", "はい。"]),
        ("مرحبا بك. كيف حالك؟ أنا بخير۔ شكرا", ["مرحبا بك.", "كيف حالك؟", "أنا بخير۔", "شكرا"]),
        ("राम घर गया।सीता आई। ठीक है॥ हाँ", ["राम घर गया।", "सीता आई।", "ठीक है॥", "हाँ"]),
        ("Привет. Как дела? Хорошо.", ["Привет.", "Как дела?", "Хорошо."]),
        ("¿Qué tal? ¡Bien! Vamos.", ["¿Qué tal?", "¡Bien!", "Vamos."]),
        ("Er kam. „Gut“, sagte er. «Oui.» Non.", ["Er kam.", "„Gut“, sagte er.", "«Oui.»", "Non."]),
        ("Er ging. »Nein!« Sie kam.", ["Er ging.", "»Nein!« Sie kam."]),
        ("Sie kam 1979. Er ging 1981.", ["Sie kam 1979.", "Er ging 1981."]),
        ("He ate cakes etc... Then he left.", ["He ate cakes etc...", "Then he left."]),
        ("They chose plan b. It worked.", ["They chose plan b.", "It worked."]),
        ("One sentence", ["One sentence"]),
        ("", [""]),
        ("...", ["..."]),
    ],
)
def test_sentences_of_many_scripts(text: str, sentences: list[str]) -> None:
    """A paragraph is more than its first sentence (Helsinki-NLP/Opus-MT#60)."""
    split = split_sentences(text)
    assert split.texts == sentences
    assert joined(split) == text


@pytest.mark.parametrize(
    "text",
    [
        "Dr. Smith and Mrs. Jones paid 3.50 dollars, i.e. too much, etc. and left.",
        "J. R. R. Tolkien wrote it.",
        "Am 3. Mai 1979 kam er, z.B. mit dem Zug usw. nach Hause.",
        "Er wurde am 12. Mai 1979 geboren und starb am 31. Dezember.",
        "M. Dupont p.ex. habite ici.",
        "Version 2.0.1 costs $1,000.00 at example.com now.",
        "He works at Yahoo! in the office.",
        "The U.S. Army and the U.K. Navy met.",
        "Он жил в XIX в. и т.д. до конца.",
        "Siehe Abb. 3 und vgl. Kap. 12.",
        "The owner (Mr. Smith) and “Dr. No” came.",
        "“Really?” (he asked) and left.",
        "“Stop!” “or else,” he said.",
        "« Bonjour ! » dit-il en entrant.",
        "Il a crié « Attention ! » Personne n'écoutait.",
        "We climbed Mt. Fuji.",
    ],
)
def test_abbreviations_initials_and_decimals_do_not_end_a_sentence(text: str) -> None:
    assert split_sentences(text).texts == [text]


def test_white_space_is_kept_between_and_around() -> None:
    split = split_sentences("  One.  Two.\n\nThree.\t")
    assert split == SplitText(["  One.", "Two.", "Three.\t"], ["  ", "\n\n"])


@given(
    text=st.text(
        alphabet=st.one_of(st.sampled_from(" .!?。，,;:\n\"'aAbB1。！؟।—"), st.characters()),
        max_size=80,
    )
)
def test_cutting_into_sentences_loses_nothing(text: str) -> None:
    split = split_sentences(text)
    assert joined(split) == text
    assert len(split.gaps) == len(split.texts) - 1
    assert all(not gap.strip() for gap in split.gaps)


@given(
    text=st.text(
        alphabet=st.one_of(st.sampled_from(" .!?。，,;:\n\"'aAbB1。！؟।—\u0301"), st.characters()),
        max_size=80,
    ),
    limit=st.integers(1, 20),
)
def test_parts_fit_and_lose_nothing(text: str, limit: int) -> None:
    """No line is cut off (marian-dev#365, huggingface/transformers#11958, rust-bert#153)."""
    split = split_long_text(text, lambda part: len(part) <= limit)
    assert joined(split) == text
    assert all(not gap.strip() for gap in split.gaps)
    # What stays too long is one character with its accents.
    for part in split.texts:
        assert (
            len(part) <= limit or len(split_long_text(part, lambda one: len(one) <= 1).texts) == 1
        )


def test_a_text_that_fits_is_not_split() -> None:
    assert split_long_text("One. Two. Three.", lambda part: True) == SplitText(
        ["One. Two. Three."], []
    )


def test_sentences_come_before_clauses_before_spaces_before_letters() -> None:
    def within(limit: int):
        return lambda part: len(part) <= limit

    text = "The dog, the cat and the bird ran. They were gone."
    assert split_long_text(text, within(36)).texts == [
        "The dog, the cat and the bird ran.",
        "They were gone.",
    ]
    assert split_long_text(text, within(26)).texts == [
        "The dog,",
        "the cat and the bird ran.",
        "They were gone.",
    ]
    assert split_long_text("one two three four", within(9)).texts == ["one two", "three", "four"]
    assert split_long_text("abcdefgh", within(3)).texts == ["abc", "def", "gh"]
    assert split_long_text("我们走吧，好不好，可以", within(5)).texts == [
        "我们走吧，",
        "好不好，",
        "可以",
    ]


def test_as_much_as_fits_stays_together() -> None:
    words = [f"word{i}" for i in range(200)]
    split = split_long_text(" ".join(words), lambda part: len(part.split()) <= 30)
    assert [len(part.split()) for part in split.texts] == [30] * 6 + [20]


def test_accents_and_joined_emoji_are_not_torn() -> None:
    text = "e\u0301" * 5
    assert split_long_text(text, lambda part: len(part) <= 3).texts == ["e\u0301"] * 5
    family = "👩\u200d👩\u200d👧"
    assert split_long_text(family * 2, lambda part: len(part) <= 5).texts == [family, family]
    sun = "\u2600\ufe0f"  # a variation selector makes it an emoji
    assert split_long_text(sun * 3, lambda part: len(part) <= 3).texts == [sun] * 3


def test_a_character_that_never_fits_is_kept() -> None:
    assert split_long_text("ab", lambda part: False).texts == ["a", "b"]


def test_a_very_long_line_needs_few_calls() -> None:
    """Checking whether a part fits takes an encoding, so there must be few checks."""
    asked = 0

    def fits(part: str) -> bool:
        nonlocal asked
        asked += len(part)
        return len(part) <= 400

    text = "word " * 20_000
    split = split_long_text(text, fits)
    assert joined(split) == text
    assert asked < 15 * len(text)
