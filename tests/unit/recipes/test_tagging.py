"""Recipes of taggers: the papers' choices, and miniatures that learn."""

from __future__ import annotations

import pytest

from dragoman.config import read_config
from dragoman.recipes.catalogue import RECIPES, recipes_of
from dragoman.recipes.mini_config import mini
from dragoman.tasks.tagging import TaggingTask
from tests.tagging_kit import evaluate, make_records, train_task

NAMES = list(recipes_of("tag"))


def test_the_default_is_the_bilstm_crf_with_characters() -> None:
    assert NAMES[0] == "lample2016"
    assert read_config(task="tag").recipe == "lample2016"


def test_the_papers_choices() -> None:
    config = {name: RECIPES.load(name)().tag for name in NAMES}
    assert {name: tag.characters for name, tag in config.items()} == {
        "lample2016": "lstm",
        "ma2016": "cnn",
        "huang2015": "none",
        "plank2016": "lstm",
        "vaswani2017_tagger": "cnn",
    }
    assert [name for name, tag in config.items() if not tag.crf] == ["plank2016"]
    assert config["plank2016"].auxiliary_fields == ("frequency",)
    assert "suffix3" in config["huang2015"].features


@pytest.mark.parametrize("name", NAMES)
def test_the_miniature_learns(name: str) -> None:
    config = read_config(recipe=name, scale=mini)
    assert config.problems() == []
    records = make_records(60)
    task = TaggingTask(config, TaggingTask.fit_text(config, lambda: iter(records)))
    model = train_task(task, records, steps=80, lr=0.01)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert evaluate(task, model, make_records(30, seed=9))["f1"] > 0.9
