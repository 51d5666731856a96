"""docs/tagging.md: its commands are valid, and its lists are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dragoman.config import read_config
from dragoman.data.conll_reader import CONLLU_FIELDS
from dragoman.recipes.catalogue import recipes_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "tagging.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("dragoman train")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_training_commands_are_valid(command: str) -> None:
    words = shlex.split(command)
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words else None
    config = read_config(recipe=recipe, task="tag", overrides=overrides)
    assert config.problems() == []


def test_every_recipe_and_setting_exists() -> None:
    listed = re.findall(r"^\| `(\w+)`", PAGE.split("## Models")[1], re.MULTILINE)
    assert sorted(listed) == sorted(recipes_of("tag"))
    known = {f"tag.{name}" for name in type(read_config(task="tag").tag).__dataclass_fields__}
    assert set(re.findall(r"tag\.\w+", PAGE)) <= known


def test_the_names_of_columns_are_those_of_the_reader() -> None:
    for name in CONLLU_FIELDS[1:]:
        assert f"`{name}`" in PAGE


def test_readers_find_the_page() -> None:
    assert "tagging.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
