"""Effects of left-out words in the terminal and as an HTML page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from occlusion_kit import TEXT, VALUES, explanation
from rich.cells import cell_len
from rich.console import Console

from dragoman.explain.classification_occlusion import OcclusionExplanation
from dragoman.explain.classification_occlusion_report import render_explanation, render_html


def shown(found: OcclusionExplanation, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render_explanation(found, width=width), soft_wrap=True)
    return capture.get().rstrip("\n").split("\n")


def test_the_terminal_shows_numbers_within_80_columns_without_color():
    lines = shown(explanation(TEXT + " 然而，电影很好看。" * 6 + " word" * 40))
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    assert lines[0].startswith("positive 0.690   (negative 0.310)")
    assert re.search(r"0\.091  \+0\.458  █{10}  wonderful  \(sentence 1\)", text)
    assert re.search(r"0\.\d+  -0\.\d+  ░+ +boring  \(sentence 2\)", text)
    assert "0.500  +0.458  1. A wonderful <b>film</b>." in text


def test_a_model_without_attention_shows_leave_one_out_only():
    lines = shown(explanation("A wonderful film.", weights=False, levels=1))
    assert not any("weight" in line for line in lines)
    assert any(re.fullmatch(r"\+0\.381  █{10}  wonderful", line) for line in lines), lines
    assert "no attention weights" in render_html([explanation(weights=False, levels=1)])


def test_control_characters_reach_neither_the_terminal_nor_the_page_unescaped():
    text = 'wonderful \x1b[31mred <script>alert("x")</script>'
    assert "\x1b" not in "\n".join(shown(explanation(text)))
    page = render_html([explanation(text)], title="</title><script>")
    assert "<script" not in page
    assert "\x1b" not in page


class _Structure(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.links += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_loads_nothing_and_holds_the_text():
    parser = _Structure()
    parser.feed(page := render_html([explanation(), explanation("A great film.")], title="model"))
    assert not parser.open
    assert not parser.links
    assert "http" not in page.replace("http-equiv", "")
    assert "url(" not in page
    assert "It is boring, though not slow & long." in parser.text
    assert "prefers-color-scheme: dark" in page
    assert 'title="weight 0.091, drop +0.458"' in page


def test_small_effects_are_drawn_pale():
    """Colors relative to the largest effect of a text would make noise look like a reason."""
    VALUES["slightly"] = 0.1
    try:
        found = explanation("A slightly long film.")
    finally:
        del VALUES["slightly"]
    assert found.scale == pytest.approx(0.1)
    assert 0.02 < found.ranked_words()[0].drop < 0.03
    assert any(re.search(r"\+0\.025  ██ +slightly", line) for line in shown(found))
    assert "--e:0.19" in render_html([found])
