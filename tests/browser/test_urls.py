"""The address holds the selection: saved, opened fresh, back and forward; nothing that is typed
into it can break the page.
"""

from __future__ import annotations

import functools
import random
import string
from typing import Any

import page_kit
import pytest
from page_kit import ORIGIN, open_context, wait_until
from playwright.sync_api import expect
from synthetic import make_explanation

SOURCE = "The house at the river was built by an old engineer."
TARGET = "Das Haus am Fluss wurde von einem alten Ingenieur gebaut."
STATE = "() => import('/explore/static/js/state.js').then((module) => module.store.get())"
# What the maps of the heads, the tree of the search, the map of the head and the charts show.
DRAWN = """() => Object.fromEntries([...document.querySelectorAll('main canvas')].filter((each) => each.offsetParent)
  .map((each) => [`${each.closest('section').id} ${each.className}`, each.toDataURL()])
  .concat([...document.querySelectorAll('.head-cell i')].slice(0, 1).map((each) => ['heads', getComputedStyle(each).backgroundImage])))"""
SET = "(patch) => import('/explore/static/js/state.js').then((module) => module.store.set(patch, { push: true }))"
WRITTEN = """() => Promise.all([import('/explore/static/js/state.js'), import('/explore/static/js/url.js')]).then(
  ([{ store }, { formatFragment }]) => formatFragment(store.get(), location.hash) === location.hash.slice(1))"""
PARSE = """(fragments) => import('/explore/static/js/url.js').then(({ parseFragment, formatFragment }) =>
  fragments.map((each) => {
    const state = parseFragment(each);
    const again = parseFragment(formatFragment(state, each));
    return JSON.stringify(state) === JSON.stringify(again);
  }))"""

open_page = functools.partial(page_kit.open_page, from_sources=True)  # for the imports above


def random_state(generator: random.Random, explanation: dict[str, Any]) -> dict[str, Any]:
    """Return a selection that the explanation has."""
    site = generator.choice(explanation["sites"])
    heads = [f"{each['id']}.{generator.randrange(each['heads'])}" for each in explanation["sites"]]
    return {
        "step": generator.randrange(len(explanation["steps"])),
        "src": generator.choice([None, generator.randrange(len(explanation["source"]["tokens"]))]),
        "site": site["id"],
        "head": generator.randrange(site["heads"]),
        "node": generator.choice(
            [None, generator.randrange(explanation["tensors"]["beam.parent"]["shape"][0])]
        ),
        "off": generator.sample(heads, generator.randrange(3)),
        "view": generator.choice(["ask", "strip", "beam", "heads", "head", "token", "positions"]),
        "sort": generator.choice(["layer", "effect", "entropy", "label"]),
        "measure": generator.choice(["weights", "contribution"]),
        "time": generator.random() < 0.3,
        "visual": generator.random() < 0.3,
        "lang": generator.choice(["", "en", "zh"]),
    }


def differing_pictures(page: Any, fresh: Any) -> list[str]:
    """Return the pictures that differ once both pages, which draw heads when idle, have drawn.

    How far the tree and the map are scrolled depends on the way to the selection.
    """
    for each in (page, fresh):
        each.evaluate(
            "document.querySelectorAll('.beam-scroller, .matrix').forEach((each) => each.scrollTo(0, 0))"
        )
    for _ in range(100):
        drawn, again = page.evaluate(DRAWN), fresh.evaluate(DRAWN)
        found = sorted(name for name in drawn.keys() | again if drawn.get(name) != again.get(name))
        if not found:
            break
        page.wait_for_timeout(50)
    return found


@pytest.mark.parametrize("count", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_random_states_come_back_from_their_address(browser: Any, count: int) -> None:
    explanation = make_explanation(source=SOURCE, target=TARGET, layers=2, heads=2, nodes=60)
    generator = random.Random(1)
    context = open_context(browser)
    page, _, problems = open_page(context, explanation)
    fresh, _, fresh_problems = open_page(context, explanation)
    for _ in range(count):
        page.evaluate(SET, random_state(generator, explanation))
        saved = page.evaluate(STATE)
        wait_until(page, WRITTEN)  # the address follows when the selection pauses
        url = page.url
        for text in (SOURCE, TARGET, "Haus", "house", "Fluss"):
            assert text not in url
        fresh.goto("about:blank")
        fresh.goto(url)
        fresh.wait_for_selector("html[data-ready=true]", state="attached")
        assert fresh.evaluate(STATE) == saved
        assert differing_pictures(page, fresh) == []
    assert not problems
    assert not fresh_problems
    context.close()


def test_back_and_forward(browser: Any) -> None:
    explanation = make_explanation(source=SOURCE, target=TARGET)
    context = open_context(browser)
    page, _, problems = open_page(context, explanation, "t=1")
    generator = random.Random(2)
    states = [page.evaluate(STATE)]
    wait_until(page, WRITTEN)
    for _ in range(5):
        page.evaluate(SET, random_state(generator, explanation))
        states.append(page.evaluate(STATE))
    for state in reversed(states[:-1]):
        page.go_back()
        assert page.evaluate(STATE) == state
    for state in states[1:]:
        page.go_forward()
        assert page.evaluate(STATE) == state
    assert not problems
    context.close()


def test_fuzzed_fragments_do_no_harm(browser: Any) -> None:
    generator = random.Random(3)
    keys = [
        "v",
        "t",
        "s",
        "h",
        "n",
        "off",
        "sort",
        "label",
        "z",
        "m",
        "tour",
        "lang",
        "visual",
        "time",
        "e",
        "q",
        "",
    ]
    values = [
        "-1",
        "1e9",
        "99999999999",
        "%",
        "%zz",
        "x3",
        "x3.2",
        "x3.2,,",
        "..",
        "<script>",
        "0-1",
        "3-1,0-0",
        "true",
        "\u202e",
        "9",
    ]
    fragments = []
    for _ in range(300):
        parts = []
        for _ in range(generator.randrange(6)):
            noise = "".join(generator.choices(string.printable, k=generator.randrange(8)))
            parts.append(
                generator.choice(keys)
                + generator.choice(["=", "==", ""])
                + generator.choice([*values, noise])
            )
        fragments.append("&".join(parts))
    context = open_context(browser)
    explanation = make_explanation(source=SOURCE, target=TARGET, layers=1, heads=2, nodes=40)
    page, _, problems = open_page(context, explanation)
    assert all(page.evaluate(PARSE, fragments))
    for fragment in fragments:
        page.evaluate("(fragment) => { location.hash = fragment; }", fragment)
    page.evaluate(
        """() => new Promise((resolve) => {
          location.hash = 't=9999&s=9999&h=q9.9&n=999999&off=z1.1';
          addEventListener('hashchange', ({ newURL }) => newURL.endsWith('off=z1.1') && resolve());
        })"""
    )
    state = page.evaluate(STATE)
    assert state["off"] == []
    assert state["node"] is None
    assert not problems
    context.close()


def test_unknown_keys_are_kept(browser: Any) -> None:
    context = open_context(browser)
    page, _, _ = open_page(context, make_explanation(source=SOURCE, target=TARGET), "mine=yes&t=3")
    page.click("#target-1")
    page.wait_for_url("**t=1**")
    assert "mine=yes" in page.url
    context.close()


def test_a_link_with_text_fills_the_form(browser: Any) -> None:
    context = open_context(browser)
    page, _, _ = open_page(
        context, make_explanation(source=SOURCE, target=TARGET), "text=My%20own%20words"
    )
    assert page.input_value("#ask-text") == "My own words"
    context.close()


def test_the_tours_steps_are_addresses(browser: Any) -> None:
    explanation = make_explanation(source=SOURCE, target=TARGET)
    context = open_context(browser)
    page, _, problems = open_page(context, explanation)
    page.click("#panel-tour button")
    titles = []
    for step in range(1, 9):
        assert f"tour={step}" in page.url
        titles.append(page.inner_text("#panel-tour h3"))
        wait_until(page, WRITTEN)
        state = page.evaluate(STATE)
        # The exact effect of a head comes a moment later than its estimate.
        expect(page.locator(".tour-text")).not_to_contain_text("estimated")
        fresh, _, _ = open_page(context, explanation, page.url.split("#", 1)[1])
        assert fresh.evaluate(STATE) == state
        expect(fresh.locator(".tour-text")).not_to_contain_text("estimated")
        assert fresh.inner_text("#panel-tour .tour-text") == page.inner_text(
            "#panel-tour .tour-text"
        )
        fresh.close()
        if step < 8:
            page.click("[data-action=next]")
    assert len(set(titles)) == 8
    page.click("[data-action=next]")
    assert "tour=" not in page.url
    assert "off=" not in page.url
    assert page.url.startswith(ORIGIN)
    assert not problems
    context.close()
