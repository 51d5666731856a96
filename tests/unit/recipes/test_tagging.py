"""Recipes of taggers: the papers' choices, and miniatures that learn."""

from __future__ import annotations

import pytest

from dragoman.config import read_config
from dragoman.recipes.catalogue import RECIPES, recipes_of
from dragoman.recipes.recipe_miniature import mini
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


def test_the_sizes_of_word_and_character_features() -> None:
    found = {}
    for name in NAMES:
        tag = RECIPES.load(name)().tag
        found[name] = (tag.word_width, tag.character_width, tag.character_features)
    del found["huang2015"]  # reads no characters
    assert found == {
        "lample2016": (100, 50, 100),
        "ma2016": (100, 30, 100),
        "plank2016": (100, 100, 200),
        "vaswani2017_tagger": (100, 50, 100),
    }
    digits = [name for name in NAMES if RECIPES.load(name)().tag.normalize_digits]
    assert sorted(digits) == ["huang2015", "lample2016", "vaswani2017_tagger"]
    assert RECIPES.load("ma2016")().tag.character_kernel == 3
    assert RECIPES.load("plank2016")().tag.auxiliary_weight == 0.3
    assert {RECIPES.load(name)().tag.word_dropout for name in NAMES} == {0.25}
    assert {RECIPES.load(name)().tag.max_characters for name in NAMES} == {16}


@pytest.mark.parametrize("name", NAMES)
def test_all_are_trained_for_f1_and_hold_out_a_tenth(name: str) -> None:
    config = RECIPES.load(name)()
    train = config.train
    assert config.data.hold_out == 10
    assert (config.text.tokenizer, config.text.lowercase, config.text.min_count) == (
        "words",
        True,
        1,
    )
    assert (train.optimizer, train.schedule, train.label_smoothing) == ("adamw", "linear", 0.0)
    assert (train.best_metric, train.final_checkpoint) == ("f1", "best")
    assert (train.batch_tokens, train.weight_decay, train.max_grad_norm) == (1024, 1e-4, 5.0)
    assert (train.ema_decay, train.validate_every) == (0.998, 500)
    is_transformer = name == "vaswani2017_tagger"
    assert train.learning_rate == (5e-4 if is_transformer else 2e-3)
    assert train.warmup_steps == (1000 if is_transformer else 200)
    assert train.epochs == (30.0 if name == "plank2016" else 40.0)
    if not is_transformer:
        assert config.model.encoder == ("bilstm(residual_connection=false)*2",)
        assert (config.model.width, config.model.dropout) == (512, 0.5)


@pytest.mark.parametrize("name", NAMES)
def test_the_miniature_learns(name: str) -> None:
    config = read_config(recipe=name, scale=mini)
    assert config.problems() == []
    records = make_records(60)
    task = TaggingTask(config, TaggingTask.fit_text(config, lambda: iter(records)))
    model = train_task(task, records, steps=80, lr=0.01)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert evaluate(task, model, make_records(30, seed=9))["f1"] > 0.9
