"""docs/masks.md: every Python block runs by itself and prints what its comments show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from dragoman.config.language_model import LanguageConfig
from dragoman.recipes.catalogue import RECIPES

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_alone_and_prints_the_shown_output(number: int) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(BLOCKS[number], f"masks.md, block {number + 1}", "exec"), {})
    expected = re.findall(r"^# (.+)$", BLOCKS[number], flags=re.MULTILINE)
    assert printed.getvalue().splitlines() == expected


def test_all_names_exist() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z]+\d{4}\w*)`", row[-2])}
    assert named
    assert named <= set(RECIPES)
    for name in re.findall(r"language\.(\w+)=", PAGE):
        assert name in LanguageConfig.__dataclass_fields__
    for file in re.findall(r"`((?:tests|bench)/[\w/]+\.py)`", PAGE):
        assert (ROOT / file).is_file(), file
    assert "(masks.md)" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
