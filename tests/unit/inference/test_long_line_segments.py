"""Lines in capitals are told from abbreviations and recased; the rest is in test_translator.py."""

from __future__ import annotations

import pytest

from dragoman.inference.long_line_segments import is_in_capitals, recase_capitals


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
    assert recase_capitals([typed, "Other."]) == [recased, "Other."]


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
    assert recase_capitals([text]) == [text]
