"""Stems of English words."""

import pytest

from dragoman.text.english_stemmer import stem


@pytest.mark.parametrize(
    "words",
    [
        ("play", "plays", "played", "playing", "player", "Players"),
        ("ride", "rides", "riding"),
        ("run", "runs", "running", "runner"),
        ("carry", "carries", "carried", "carrying"),
        ("box", "boxes"),
        ("grass",),
        ("is",),
    ],
)
def test_inflections_share_a_stem(words):
    assert len({stem(word) for word in words}) == 1


def test_other_words_do_not():
    assert (
        len({stem(word) for word in ("man", "woman", "dog", "dress", "grass", "sing", "is")}) == 7
    )


def test_double_vowels_stay():
    assert stem("bamboos") == stem("bamboo") == "bamboo"
