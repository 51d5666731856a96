"""Lines in capitals are recognized and recased, and single words completed."""

from __future__ import annotations

import pytest

from dragoman.config import DecodeConfig
from dragoman.inference.capitals_and_final_stops import (
    add_final_stops,
    ends_in_word,
    is_in_capitals,
    recase_capitals,
)

RECASING = DecodeConfig(recase_capitals=True)
MIRRORING = DecodeConfig(mirror_final_stop=True)


@pytest.mark.parametrize(
    ("typed", "recased"),
    [
        ("GUTEN MORGEN, WIE GEHT'S?", "Guten morgen, wie geht's?"),
        ("WHERE AM I? I'M LOST.  HELP!", "Where am I? I'm lost.  Help!"),
        (" “WAS IST DAS?”", " “Was ist das?”"),
        ("DIE STRAßE IST NASS", "Die straße ist nass"),  # ß often stays small
        ("ÇA VA BIEN ?", "Ça va bien ?"),
        ("ГДЕ МОЙ ДОМ", "Где мой дом"),
        ("1. KAPITEL: DER WALD", "1. Kapitel: der wald"),
    ],
)
def test_capitals_become_sentence_case(typed: str, recased: str) -> None:
    assert is_in_capitals(typed)
    assert recase_capitals([typed, "Other."], RECASING) == [recased, "Other."]
    assert recase_capitals([typed], DecodeConfig()) == [typed]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "UNESCO",
        "USA, EU",  # fewer than eight letters
        "ABCDEFGHIJ",  # one word
        "Das ist WICHTIG",
        "DAS IST sehr WICHTIG",
        "A B C D E F G H I",
        "你好 世界 你好 世界",
        "USB 设备 HDMI 设备",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert not is_in_capitals(text)
    assert recase_capitals([text], RECASING) == [text]


def test_lines_of_one_or_two_words_get_a_full_stop() -> None:
    typed = ["Katze", "rotes Auto ", "ein rotes Auto", "Kapitel 3", "Halt!", "", "(alt)", "usw."]
    completed = ["Katze.", "rotes Auto.", *typed[2:]]  # "3." would be an ordinal number
    assert add_final_stops(typed, MIRRORING) == completed
    assert add_final_stops(typed, DecodeConfig()) == typed
    assert [text for text in typed if ends_in_word(text)] == typed[:4]
