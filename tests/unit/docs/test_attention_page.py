"""docs/attention.md: every Python block runs by itself and prints what its comments show."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dragoman.attention

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "attention.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def shown(block: str) -> list[str]:
    """Return the expected output of a block: its comment lines."""
    return [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs_alone_and_prints_the_shown_output(number: int) -> None:
    printed, names = io.StringIO(), {"__name__": "attention_page"}
    with (
        torch.random.fork_rng(devices=[]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        exec(compile(BLOCKS[number], f"attention.md, block {number + 1}", "exec"), names)
    assert printed.getvalue().splitlines() == shown(BLOCKS[number])
    assert torch.is_grad_enabled()


def test_only_public_names_are_used() -> None:
    for names in re.findall(r"^from dragoman\.attention import (.+)$", PAGE, flags=re.MULTILINE):
        assert [
            name for name in names.split(", ") if name not in (*dragoman.attention.__all__, "masks")
        ] == []
    assert set(re.findall(r"from (dragoman[\w.]*) import", PAGE)) <= {
        "dragoman",
        "dragoman.attention",
    }


def test_the_table_leads_to_every_section_and_readers_find_the_page() -> None:
    sections = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) == sections
    assert "(attention.md)" in (DOCS / "README.md").read_text(encoding="utf-8")
    for file in re.findall(r"`(dragoman/[\w/]+\.py)`", PAGE):
        assert (DOCS.parent / file).is_file(), file


def test_examples_use_torch() -> None:
    for block in BLOCKS:
        tree: Any = compile(block, "attention.md", "exec")
        assert "torch" in tree.co_names
