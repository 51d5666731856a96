"""A person with a keyboard and no mouse reaches everything, sees where they are and is never
trapped.
"""

from __future__ import annotations

import random
from typing import Any

from page_kit import open_context, open_page, wait_until
from synthetic import make_explanation

SOURCE = "The house at the river was built by an old engineer."
TARGET = "Das Haus am Fluss wurde von einem alten Ingenieur gebaut."
OTHER = "Das Haus an dem Fluss baute ein alter Ingenieur."

# Whether the focus can be seen: an outline of 2 px or more on the element or on its active
# descendant.
FOCUS_SEEN = """() => {
  const at = document.activeElement;
  if (!at || at === document.body) return 'nothing has the focus';
  const active = document.getElementById(at.getAttribute('aria-activedescendant') ?? '');
  const seen = [at, active].filter(Boolean).map((each) => getComputedStyle(each))
    .some((style) => parseFloat(style.outlineWidth) >= 2 && style.outlineStyle !== 'none');
  return seen ? '' : at.outerHTML.slice(0, 120);
}"""
# Where the focus is, and that nobody used a mouse.
WATCH = """() => {
  window.mouse = 0;
  for (const type of ['mousedown', 'pointerdown']) addEventListener(type, () => { window.mouse += 1; }, true);
}"""


class Typist:
    """Press keys, count them, and check after each that the focus can be seen."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.count = 0

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self.page.keyboard.press(key)
            self.count += 1
            assert self.page.evaluate(FOCUS_SEEN) == "", key

    def until(self, selector: str, key: str = "Tab", most: int = 25) -> None:
        """Press a key until the focus is on what the selector finds."""
        for _ in range(most):
            if self.page.evaluate(
                "(selector) => document.activeElement.matches(selector)", selector
            ):
                return
            self.press(key)
        raise AssertionError(f"{selector} was not reached with {most} times {key}")


def make_answers() -> dict[str, Any]:
    """Return what the model answers: the same translation, and another after an alternative."""
    other = make_explanation(source=SOURCE, target=OTHER, seed=1)
    first = make_explanation(source=SOURCE, target=TARGET)
    return {"explain": lambda _: first, "branch": lambda _: other}


def test_a_keyboard_reaches_ten_goals(browser: Any) -> None:
    context = open_context(browser)
    page, server, problems = open_page(
        context, make_explanation(source=SOURCE, target=TARGET), answers=make_answers()
    )
    page.evaluate(WATCH)
    keys = Typist(page)

    # Translate.
    page.keyboard.press("F6")  # the tour
    keys.press("F6", "Tab")
    keys.until("#ask-text")
    with page.expect_response("**/api/explain"):
        page.keyboard.press("Control+Enter")
    wait_until(page, "() => !document.querySelector('[data-busy]')")
    assert ("explain", "The house") in [
        (path, body["text"][:9]) for path, body in server.requests if body and "text" in body
    ]

    # Target token 3, its second alternative.
    keys.press("F6")
    keys.until("[id^=target-]")
    keys.press("Home", "ArrowRight", "ArrowRight")
    assert page.evaluate("document.activeElement.id") == "target-2"
    page.wait_for_url("**t=2**")
    keys.press("a", "Home", "ArrowDown", "Enter")
    page.wait_for_selector("#panel-strip .compare:not([hidden])")
    assert "tokens changed, score" in page.inner_text("#panel-strip .compare .answer")
    taken = next(body for path, body in server.requests if path.endswith("/branch"))
    assert taken["step"] == 2

    # The beam, and why a hypothesis was dropped.
    keys.press("b", "ArrowDown", "ArrowDown")
    reason = page.inner_text("#beam-reason")
    assert reason
    page.wait_for_url("**n=**")

    # The head that reads the word's source most, and the model without it.
    keys.press("Escape")
    assert page.evaluate("document.activeElement.closest('section').id") == "panel-strip"
    keys.until("#panel-strip .reading button")
    keys.press("Enter")
    page.wait_for_url(lambda url: "v=head" in url)
    head = page.evaluate("location.hash").split("h=")[1].split("&")[0]
    assert head.startswith("x")
    keys.press(" ")
    page.wait_for_url(lambda url: f"off={head}" in url)
    page.wait_for_selector("#off-banner:not([hidden])")
    assert ["/".join(path.split("/")[-1:]) for path, _ in server.requests].count("off") >= 1

    # The token's panel.
    keys.press("t")
    page.wait_for_url(lambda url: "v=token" in url)
    assert page.evaluate("document.activeElement.closest('section').id") == "panel-token"

    # Start and leave the tour, and return.
    keys.press("F6", "F6")
    keys.until("#panel-tour button", key="Tab")
    keys.press("Enter")
    assert "tour=1" in page.url
    keys.press("Enter")
    assert "tour=2" in page.url
    keys.until("[data-action=leave]")
    keys.press("Enter")
    assert "tour=" not in page.url
    keys.press("F6", "F6")
    assert page.evaluate("document.activeElement.closest('section').id") == "panel-strip"
    assert keys.count <= 80
    assert page.evaluate("window.mouse") == 0
    assert not problems
    context.close()


def test_tab_is_never_trapped(browser: Any) -> None:
    context = open_context(browser)
    page, _, problems = open_page(context, make_explanation(source=SOURCE, target=TARGET))
    generator = random.Random(0)
    page.focus("#ask-text")  # from the middle: before the first stop a browser has its own
    seen = []
    for _ in range(300):
        page.keyboard.press("Tab" if generator.random() < 0.8 else "Shift+Tab")
        seen.append(page.evaluate("[...document.all].indexOf(document.activeElement)"))
    # Every focus stop is left again, and all panels were visited.
    assert max(sum(1 for _ in group) for group in runs(seen)) <= 2
    assert len(set(seen)) > 15
    assert not problems
    context.close()


def runs(values: list[int]) -> list[list[int]]:
    """Return stretches of equal values."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1].append(value)
        else:
            found.append([value])
    return found


def test_letters_do_nothing_while_typing(browser: Any) -> None:
    context = open_context(browser)
    page, _, _ = open_page(context, make_explanation(source=SOURCE, target=TARGET))
    page.focus("#ask-text")
    before = page.url
    page.keyboard.type("b h t a ? m")
    assert page.url == before
    assert page.input_value("#ask-text").endswith("b h t a ? m")
    assert not page.evaluate("document.getElementById('help').open")
    context.close()


def test_the_help_lists_the_keys_and_closes_with_escape(browser: Any) -> None:
    context = open_context(browser)
    page, _, _ = open_page(context, make_explanation(source=SOURCE, target=TARGET))
    page.focus("#target-1")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    assert "F6" in page.inner_text("#help")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    assert page.evaluate("document.activeElement.id") == "target-1"
    context.close()
