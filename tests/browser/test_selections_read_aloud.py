"""What a screen reader announces for 100 random selections: names and numbers are those of the
explanation's JSON, rounded as the page rounds.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
from page_kit import open_context, open_page
from synthetic import make_explanation
from test_accessibility import probability
from test_panels import CELLS, decode, number

PRESS = """(selectors) => selectors.forEach((selector) => {
  const found = document.querySelector(selector);
  found.focus();
  found.click();
})"""
LIVE = "document.getElementById('live').textContent"
GROUPS = {"e": "Encoder self-attention", "d": "Decoder self-attention", "x": "Cross-attention"}


class Reader:
    """Selects things on the page; returns what is read aloud and what the JSON has."""

    def __init__(self, page: Any, explanation: dict[str, Any]) -> None:
        self.page, self.explanation = page, explanation
        self.source, self.target = (
            [token["text"].strip() for token in explanation[side]["tokens"]]
            for side in ("source", "target")
        )
        nodes = explanation["beam"]["nodes"]
        self.nodes = {name: decode(explanation, tensor) for name, tensor in nodes.items()}
        sizes = np.abs(decode(explanation, "ixg.s"))
        self.parts = sizes / sizes.sum(1, keepdims=True)
        self.strongest = sizes[:, : len(self.source) - 1].argmax(1)

    def press(self, *selectors: str) -> None:
        """Focus and press elements, one after the other."""
        self.page.evaluate(PRESS, selectors)

    def name_of(self, selector: str) -> str:
        """Return the accessible name of an element, as the browser's tree has it."""
        found = re.search(r'"((?:[^"\\]|\\.)*)"', self.page.locator(selector).aria_snapshot())
        assert found
        return found[1]

    def announced(self) -> str:
        """Return the live region's sentence, which follows 300 ms after the selection."""
        self.page.clock.fast_forward(400)
        found: str = self.page.evaluate(LIVE)
        return found

    def target_name(self, t: int) -> str:
        p = probability(math.exp(self.explanation["steps"][t]["logprob"]))
        return (
            f"target {t + 1} of {len(self.target)}, {self.target[t]}, probability {p}, "
            f"strongest source {self.source[self.strongest[t]]}"
        )

    def target_token(self, draw: random.Random) -> tuple[str, str]:
        t = draw.randrange(len(self.target))
        self.press(f"#target-{t}")
        return self.name_of(f"#target-{t}"), self.target_name(t)

    def step_forward(self, draw: random.Random) -> tuple[str, str]:
        t = draw.randrange(len(self.target) - 1)
        self.press(f"#target-{t}", "#panel-strip .clock button[aria-label='One step forward']")
        return self.announced(), self.target_name(t + 1)

    def source_token(self, draw: random.Random) -> tuple[str, str]:
        t, s = draw.randrange(len(self.target)), draw.randrange(len(self.source))
        self.press(f"#target-{t}", f"#source-{s}")
        part = self.parts[t, s]
        percent = "<1" if 0 < part < 0.01 else math.floor(100 * part + 0.5)
        expected = (
            f"source {s + 1} of {len(self.source)}, {self.source[s]}, "
            f"{percent} % of the attribution"
        )
        return self.name_of(f"#source-{s}").replace("\u00a0", " "), expected

    def head(self, draw: random.Random) -> tuple[str, str]:
        """Also compare the table behind the canvas of the head with its matrix."""
        summary = draw.choice(self.explanation["heads"])
        name = f"{summary['site']}.{summary['head']}"
        self.press(f".head-cell[data-head='{name}']")
        rows = self.page.evaluate(CELLS, "#panel-head .matrix-table")
        shown = np.array([[number(cell) for cell in row[1:]] for row in rows])
        weights = decode(self.explanation, f"{summary['site']}.w")[summary["head"]]
        assert shown.shape == weights.shape
        assert np.abs(shown - weights).max() <= 0.005
        [[label, score]] = summary["labels"]
        estimate = summary["effect"]["estimate"]
        change = f"{estimate:+.2f}".replace("-", "−")
        expected = (
            f"{GROUPS[name[0]]}, layer {name[1]}, head {name[3:]} ({name}), "
            f"{label.replace('-', '−')} {score:.2f}. When off, the output’s log-probability "
            f"changes by about {change if abs(estimate) >= 0.005 else '0.00'} (estimate)"
        )
        return self.name_of(f".head-cell[data-head='{name}']"), expected

    def matrix_cell(self, draw: random.Random) -> tuple[str, str]:
        layer, head = draw.randrange(2), draw.randrange(2)
        t, s = draw.randrange(len(self.target) - 1), draw.randrange(len(self.source) - 1)
        self.press(f".head-cell[data-head='x{layer}.{head}']", f"#target-{t}", f"#source-{s}")
        self.page.locator("#panel-head .matrix").focus()
        key, t, s = draw.choice([("ArrowDown", t + 1, s), ("ArrowRight", t, s + 1)])
        self.page.keyboard.press(key)
        value = np.float32(decode(self.explanation, f"x{layer}.w")[head, t, s])
        return self.announced(), f"{self.target[t]} reads {self.source[s]}: {value:.3f}"

    def beam_node(self, draw: random.Random) -> tuple[str, str]:
        node = draw.randrange(1, len(self.nodes["parent"]))
        self.press(f"#panel-beam .beam-table tr[data-row='{node}'] th button")
        step, token = (int(self.nodes[key][node]) for key in ("step", "token"))
        p = probability(math.exp(self.nodes["logprob"][node]))
        text = self.explanation["token_texts"][str(token)].strip()
        return self.announced(), f"step {step + 1}, {text}, probability {p}, {self.reason(node)}"

    def reason(self, node: int) -> str:
        """Return why a node was kept or dropped, in words."""
        best, *_ = leaves = [entry["leaf"] for entry in self.explanation["nbest"]]
        winner = best
        while winner > node:
            winner = int(self.nodes["parent"][winner])
        cum, cut = float(self.nodes["cum"][node]), float(self.nodes["cut"][node])
        match self.explanation["beam"]["reasons"][int(self.nodes["reason"][node])]:
            case "kept" if winner == node:
                return "kept: part of the translation"
            case "kept":
                return f"kept: among the {self.explanation['beam']['width']} best of this step"
            case "finished":
                rank = leaves.index(node)
                score = self.explanation["nbest"][rank]["normalised"]
                return f"finished: number {rank + 1}, with score {score:.3f}".replace("-", "−")
            case "no_repeat":
                return "forbidden: it would repeat an n-gram"
            case "beam_full":
                numbers = [f"{each:.2f}".replace("-", "−") for each in (cum, cut - cum, cut)]
                return "dropped: its score {} is {} short of {}, the last in the beam".format(
                    *numbers
                )
        raise AssertionError(f"no words for node {node}")


def test_100_random_selections_are_read_as_the_explanation_has_them(browser: Any) -> None:
    explanation = make_explanation(
        source="The house was built by an engineer.",
        target="Das Haus wurde von einem Ingenieur gebaut.",
        layers=2,
        heads=2,
        nodes=70,
    )
    context = open_context(browser)
    context.clock.install()
    page, _, problems = open_page(context, explanation)
    page.click("#panel-beam .segments button:nth-child(3)")
    page.locator("#panel-head").get_by_role("button", name="Show as table").click()
    reader, draw = Reader(page, explanation), random.Random(23)
    kinds = [
        reader.target_token, reader.step_forward, reader.source_token,
        reader.head, reader.matrix_cell, reader.beam_node,
    ]  # fmt: skip
    read = [(kinds[number % len(kinds)](draw)) for number in range(100)]
    assert [each for each in read if each[0] != each[1]] == []
    # And the table behind the map of positions.
    page.locator("#panel-positions").get_by_role("button", name="Show as table").first.click()
    rows = page.evaluate(CELLS, "#panel-positions table")
    shown = np.array([[number(cell) for cell in row[1:]] for row in rows])
    assert np.abs(shown - decode(explanation, "pos.sim")).max() <= 0.005
    assert problems == []
    context.close()
