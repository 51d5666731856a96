"""Recipes of masked language models: the papers' objectives and shapes."""

from __future__ import annotations

import pytest

from dragoman.config import read_config
from dragoman.recipes.recipe_miniature import mini

NAMES = ("devlin2019", "yang2019", "lan2020_lm")


@pytest.mark.parametrize("name", NAMES)
def test_settings_fit_each_other(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert mini(config).problems() == []
    assert config.train.label_smoothing == 0.0, "perplexity is of the model's distribution"
    assert config.model.width == 64 * config.model.heads, "heads of 64"
    assert config.model.ffn_width == 4 * config.model.width


def test_bert_predicts_15_percent_of_segments_of_128() -> None:
    config = read_config(recipe="devlin2019")
    model, language, train = config.model, config.language, config.train
    assert (language.objective, language.mask_rate, language.segment) == ("masked", 0.15, 128)
    assert not language.sentence_order
    assert (model.decoder, model.width, model.activation) == (("transformer*6",), 256, "gelu")
    assert (model.positions, model.residual) == ("learned", "pre_norm")
    assert (model.dropout, model.attention_dropout, language.input_dropout) == (0.1, 0.1, 0.1)
    assert (train.optimizer, train.beta2, train.weight_decay) == ("adamw", 0.999, 0.01)
    assert (train.learning_rate, train.schedule, train.warmup_steps) == (1e-3, "linear", 1000)
    assert train.batch_tokens == 128 * 128


def test_xlnet_is_bert_with_a_sixth_of_the_tokens_in_random_order() -> None:
    bert, xlnet = read_config(recipe="devlin2019"), read_config(recipe="yang2019")
    assert (xlnet.language.objective, xlnet.language.mask_rate) == ("permuted", 1 / 6)
    assert xlnet.model == bert.replace(model={"positions": "sinusoidal"}).model
    assert xlnet.train == bert.train


def test_albert_shares_layers_and_predicts_the_order_of_segments() -> None:
    config = read_config(recipe="lan2020_lm")
    model = config.model
    assert (config.language.objective, config.language.sentence_order) == ("masked", True)
    assert (model.share_layers, model.embedding_width, model.width) == ("all", 128, 512)
    assert (model.dropout, model.attention_dropout) == (0.0, 0.0)
    assert config.train == read_config(recipe="devlin2019").train
