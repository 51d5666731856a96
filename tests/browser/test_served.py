"""The page as it is served: everything it shows comes from the model behind it, and from nowhere
else.
"""

from __future__ import annotations

from typing import Any

import pytest
from served_kit import SENTENCES

SHOWN = """(text) => document.querySelector('#panel-strip .source .run')?.textContent === text"""
PANELS = ("tour", "ask", "strip", "beam", "heads", "head", "token", "positions")


def read_panel(page: Any, name: str) -> str:
    """Return the text of a panel's body."""
    return str(page.inner_text(f"#panel-{name} .panel-body"))


def use_every_panel(found: Any) -> None:
    """Use every panel as a person would."""
    page = found.page
    for name in PANELS:
        page.evaluate("(view) => { location.hash = `v=${view}`; }", name)
        assert page.locator(f"#panel-{name}").is_visible()
    page.locator("#target-1").click()
    page.keyboard.press("ArrowRight")
    found.wait_until("() => /t=2/.test(location.hash)")
    page.locator("#panel-heads .head-cell").last.click()
    found.wait_until(r"() => /h=[edx]\d+\.\d+/.test(location.hash)")
    for button in page.locator("#panel-head").get_by_role("button", name="Show as table").all():
        button.click()
    page.locator("#panel-tour").get_by_role("button", name="Start the tour").click()
    for _ in range(7):
        page.locator("#panel-tour").get_by_role("button", name="Next").click()
    page.locator("#panel-tour").get_by_role("button", name="Finish").click()
    page.locator("#tool-lang").click()
    page.locator("#tool-lang").click()
    page.locator("#tool-theme").click()


def test_a_whole_visit_stays_on_this_machine(visit, explorer) -> None:
    found = visit(explorer.url)
    found.wait_until_ready()
    use_every_panel(found)
    found.page.wait_for_load_state("networkidle")
    for name in PANELS:
        assert len(read_panel(found.page, name).strip()) > 10, f"the panel {name} is empty"
    assert found.foreign == []
    assert found.console == []
    assert found.violations == []
    assert found.dialogs == []
    assert len(found.requests) > 5


def test_the_page_shows_the_models_numbers(visit, explorer) -> None:
    explanation = explorer.call(f"e/{explorer.session.first.digest}")
    found = visit(explorer.url)
    found.wait_until_ready()
    strip = found.page.locator("#panel-strip")
    assert strip.locator(".source .run").text_content() == explanation["source"]["text"]
    assert found.page.locator("#target-0").is_visible()
    count = len(explanation["target"]["tokens"])
    assert found.page.locator("[id^=target-]").count() == count


def test_a_person_explains_another_sentence(visit, explorer) -> None:
    found = visit(explorer.url)
    found.wait_until_ready()
    page = found.page
    page.fill("#ask-text", SENTENCES[1])
    page.fill("#ask-beam", "2")
    page.locator("#panel-ask").get_by_role("button", name="Translate").click()
    found.wait_until(SHOWN, SENTENCES[1])
    expected = explorer.session.predictor.explain(SENTENCES[1], beam=2)
    shown = page.locator("[id^=target-]").count()
    assert shown == len(expected.target.tokens)
    # The address leads back to it.
    found.wait_until("(digest) => location.hash.includes(digest)", expected.digest)
    page.go_back()
    found.wait_until(SHOWN, SENTENCES[0])
    assert found.console == []


def test_a_person_takes_an_alternative(visit, explorer) -> None:
    digest = explorer.session.first.digest
    explanation = explorer.call(f"e/{digest}")
    found = visit(f"{explorer.url}#t=1")
    found.wait_until_ready()
    page = found.page
    page.locator("#target-1").focus()
    with page.expect_response("**/branch") as asked:
        for key in ("a", "Home", "ArrowDown", "Enter"):
            page.keyboard.press(key)
    other = asked.value.json()
    chosen = explanation["steps"][1]["top"][1][0]
    assert other["target"]["tokens"][1]["id"] == chosen
    assert [step["forced"] for step in other["steps"]][:3] == [True, True, False]
    kept = [token["id"] for token in explanation["target"]["tokens"][:1]] + [chosen]
    beam, penalty = (explanation["request"][name] for name in ("beam", "length_penalty"))
    expected = explorer.session.predictor.explain(
        SENTENCES[0], prefix_ids=kept, beam=beam, length_penalty=penalty
    )
    assert other["digest"] == expected.digest
    page.wait_for_selector("#panel-strip .compare:not([hidden])")
    assert found.console == []


def test_a_mistake_is_one_sentence_on_the_page(visit, explorer) -> None:
    found = visit(explorer.url)
    found.wait_until_ready()
    page = found.page
    page.fill("#ask-text", "wort " * 790)
    page.locator("#panel-ask").get_by_role("button", name="Translate").click()
    page.wait_for_selector("#ask-problem:not([hidden])")
    assert "must have at most 512 tokens" in page.inner_text("#ask-problem")


@pytest.mark.parametrize("width", [320, 1280])
def test_the_served_page_fits(visit, explorer, width: int) -> None:
    found = visit(explorer.url, width=width)
    found.wait_until_ready()
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
