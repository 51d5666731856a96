"""Texts in many scripts are shown as they are: whole, in their direction, without breaking out or
being injected.
"""

from __future__ import annotations

from typing import Any

import pytest
from page_kit import open_context, open_page
from synthetic import graphemes, make_explanation

TEXTS = {
    "arabic": ("ar", "بُني البيت على النهر مهندس عجوز"),
    "hebrew": ("he", "הבית ליד הנהר נבנה על ידי מהנדס זקן"),
    "mixed": ("ar", "اشترى Ahmed تذكرة A380 أمس"),
    "chinese": ("zh", "河边的房子是一位老工程师建造的。"),
    "japanese": ("ja", "川沿いの家は年老いた技師が建てた。"),
    "korean": ("ko", "강가의 집은 늙은 기술자가 지었다."),
    "thai": ("th", "บ้านริมแม่น้ำสร้างโดยวิศวกรชรา"),
    "hindi": ("hi", "नदी के किनारे का घर एक बूढ़े इंजीनियर ने बनाया"),
    "emoji": ("en", "We 👩‍👩‍👧‍👦 love 🏳️‍🌈 and 👍🏽"),
    "combining": ("en", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘ text"),
    "long": ("de", "Wort" * 75),
    "markup": ("en", "<script>alert(1)</script> & <img src=x onerror=alert(2)>"),
    "override": ("en", "left \u202eright\u202c end"),
    "bytes": ("en", "a rare \U00010348 sign"),
}

OVERFLOW = """() => [...document.querySelectorAll('body *')]
  .filter((each) => each.checkVisibility() && !each.closest('.scroll, .beam-scroller, .matrix, .hidden, [role=grid], canvas'))
  .filter((each) => each.getBoundingClientRect().right > innerWidth + 1)
  .map((each) => each.outerHTML.slice(0, 100))"""

# Buttons, fields and options that are not inline in a text are 24 px or more in both directions.
SMALL = """() => [...document.querySelectorAll('button, input, select, textarea, summary, [role=option], nav a')]
  .filter((each) => each.checkVisibility() && !each.closest('p, table'))
  .map((each) => [each.getBoundingClientRect(), each])
  .filter(([box, each]) => (box.width < 24 || box.height < 24)
    && !(each.type === 'checkbox' && each.closest('label').getBoundingClientRect().height >= 24))
  .map(([box, each]) => `${each.outerHTML.slice(0, 90)} ${Math.round(box.width)}x${Math.round(box.height)}`)"""


def split_bytes(explanation: dict[str, Any], side: str, character: str) -> None:
    """Replace the token that holds a character by the character's bytes, all with its span."""
    tokens = explanation[side]["tokens"]
    at = explanation[side]["text"].index(character)
    index = next(i for i, token in enumerate(tokens) if token["span"][0] <= at < token["span"][1])
    start, end = tokens[index]["span"]
    raw = character.encode()
    # The first byte takes the space before and the character, the others stand for the same one.
    tokens[index]["span"] = [start, end]
    tokens[index]["text"] = f"<0x{raw[0]:02X}>"
    for byte, other in zip(raw[1:], range(index + 1, len(tokens) - 1)):
        if tokens[other]["text"].strip() and other < len(tokens) - 1:
            break
        tokens[other]["text"] = f"<0x{byte:02X}>"


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_texts_are_shown_whole(browser: Any, name: str) -> None:
    language, text = TEXTS[name]
    explanation = make_explanation(
        source=text, target=text, languages=(language, language), layers=1, heads=2, nodes=40
    )
    if name == "bytes":
        split_bytes(explanation, "target", "\U00010348")
    context = open_context(browser, 320)
    page, _, problems = open_page(context, explanation)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    for side in ("source", "target"):
        run = page.locator(f"#panel-strip .side.{side} .run")
        assert run.evaluate("(each) => each.textContent") == text
        assert run.get_attribute("dir") == explanation[side]["dir"]
        assert run.get_attribute("lang") == language
        pieces = page.locator(f"#panel-strip .side.{side} .tok").evaluate_all(
            "all => all.map((each) => each.textContent)"
        )
        clusters = graphemes(text)
        borders = {sum(map(len, clusters[:i])) for i in range(len(clusters) + 1)}
        at = 0
        for piece in filter(None, pieces):
            at = text.index(piece, at)
            assert at in borders
            at += len(piece)
            assert at in borders
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert not dialogs
    assert not problems
    context.close()


def test_special_tokens_read_from_left_to_right_in_arabic(browser: Any) -> None:
    text = TEXTS["arabic"][1]
    explanation = make_explanation(source=text, target=text, languages=("ar", "ar"), layers=1)
    context = open_context(browser)
    page, _, _ = open_page(context, explanation)
    styles = page.locator("#panel-strip .tok[data-label]").evaluate_all(
        "all => all.map((each) => getComputedStyle(each, '::before')).map((style) => [style.direction, style.unicodeBidi])"
    )
    assert styles
    assert {tuple(each) for each in styles} == {("ltr", "isolate")}
    quotation = page.locator("#panel-strip .reading .quoted").first
    assert quotation.evaluate("(each) => getComputedStyle(each).direction") == "ltr"
    assert quotation.evaluate("(each) => getComputedStyle(each.firstChild).direction") == "rtl"
    context.close()


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_nothing_overflows_the_window(browser: Any, width: int) -> None:
    context = open_context(browser, width)
    page, _, _ = open_page(context, make_explanation(source_length=40, target_length=40))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate(SMALL) == []
    context.close()


def test_zoom_forced_colors_and_motion(browser: Any) -> None:
    explanation = make_explanation(source_length=20, target_length=20)
    # A window of 640 pixels is one of 1280 at 200 %.
    context = open_context(browser, 640, forced_colors="active", reduced_motion="reduce")
    page, _, problems = open_page(context, explanation)
    assert page.evaluate("document.documentElement.scrollWidth") <= 640
    durations = page.evaluate(
        "[...new Set([...document.querySelectorAll('*')].map((each) => getComputedStyle(each).transitionDuration))]"
    )
    assert durations == ["0s"]
    outline = page.locator("#panel-strip .target .tok[aria-current]").evaluate(
        "(each) => getComputedStyle(each).outlineStyle"
    )
    assert outline == "solid"
    assert not problems
    context.close()


def test_the_page_speaks_chinese(browser: Any) -> None:
    context = open_context(browser, locale="zh-CN")
    page, _, problems = open_page(context, make_explanation(source_length=12, target_length=12))
    assert page.get_attribute("html", "lang") == "zh-Hans"
    assert page.inner_text("#title-strip") == "译文"
    page.click("#tool-lang")
    assert page.inner_text("#title-strip") == "Translation"
    page.wait_for_url("**lang=en**")
    assert not problems
    context.close()
