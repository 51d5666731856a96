"""Precedence of recipe, file and overrides, and the limits of configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.config import Config, apply_overrides, read_config, read_yaml, to_dict
from dragoman.config.loader import MAX_YAML_BYTES, default_recipe, load_yaml, recipe_task
from dragoman.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_named_recipe_wins_over_that_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "recipe: vaswani2017_base\ntrain: {seed: 3}\n")
    config = read_config(recipe="tiny", file=file)
    assert (config.recipe, config.train.seed) == ("tiny", 3)
    assert (
        config.model
        == read_config(recipe="tiny").model
        != read_config(recipe="vaswani2017_base").model
    )


def test_a_named_task_wins_over_that_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "task: classify\n")
    assert read_config(file=file).task == "classify"
    assert read_config(file=file, task="tag").task == "tag"


def test_a_file_and_overrides_are_applied_after_scaling(tmp_path: Path) -> None:
    file = write(tmp_path, "model: {width: 64, heads: 2}\n")

    def scale(config: Config) -> Config:
        return config.replace(model={"width": 32, "heads": 4, "ffn_width": 48})

    config = read_config(file=file, overrides=["model.heads=8"], scale=scale)
    assert (config.model.width, config.model.heads, config.model.ffn_width) == (64, 8, 48)


def test_the_last_override_of_a_setting_wins() -> None:
    config = read_config(overrides=["train.seed=3", "model.dropout=0.2", "train.seed=4"])
    assert (config.train.seed, config.model.dropout) == (4, 0.2)


def test_settings_start_from_a_given_base_unless_a_recipe_is_named() -> None:
    base = Config(task="tag").replace(train={"seed": 9})
    assert read_config(base=base, overrides=["train.steps=5"]) == base.replace(train={"steps": 5})
    assert read_config(base=base, task="tag") == base
    assert read_config(base=base, recipe="tiny").train.seed != 9


def test_a_recipe_must_be_of_the_named_task() -> None:
    with pytest.raises(
        ConfigError, match="--task tag needs a recipe of this task; found tiny of task translate"
    ):
        read_config(recipe="tiny", task="tag")
    with pytest.raises(ConfigError, match="found settings of task classify"):
        read_config(base=Config(task="classify"), task="tag")


def test_every_task_but_translation_has_a_recipe_of_its_own() -> None:
    assert default_recipe("translate") == ""
    for task in ("language", "classify", "tag", "pairs", "sets"):
        assert recipe_task(default_recipe(task)) == task
        assert read_config(task=task).task == task
    with pytest.raises(ConfigError, match="found 'tags'; did you mean tag"):
        default_recipe("tags")


def test_an_override_without_a_value_is_empty_text() -> None:
    base = Config().replace(data={"src": "a", "tgt": "b"})
    assert apply_overrides(base, ["data.src=", "data.tgt="]).data == Config().data
    with pytest.raises(ConfigError, match=r"train\.steps must be .*found nothing"):
        apply_overrides(base, ["train.steps=~"])


def test_a_file_may_have_one_mebibyte_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufefftrain: {seed: 3}\n#"
    file = write(tmp_path, text + "x" * (MAX_YAML_BYTES - len(text.encode())))
    assert file.stat().st_size == MAX_YAML_BYTES == 1 << 20
    assert read_yaml(file) == {"train": {"seed": 3}}


def test_values_may_be_nested_to_a_depth_of_32() -> None:
    assert str(load_yaml("[" * 32 + "]" * 32)) == "[" * 32 + "]" * 32
    with pytest.raises(Exception, match="values nested deeper than 32"):
        load_yaml("[" * 33 + "]" * 33)


def test_numbers_may_have_300_digits() -> None:
    assert load_yaml("9" * 300) == int("9" * 300)
    with pytest.raises(Exception, match="a number of 301 digits"):
        load_yaml("9" * 301)


def test_a_configuration_has_the_sections_of_its_task_only() -> None:
    common = {"recipe", "task", "text", "data", "model", "train", "decode"}
    assert set(to_dict(Config())) == common
    assert set(to_dict(Config(task="pairs"))) == {*common, "pairs"}
