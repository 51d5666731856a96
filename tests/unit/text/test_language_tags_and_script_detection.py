"""Language tags and scripts: how a text is written, from its tag or from its characters."""

from __future__ import annotations

import pytest

from dragoman.text.language_tags_and_script_detection import (
    LanguageTag,
    count_scripts,
    parse_language,
    script_of_language,
)


@pytest.mark.parametrize(
    ("tag", "parsed"),
    [
        ("zh", ("zh", "", "")),
        ("ZH", ("zh", "", "")),
        ("zh-TW", ("zh", "", "TW")),
        ("zh_Hans", ("zh", "Hans", "")),
        ("zh-hant-tw", ("zh", "Hant", "TW")),
        ("zho_Hans", ("zho", "Hans", "")),
        ("zh-yue-Hant-HK", ("yue", "Hant", "HK")),
        ("zh-min-nan", ("nan", "", "")),
        ("ja_JP.UTF-8", ("ja", "", "JP")),
        ("sr_RS@latin", ("sr", "", "RS")),
        ("es-419", ("es", "", "419")),
        ("en-USA", ("en", "", "")),
        ("de-CH-1901-x-Thai", ("de", "", "CH")),
        ("ja-JP-u-ca-japanese", ("ja", "", "JP")),
        ("iso", ("iso", "", "")),
        ("", ("", "", "")),
        ("!!", ("", "", "")),
        ("x-klingon", ("", "", "")),
        (" zh ", ("zh", "", "")),
    ],
)
def test_tags_are_parsed_as_bcp_47(tag: str, parsed: tuple[str, str, str]) -> None:
    assert parse_language(tag) == LanguageTag(*parsed)


@pytest.mark.parametrize(
    ("tag", "script"),
    [
        *(
            (tag, "Hani")
            for tag in (
                "zh",
                "ZH",
                "zh-TW",
                "zh_Hans",
                "zho_Hant",
                "cmn",
                "yue",
                "zh-yue",
                "lzh",
                "wuu",
                "und-Hani",
            )
        ),
        *((tag, "Jpan") for tag in ("ja", "ja-JP", "JA", "jpn", "jpn_Jpan", "und-Hira")),
        *((tag, "Kore") for tag in ("ko", "kor", "ko-KR", "kor_Hang")),
        ("th", "Thai"),
        ("lo-LA", "Laoo"),
        ("khm_Khmr", "Khmr"),
        ("my", "Mymr"),
        ("dz", "Tibt"),
        *(
            (tag, "")
            for tag in (
                "en",
                "de-AT",
                "vi",
                "kok",
                "ja-Latn",
                "zh-Latn-pinyin",
                "ko-Latn",
                "th-Latn",
                "tr",
            )
        ),
        *(
            (tag, None)
            for tag in (
                "jav",
                "jv",
                "und",
                "kork",
                "japan",
                "cn",
                "jp",
                "iso",
                "",
                "zhx",
                "zh-Zzzz",
            )
        ),
    ],
)
def test_a_tag_stands_for_a_script_or_does_not_decide(tag: str, script: str | None) -> None:
    assert script_of_language(tag) == script


TEXTS = {
    "Hani": "我喜欢猫。他昨天在 New York 买了一台 iPhone 15 Pro Max。",
    "Jpan": "私は猫が好きです。東京タワーに行きました。",
    "Kore": "저는 고양이를 좋아합니다.",
    "Thai": "ฉันชอบแมว",
    "Laoo": "ຂ້ອຍມັກແມວ",
    "Tibt": "ང་བྱི་ལ་ལ་དགའ་པོ་ཡོད།",
    "Mymr": "ကျွန်တော်ကြောင်ကိုကြိုက်တယ်။",
    "Khmr": "ខ្ញុំចូលចិត្តឆ្មា។",
    "Java": "ꦲꦏ꧀ꦱꦫꦗꦮ",
}


@pytest.mark.parametrize("script", TEXTS)
def test_a_script_is_recognised_by_its_characters(script: str) -> None:
    assert count_scripts([TEXTS[script]]).script == script


@pytest.mark.parametrize(
    "text",
    [
        "The word 猫 means cat, and 犬 means dog.",
        "Кошка сидит на окне.",
        "मुझे बिल्लियाँ पसंद हैं।",
        "أحب القطط كثيرا.",
        "Tôi thích mèo.",
        "12345 67.8 %",
        "",
    ],
)
def test_spaced_scripts_have_no_code(text: str) -> None:
    assert count_scripts([text]).script == ""


def test_chinese_that_quotes_kana_is_chinese() -> None:
    assert count_scripts(["他把平假名の写成了汉字的样子，大家都觉得很有意思。"]).script == "Hani"


def test_only_a_sample_is_counted() -> None:
    def texts() -> object:
        yield "猫" * 2_000_000
        raise AssertionError("read on after the sample")

    assert count_scripts(texts()).script == "Hani"  # type: ignore[arg-type]


@pytest.mark.parametrize(("han", "script"), [(8, "Jpan"), (9, "Hani")])
def test_more_than_a_tenth_of_kana_is_japanese(han: int, script: str) -> None:
    assert count_scripts(["の" + "漢" * han]) == (script, han + 1)
