"""Recipes of sentence pairs: the papers' choices, and the training that they share."""

from __future__ import annotations

import pytest

from dragoman.config import read_config
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.recipe_miniature import mini

NAMES = list(recipes_of("pairs"))
# interaction, pooling, classifier width, match features, encoder
CHOICES = {
    "chen2017": ("co_attention", "mean_max", 128, True, "bilstm"),
    "parikh2016": ("decomposable", "sum", 128, True, "ffn"),
    "conneau2017": ("none", "max", 512, False, "bilstm(residual_connection=false)"),
    "rocktaschel2016": ("sequence", "mean_max", 128, True, "transformer*2"),
}


def test_the_papers_choices() -> None:
    found = {}
    for name in NAMES:
        config = read_config(recipe=name)
        (encoder,) = config.model.encoder
        pairs = config.pairs
        found[name] = (
            pairs.interaction,
            pairs.pooling,
            pairs.classifier_width,
            pairs.match_features,
            encoder,
        )
    assert found == CHOICES
    assert read_config(recipe="chen2017").pairs.composition == (
        "bilstm(residual_connection=false)",
    )


def test_only_the_transformer_swaps_pairs_and_encodes_positions() -> None:
    configs = {name: read_config(recipe=name) for name in NAMES}
    assert [name for name in NAMES if configs[name].pairs.swap] == ["rocktaschel2016"]
    assert {name: config.model.positions for name, config in configs.items()} == {
        "chen2017": "none",
        "parikh2016": "none",
        "conneau2017": "none",
        "rocktaschel2016": "sinusoidal",
    }
    transformer = configs["rocktaschel2016"]
    assert (transformer.model.residual, transformer.model.dropout) == ("pre_norm", 0.1)
    assert transformer.train.learning_rate == 2e-3


@pytest.mark.parametrize("name", NAMES)
def test_all_share_sizes_and_training(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert mini(config).problems() == []
    model, train = config.model, config.train
    assert (config.text.tokenizer, config.text.lowercase) == ("words", True)
    assert (config.text.vocab_size, config.data.max_length) == (30_000, 100)
    assert (model.width, model.heads, model.ffn_width) == (64, 4, 128)
    assert (train.epochs, train.batch_tokens, train.optimizer) == (12, 1024, "adam")
    assert (train.beta2, train.schedule, train.warmup_steps) == (0.999, "cosine", 50)
    assert (train.max_grad_norm, train.ema_decay, train.label_smoothing) == (5.0, 0.98, 0.0)
    assert (train.best_metric, train.final_checkpoint) == ("accuracy", "best")
    if name != "rocktaschel2016":
        assert (train.learning_rate, model.dropout) == (3e-3, 0.2)
