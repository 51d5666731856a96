"""The walkthrough runs: every block in order, in both languages, with the output shown."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = ("walkthrough.md", "walkthrough.zh.md")


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", read(page), flags=re.DOTALL | re.MULTILINE)


def shown(block: str) -> list[str]:
    """Return the expected output of a block: its comment lines."""
    return [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_run_and_print_the_shown_output(page: str) -> None:
    names: dict[str, Any] = {"__name__": "walkthrough"}
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):  # the page sets a seed and turns gradients off
        for number, block in enumerate(blocks(page), start=1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block, f"{page}, block {number}", "exec"), names)
            assert printed.getvalue().splitlines() == shown(block), f"{page}, block {number}"
    assert torch.is_grad_enabled()


def test_both_languages_show_the_same_code() -> None:
    english, chinese = map(blocks, PAGES)
    assert len(english) == 17
    assert english == chinese


def test_the_documents_worked_example_is_shown() -> None:
    (block,) = [block for block in blocks(PAGES[0]) if "112.0" in block]
    assert shown(block)[:2] == ["[112.0, 96.0] [14.0, 12.0]", "[0.88, 0.12]"]


@pytest.mark.parametrize("page", PAGES)
def test_every_step_names_files_that_exist(page: str) -> None:
    steps = re.findall(r"^## \d+\..*?(?=^## |\Z)", read(page), flags=re.DOTALL | re.MULTILINE)
    assert len(steps) == 14
    for step in steps:
        files = re.findall(r"`(dragoman/[\w/]+\.py)`", step)
        assert files, step.splitlines()[0]
        assert [name for name in files if not (DOCS.parent / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_readers_find_the_page(page: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", read(page)):
        assert (DOCS / link).is_file(), link
    assert f"({page})" in read("README.md")
