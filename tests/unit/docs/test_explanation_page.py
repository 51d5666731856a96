"""docs/explanation.md names every field of the format; its Python block prints what it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from dragoman.explain.explanation_schema_validation import explanation_schema

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "explanation.md").read_text(encoding="utf-8")


def test_the_block_prints_the_shown_output() -> None:
    [block] = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, "explanation.md", "exec"), {})
    expected = re.findall(r"^# (.+)$", block, flags=re.MULTILINE)
    assert printed.getvalue().splitlines() == expected


def test_every_field_of_the_schema_is_named() -> None:
    schema = explanation_schema()
    fields = set(schema["properties"])
    for part in ("token", "text", "step", "site", "head", "entry", "attribution", "tensor"):
        fields |= set(schema["$defs"][part]["properties"])
    fields |= set(schema["properties"]["limits"]["properties"])
    named = set(re.findall(r"`(\w+)`", PAGE)) | set(re.findall(r'"(\w+)":', PAGE))
    assert fields - named - {"id", "text", "words", "tokens", "lang", "site", "head", "of"} == set()


def test_it_is_linked() -> None:
    assert "(explanation.md)" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert "explanation.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
