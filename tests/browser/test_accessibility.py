"""axe-core finds nothing to report; text has contrast; names and numbers are those of the
explanation.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from page_kit import open_context, open_page
from synthetic import make_explanation

axe_package = pytest.importorskip("axe_playwright_python")
AXE = (Path(axe_package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
VIEWS = ("ask", "strip", "beam", "heads", "head", "token", "positions", "tour")
SOURCE = "The house at the river was built by an old engineer."
TARGET = "Das Haus am Fluss wurde von einem alten Ingenieur gebaut."

# axe cannot sample text over a gradient or a canvas; CONTRAST measures these instead.
UNSAMPLED = (".tok", "[role=option]", "[role=treeitem]", "canvas", ".quoted", ".key", "code", "kbd")

# Not decided by axe, and right: a token is as wide as its letters (WCAG 2.5.8, inline), a row of
# heads lies below the bar at the lower edge of the window until the page is scrolled, and a
# hypothesis is as deep in the tree as it has tokens.
UNDECIDED = {
    ("target-size", "tok"),
    ("target-size", "head below the bar"),
    ("aria-valid-attr-value", "treeitem"),
}

CONTRAST = """(selectors) => {
  const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (color) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => [r, g, b]
    .map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  for (const node of document.querySelectorAll(selectors.join(','))) {
    if (!node.checkVisibility() || node.classList.contains('later') || !node.textContent.trim()) continue;
    let behind = node;
    let back = [0, 0, 0, 0];
    while (behind && back[3] < 255) {
      back = rgb(getComputedStyle(behind).backgroundColor);
      behind = behind.parentElement;
    }
    const [a, b] = [luminance(rgb(getComputedStyle(node).color)), luminance(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${node.className || node.tagName} ${ratio.toFixed(2)}`);
  }
  return found;
}"""


def example() -> dict[str, Any]:
    """Return an explanation that fills every panel, with a forced token."""
    explanation = make_explanation(source=SOURCE, target=TARGET)
    explanation["steps"][0]["forced"] = True
    return explanation


def fragment_of(view: str) -> str:
    """Return the address of a panel in use."""
    return {
        "beam": "v=beam&n=30",
        "strip": "t=3&time=1",
        "head": "v=head&h=x1.1&off=x1.1",
        "tour": "tour=3",
    }.get(view, f"v={view}")


def is_below_the_bar(node: dict[str, Any]) -> bool:
    """Whether a head of the grid is obscured by nothing but the bar at the lower edge."""
    found = [each for each in node["any"] if each["id"] == "target-size"]
    return 'class="head-cell"' in node["html"] and all(
        (each["data"] or {}).get("messageKey") == "partiallyObscured"
        and all(other["target"][0].startswith(".dock > ") for other in each["relatedNodes"])
        for each in found
    )


def undecided(result: dict[str, Any]) -> set[tuple[str, str]]:
    """Return what axe could not decide, but for contrast: the rule and the kind of element."""
    return {
        (
            each["id"],
            "tok"
            if 'class="tok' in node["html"]
            else "treeitem"
            if "treeitem" in node["html"]
            else "head below the bar"
            if is_below_the_bar(node)
            else node["html"],
        )
        for each in result["incomplete"]
        if each["id"] != "color-contrast"
        for node in each["nodes"]
    }


def run_axe(page: Any) -> dict[str, Any]:
    """Return axe's result for the page as it is."""
    page.evaluate(AXE)
    result: dict[str, Any] = page.evaluate(
        "(tags) => axe.run(document, { runOnly: tags, resultTypes: ['violations', 'incomplete'] })",
        TAGS,
    )
    return result


def check(browser: Any, view: str, width: int, dark: bool) -> None:
    """Assert that axe has nothing to report and that what it cannot sample has contrast."""
    context = open_context(browser, width, dark)
    try:
        page, _, problems = open_page(context, example(), fragment_of(view))
        result = run_axe(page)
        assert not problems
        found = [
            (each["id"], [node["html"][:160] for node in each["nodes"]][:4])
            for each in result["violations"]
        ]
        assert not found
        assert [each for each in undecided(result) if each not in UNDECIDED] == []
        assert page.evaluate(CONTRAST, list(UNSAMPLED)) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    finally:
        context.close()


@pytest.mark.parametrize(
    ("view", "width", "dark"),
    [("strip", 1280, False), ("beam", 320, True), ("head", 768, True), ("tour", 320, False)],
)
def test_axe_finds_nothing(browser: Any, view: str, width: int, dark: bool) -> None:
    check(browser, view, width, dark)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 768, 1280])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_anywhere(browser: Any, view: str, width: int, dark: bool) -> None:
    check(browser, view, width, dark)


def probability(p: float) -> str:
    """Return a probability as the page writes it."""
    if p >= 0.9995:
        return "1" if p == 1 else ">0.999"
    if p < 0.001:
        return "0" if p == 0 else "<0.001"
    return f"{p:.3f}" if p < 0.1 or p > 0.995 else f"{p:.2f}"


def log_number(value: float) -> str:
    """Return a log-probability as the page writes it."""
    return f"{value:.{3 if abs(value) < 0.1 else 2}f}".replace("-", "−")


def test_names_and_numbers_are_the_explanations(browser: Any) -> None:
    explanation = example()
    context = open_context(browser)
    page, _, problems = open_page(context, explanation)
    steps, tokens = explanation["steps"], explanation["target"]["tokens"]
    for index, (step, token) in enumerate(zip(steps, tokens)):
        name = page.get_attribute(f"#target-{index}", "aria-label")
        start = (
            f"target {index + 1} of {len(tokens)}, {token['text'].strip()}, "
            f"probability {probability(math.exp(step['logprob']))}"
        )
        assert name.startswith(start), (name, start)
        assert ("forced" in name) == step["forced"]
        page.click(f"#target-{index}")
        facts = page.locator("#panel-strip .facts dd").all_inner_texts()
        total = sum(each["logprob"] for each in steps[: index + 1])
        assert facts[0] == probability(math.exp(step["logprob"]))
        assert facts[1] == str(step["rank"])
        assert facts[2].startswith(f"{step['entropy']:.2f}")
        assert facts[3] == log_number(step["logprob"])
        assert facts[4] == log_number(total)
        options = page.locator("[role=option]").evaluate_all(
            "all => all.map((each) => each.ariaLabel)"
        )
        wanted = [f"{text.strip()}, {probability(math.exp(lp))}" for _, text, lp in step["top"]]
        assert [option.removesuffix(", chosen") for option in options] == wanted
    assert not problems
    context.close()


def test_headings_and_landmarks_are_named_and_in_order(browser: Any) -> None:
    context = open_context(browser)
    page, _, _ = open_page(context, example())
    levels = page.locator("h1, h2, h3, h4").evaluate_all(
        "all => all.filter((each) => each.checkVisibility()).map((each) => Number(each.tagName[1]))"
    )
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    snapshot = page.locator("main").aria_snapshot()
    for heading in ("Your sentence", "Translation", "Beam search", "Attention heads", "One head"):
        assert f'region "{heading}"' in snapshot
    context.close()


def test_the_beams_table_has_every_node_with_its_numbers(browser: Any) -> None:
    explanation = make_explanation(source=SOURCE, target=TARGET, nodes=90)
    context = open_context(browser)
    page, _, _ = open_page(context, explanation, "v=beam")
    page.click("#panel-beam .segments button:nth-child(3)")
    rows = page.locator("#panel-beam .beam-table tbody tr")
    count = explanation["tensors"]["beam.parent"]["shape"][0] - 1
    assert rows.count() == min(count, 100)
    texts = rows.all_inner_texts()
    assert all(
        ("kept" in text) or ("dropped" in text) or ("finished" in text) or ("forbidden" in text)
        for text in texts
    )
    context.close()


def test_a_panel_without_content_shows_the_reason(browser: Any) -> None:
    sentence = "This model decodes greedily, so there is no beam."
    explanation = make_explanation(
        source=SOURCE,
        target=TARGET,
        missing={"beam": sentence, "heads": "No attention.", "head": "No attention."},
    )
    context = open_context(browser)
    page, _, problems = open_page(context, explanation, "v=beam")
    assert page.inner_text("#panel-beam > .missing") == sentence
    assert page.is_hidden("#panel-beam .panel-body")
    assert not problems
    context.close()
