"""The tool that builds the explorer page: rules for its modules, and the committed files."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[3] / "tools" / "build_explorer_page.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_explorer_page", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_explorer_page"] = module
    spec.loader.exec_module(module)
    return module


def test_committed_page_is_built_from_its_sources(tool):
    try:
        tool.check_minifier()
    except RuntimeError as error:
        pytest.skip(str(error))
    for name, text in tool.build_page().items():
        committed = (tool.STATIC_DIR / name).read_bytes().decode("utf-8")
        assert committed == text, f"static/{name} is not built from page/: run `make page`"


def test_only_built_and_vendored_files_are_shipped(tool):
    files = {
        path.relative_to(tool.STATIC_DIR).as_posix()
        for path in tool.STATIC_DIR.rglob("*")
        if path.is_file()
    }
    vendor = {"README.md", "d3-hierarchy.LICENSE", "d3-hierarchy.min.js"}
    built = {"explorer.css", "explorer.js", "index.html"}
    assert files == built | {f"vendor/{name}" for name in vendor}


def test_built_scripts_and_styles_can_stand_in_a_page(tool):
    for path in tool.STATIC_DIR.rglob("*.[cj]s*"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"</(?:script|style)|<!--", text, re.IGNORECASE), path.name


def test_another_minifier_is_rejected(tool, monkeypatch, capsys):
    monkeypatch.setattr(tool.importlib.metadata, "version", lambda name: "1.2.3")
    with pytest.raises(RuntimeError, match=r"tdewolff-minify [\d.]+; found 1\.2\.3; run: python"):
        tool.build_page()
    assert tool.main() == 2
    assert "found 1.2.3" in capsys.readouterr().err


def test_a_page_without_its_links_is_rejected(tool, tmp_path):
    (tmp_path / "index.html").write_text("<html></html>", encoding="utf-8")
    with pytest.raises(ValueError, match=r"^index\.html: must have .*static/app\.css"):
        tool.link_built_files(tmp_path)


def test_modules_of_the_page_follow_the_rules(tool):
    modules = tool.read_modules(tool.SOURCE_DIR / "js")
    order = tool.order_modules(modules, "main.js")
    assert set(order) == set(modules), "every module is used by the page"
    for name in order:
        assert all(order.index(source) < order.index(name) for source in modules[name].imports), (
            name
        )


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
def test_a_module_that_cannot_be_joined_is_rejected(tool, text, found):
    with pytest.raises(ValueError, match=r"^m\.js: ") as caught:
        tool.read_module("m.js", text)
    assert found in str(caught.value)


def test_a_module_is_read(tool):
    module = tool.read_module(
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


def test_names_must_be_unique(tool, tmp_path):
    write_modules(tmp_path, a="const same = 1;\n", b="function same() {}\n")
    with pytest.raises(ValueError, match=r"unique; found same in a\.js and b\.js"):
        tool.read_modules(tmp_path)


def test_imports_must_exist(tool, tmp_path):
    write_modules(tmp_path, a="const hidden = 1;\n", b="import { hidden } from './a.js';\n")
    with pytest.raises(ValueError, match=r"b\.js: imports must be exported; found no hidden in a"):
        tool.read_modules(tmp_path)


def test_cycles_are_rejected(tool, tmp_path):
    write_modules(
        tmp_path,
        a="import { b } from './b.js';\nexport const a = 1;\n",
        b="import { a } from './a.js';\nexport const b = 1;\n",
    )
    with pytest.raises(ValueError, match=r"no cycle; found a\.js -> b\.js -> a\.js"):
        tool.order_modules(tool.read_modules(tmp_path), "a.js")


def test_modules_are_joined_after_their_imports(tool, tmp_path):
    write_modules(
        tmp_path,
        main="import { top } from './z.js';\nimport { low } from './a.js';\nuse(top, low);\n",
        z="import { low } from './a.js';\nexport const top = low + 1;\n",
        a="export const low = 'const ';\nfor (const each of low) use(each);\n",
    )
    head, body, tail = tool.join_modules(tmp_path).partition("let low = 'const ';\n")
    assert re.fullmatch(r"\(\([\w, ]+\) => \{\n", head)
    assert (body + tail).startswith(
        "let low = 'const ';\nfor (let each of low) use(each);\n"
        "let top = low + 1;\nuse(top, low);\n})("
    )
