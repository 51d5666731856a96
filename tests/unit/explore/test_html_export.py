"""The one-file export: joined modules, inlined styles, the JSON island and the content policy."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
from pathlib import Path
from typing import Any

import pytest

from dragoman.explore.html_export import (
    STATIC_DIR,
    content_policy,
    encode_island,
    export_html,
    join_modules,
    minify_script,
    order_modules,
    read_island,
    read_module,
    read_modules,
)

SINKS = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "eval(",
    "new Function",
    "DOMParser",
    "createContextualFragment",
    "setAttribute('style'",
    ".srcdoc",
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


def test_modules_of_the_page_follow_the_rules():
    modules = read_modules(STATIC_DIR / "js")
    order = order_modules(modules, "main.js")
    assert set(order) == set(modules), "every module is used by the page"
    for name in order:
        assert all(order.index(source) < order.index(name) for source in modules[name].imports), (
            name
        )


def test_page_sources_use_no_markup_strings():
    for path in [*sorted((STATIC_DIR / "js").glob("*.js")), STATIC_DIR / "index.html"]:
        text = path.read_text(encoding="utf-8")
        assert [sink for sink in SINKS if sink in text] == [], path.name


def test_joined_modules_have_no_imports_or_exports():
    joined = join_modules(STATIC_DIR / "js")
    assert not re.search(r"^(import|export)\b", joined, re.MULTILINE)
    assert "</script" not in joined.lower()
    assert "<!--" not in joined


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import a from './x.js';\n", "import a from './x.js';"),
        ("import * as a from './x.js';\n", "import * as a"),
        ("import { a as b } from './x.js';\n", "a as b"),
        ("import './x.js';\n", "import './x.js';"),
        ('import { a } from "./x.js";\n', 'import { a } from "./x.js";'),
        ("export default function a() {}\n", "export default"),
        ("export { a };\n", "export { a }"),
        ("export let a = 1;\n", "export let a"),
        ("const { a, b } = c;\n", "const { a, b }"),
        ("var a = 1;\n", "var a = 1;"),
        ("const a = await import('./x.js');\n", "import('./x.js')"),
        ("const a = import.meta.url;\n", "import.meta"),
        ("const a = '</script>';\n", "</script"),
        ("const a = `x\n  y`;\n", "const a = `x"),
    ],
)
def test_a_module_that_cannot_be_joined_is_rejected(text, found):
    with pytest.raises(ValueError, match=r"^m\.js: ") as caught:
        read_module("m.js", text)
    assert found in str(caught.value)


def test_a_module_is_read():
    module = read_module(
        "m.js",
        "// Title\nimport {\n  a,\n  b,\n} from './x.js';\nimport { c } from './y.js';\n\n"
        "const inner = 1;\nexport const outer = inner;\nexport function f() {\n  const g = 1;\n}\n"
        "export async function h() {}\nexport class K {}\n",
    )
    assert module.imports == {"x.js": ("a", "b"), "y.js": ("c",)}
    assert module.declared == ("inner", "outer", "f", "h", "K")
    assert module.exported == {"outer", "f", "h", "K"}
    assert "import" not in module.body
    assert "export" not in module.body


def write_modules(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.js").write_text(text, encoding="utf-8")
    return folder


def test_names_must_be_unique(tmp_path):
    write_modules(tmp_path, a="const same = 1;\n", b="function same() {}\n")
    with pytest.raises(ValueError, match=r"unique; found same in a\.js and b\.js"):
        read_modules(tmp_path)


def test_imports_must_exist(tmp_path):
    write_modules(tmp_path, a="const hidden = 1;\n", b="import { hidden } from './a.js';\n")
    with pytest.raises(ValueError, match=r"b\.js: imports must be exported; found no hidden in a"):
        read_modules(tmp_path)


def test_cycles_are_rejected(tmp_path):
    write_modules(
        tmp_path,
        a="import { b } from './b.js';\nexport const a = 1;\n",
        b="import { a } from './a.js';\nexport const b = 1;\n",
    )
    with pytest.raises(ValueError, match=r"no cycle; found a\.js -> b\.js -> a\.js"):
        order_modules(read_modules(tmp_path), "a.js")


def test_modules_are_joined_after_their_imports(tmp_path):
    write_modules(
        tmp_path,
        main="import { top } from './z.js';\nimport { low } from './a.js';\nuse(top, low);\n",
        z="import { low } from './a.js';\nexport const top = low + 1;\n",
        a="export const low = 1;\n",
    )
    joined = join_modules(tmp_path, "main.js")
    assert joined == (
        "// a.js\nconst low=1;\n// z.js\nconst top=low + 1;\n// main.js\nuse(top,low);\n"
    )


def test_island_cannot_leave_its_element():
    explanation = small_explanation()
    island = encode_island(explanation)
    assert island.count("<") == 2
    assert read_island(f"<p>before</p>{island}<p>after</p>") == explanation


def test_page_without_an_island_is_rejected():
    with pytest.raises(ValueError, match="dragoman explore --html"):
        read_island("<html></html>")


def test_joined_modules_have_no_comment_lines_or_indentation(tmp_path):
    write_modules(
        tmp_path, main="// Says what.\nif (a) {\n  // Why.\n  b('// kept'); // kept\n}\n\n"
    )
    assert join_modules(tmp_path) == "// main.js\nif(a){\nb('// kept'); // kept\n}\n"


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
    assert len(styles) == 2
    assert [hashed(text) in policy for text in scripts + styles] == [True] * 4
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


@pytest.mark.parametrize(
    ("line", "squeezed"),
    [
        ("const a = (b, c) => ({ d: b === c });\n", "const a=(b,c)=>({d:b===c});\n"),
        ("say('a = b', `${c} , d`, \"e ; f\") ;\n", "say('a = b', `${c} , d`, \"e ; f\");\n"),
        ("if (/ = /.test(a)) b = c / d;\n", "if (/ = /.test(a)) b = c / d;\n"),
        ("a = b + +c - -d; // why\n", "a = b + +c - -d; // why\n"),
        ("a = b + +c - -d;\n", "a=b + +c - -d;\n"),
        ("return a instanceof B ? [1, 2] : null;\n", "return a instanceof B?[1,2]:null;\n"),
    ],
)
def test_spaces_without_a_meaning_are_left_out(line, squeezed):
    assert minify_script(f"  {line}") == squeezed
