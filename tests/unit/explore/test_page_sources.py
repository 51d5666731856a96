"""The page's sources: vendored files are unmodified, modules keep the rules of the exporter, no
markup from strings.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import dragoman

SOURCES = Path(dragoman.__file__).parent / "explore" / "page"
VENDOR = SOURCES.parent / "static" / "vendor"
MODULES = sorted((SOURCES / "js").glob("*.js"))
VIEWS = SOURCES / "js" / "state.js"  # panels; the page has a title and a purpose for each
STRING = r"'(?:[^'\\]|\\.)+'"
PLACES = set(
    re.findall(
        r'data-i18n(?:-label)?="([\w.]+)"(?: aria-label="[^"]+"|>[^<]+)',
        (SOURCES / "index.html").read_text(encoding="utf-8"),
    )
)


def test_vendored_files_have_their_recorded_hash() -> None:
    readme = (VENDOR / "README.md").read_text(encoding="utf-8")
    recorded = dict(
        re.findall(r"^\| `([^`]+)` \|.*`([0-9a-f]{64})` \|$", readme, flags=re.MULTILINE)
    )
    scripts = {path.name for path in VENDOR.glob("*.js")}
    assert set(recorded) == scripts
    for name, digest in recorded.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest
        assert (VENDOR / name.replace(".min.js", ".LICENSE")).is_file()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_markup_or_code_from_strings(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    for sink in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "setAttribute('style'",
        "DOMParser",
        "createContextualFragment",
        ".srcdoc",
    ):
        assert sink not in source, sink
    assert "http://" not in source
    assert "https://" not in source


def strings_of(path: Path) -> list[tuple[set[str], set[str]]]:
    """Return the English and the Chinese keys of every addTexts call of a module."""
    source = path.read_text(encoding="utf-8")
    found = []
    calls = re.findall(
        r"^(?:const \w+ = )?addTexts\('(\w+)', \{\n(.*?)^\}\);", source, flags=re.M | re.S
    )
    for prefix, table in calls:
        english, chinese = set(), set()
        for line in table.splitlines():
            entry = re.fullmatch(rf"  '?([\w.@]+)'?: (?:\[({STRING}), {STRING}\]|{STRING}),", line)
            assert entry, f"must be `key: [English, Chinese],`; found {line.strip()!r}"
            key = f"{prefix}.{entry[1]}"
            chinese.add(key)
            # English of the page's own elements stands in index.html, of these in the explanation.
            is_explained = key == "positions.reach" or key.startswith("positions.kind.")
            if entry[2] or key in PLACES or is_explained:
                english.add(key)
        found.append((english, chinese))
    return found


@pytest.mark.parametrize(
    "path", [path for path in MODULES if strings_of(path)], ids=lambda path: path.name
)
def test_every_string_is_in_english_and_chinese(path: Path) -> None:
    for english, chinese in strings_of(path):
        assert english == chinese


def test_every_key_of_the_page_has_a_string() -> None:
    known = {key for path in MODULES for english, _ in strings_of(path) for key in english}
    page = (SOURCES / "index.html").read_text(encoding="utf-8")
    used = set(re.findall(r'data-i18n(?:-label)?="([\w.]+)"', page))
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"(?:translate|sentence)\('([\w.]+)'", source))
        for name, prefix in re.findall(r"^const (\w+) = addTexts\('(\w+)'", source, flags=re.M):
            assert name == f"{prefix}Text"
            used |= {f"{prefix}.{key}" for key in re.findall(rf"\b{name}\('([\w.]+)'", source)}
    views = re.search(r"^export const VIEWS = \[(.*)\];", VIEWS.read_text("utf-8"), flags=re.M)
    assert views
    used |= {
        f"{view}.{key}" for view in re.findall(r"\w+", views[1]) for key in ("title", "purpose")
    }
    assert len(used) > 150
    assert used <= known


def test_style_attributes_and_handlers_are_not_in_the_page() -> None:
    page = (SOURCES / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\sstyle=|\son\w+=", page)
