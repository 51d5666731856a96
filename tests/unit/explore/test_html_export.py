"""The one-file export: inlined scripts and styles, the JSON island and the content policy."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
from typing import Any

import pytest

from dragoman.explore.html_export import (
    content_policy,
    encode_island,
    export_html,
    read_island,
)


class Collector(html.parser.HTMLParser):
    """Scripts, styles, metas and titles of a page with their text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag in ("script", "style", "meta", "title", "link", "img", "iframe"):
            self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found and self.lasttag == self.found[-1][0]:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)


def collect(page: str) -> Collector:
    collector = Collector()
    collector.feed(page)
    return collector


def small_explanation(**changes: Any) -> dict[str, Any]:
    return {
        "format": "dragoman.explanation",
        "version": 1,
        "tensors": {
            "a": {"dtype": "u8", "shape": [2, 3], "data": base64.b64encode(b"\n<\0abc").decode()},
            "b": {"dtype": "f32", "shape": [2], "data": base64.b64encode(b"01234567").decode()},
            "c": {"dtype": "i32", "shape": [0, 4], "data": ""},
        },
        "source": {"text": "</script><script>alert(1)</script> <!-- \u2028 日本 😀"},
        **changes,
    }


def test_island_cannot_leave_its_element():
    explanation = small_explanation()
    island = encode_island(explanation)
    assert island.count("<") == 2
    assert read_island(f"<p>before</p>{island}<p>after</p>") == explanation


def test_page_without_an_island_is_rejected():
    with pytest.raises(ValueError, match="dragoman explore --html"):
        read_island("<html></html>")


def test_page_is_one_file_with_a_policy_by_hashes():
    explanation = small_explanation()
    page = export_html(explanation, title="A <b> & title")
    collector = collect(page)
    assert collector.handlers == []
    tags = [(tag, attributes) for tag, attributes, _ in collector.found]
    assert all("src" not in attributes for _, attributes in tags)
    links = [attributes for tag, attributes in tags if tag == "link"]
    assert all((each.get("href") or "").startswith("data:") for each in links)
    titles = [text.strip() for tag, _, text in collector.found if tag == "title"]
    assert titles == ["A <b> & title"]
    policy = next(
        attributes["content"]
        for tag, attributes in tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")

    def hashed(text: str) -> str:
        digest = hashlib.sha256(text.encode("utf-8")).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    # The parser above splits at "<" inside a script; the elements are read as a browser does.
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(scripts) == 2
    assert len(styles) == 1
    assert [hashed(text) in policy for text in scripts + styles] == [True] * 3
    assert policy == content_policy(scripts, styles)
    assert page.count('type="application/json"') == 1
    assert read_island(page) == explanation


def test_policy_comes_before_what_it_governs():
    page = export_html(small_explanation())
    policy = page.index("Content-Security-Policy")
    assert policy < page.index("<style>")
    assert policy < page.index("<script")
    assert page.index('<meta charset="utf-8">') < policy < 200


def test_same_explanation_gives_the_same_file(tmp_path):
    path = tmp_path / "out.html"
    page = export_html(small_explanation(), path, title="t")
    assert path.read_text(encoding="utf-8") == page
    assert export_html(small_explanation(), title="t") == page


def test_numbers_that_json_cannot_hold_are_rejected():
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_island(small_explanation(score={"sum": float("nan")}))
