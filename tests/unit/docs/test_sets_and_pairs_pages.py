"""docs/sets.md and docs/sentence-pairs.md: commands are valid, and lists are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dragoman.config import read_config
from dragoman.config.unordered_set_input_task import GENERATED_PROBLEMS
from dragoman.recipes.catalogue import recipes_of

ROOT = Path(__file__).resolve().parents[3]
PAGES = {"sets": "sets.md", "pairs": "sentence-pairs.md"}
TEXTS = {task: (ROOT / "docs" / name).read_text(encoding="utf-8") for task, name in PAGES.items()}
COMMANDS = [
    (task, line)
    for task, text in TEXTS.items()
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("dragoman train")
]


@pytest.mark.parametrize(("task", "command"), COMMANDS)
def test_training_commands_are_valid(task: str, command: str) -> None:
    words = shlex.split(command)
    overrides = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    recipe = words[words.index("--recipe") + 1] if "--recipe" in words else None
    config = read_config(recipe=recipe, task=task, overrides=overrides)
    assert config.problems() == []
    assert config.sets.is_generated or "--train" in words


@pytest.mark.parametrize("task", PAGES)
def test_every_recipe_and_setting_exists(task: str) -> None:
    text = TEXTS[task]
    listed = re.findall(r"^\| `(\w+)`", text.split("| recipe |")[1], re.MULTILINE)
    assert set(recipes_of(task)) <= set(listed)
    known = {
        f"{task}.{name}"
        for name in type(getattr(read_config(task=task), task)).__dataclass_fields__
    }
    assert set(re.findall(rf"`({task}\.\w+)", text)) <= known
    assert PAGES[task] in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_generated_problem_is_described() -> None:
    assert all(f"| `{problem}` |" in TEXTS["sets"] for problem in GENERATED_PROBLEMS)
