"""Recipes of sets: the paper's blocks and numbers, and a training without label smoothing."""

from __future__ import annotations

import pytest

from dragoman.config import read_config
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.recipe_miniature import mini

NAMES = list(recipes_of("sets"))
# problem, encoder, blocks, pooling, seeds, blocks after pooling
BLOCKS = {
    "lee2019": ("auto", "sab", 2, "pma", 1, 0),
    "lee2019_isab": ("auto", "isab", 2, "pma", 1, 0),
    "lee2019_max": ("maximum", "sab", 2, "pma", 1, 0),
    "lee2019_unique": ("unique", "sab", 2, "pma", 1, 0),
    "lee2019_clustering": ("clustering", "isab", 2, "pma", 4, 2),
    "zaheer2017_mean": ("maximum", "mlp", 3, "mean", 1, 2),
    "zaheer2017_sum": ("maximum", "mlp", 3, "sum", 1, 2),
    "zaheer2017_max": ("maximum", "mlp", 3, "max", 1, 2),
}


def test_the_papers_blocks() -> None:
    found = {}
    for name in NAMES:
        sets = read_config(recipe=name).sets
        found[name] = (
            sets.problem,
            sets.encoder,
            sets.layers,
            sets.pooling,
            sets.seeds,
            sets.decoder_layers,
        )
    assert found == BLOCKS


def test_inducing_points_and_components() -> None:
    assert read_config(recipe="lee2019_isab").sets.inducing_points == 16
    clustering = read_config(recipe="lee2019_clustering")
    assert (clustering.sets.inducing_points, clustering.sets.components) == (32, 4)
    assert (clustering.model.width, clustering.model.residual) == (128, "pre_norm")
    assert clustering.train.batch_tokens == 64_000


@pytest.mark.parametrize("name", NAMES)
def test_all_share_blocks_of_four_heads_and_the_training(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert mini(config).problems() == []
    model, train = config.model, config.train
    is_clustering = name == "lee2019_clustering"
    assert (model.width, model.heads) == (128 if is_clustering else 64, 4)
    assert model.ffn_width == model.width, "the paper's rFF has the width of the block"
    assert model.residual == ("pre_norm" if is_clustering else "no_norm")
    assert (model.positions, model.dropout) == ("none", 0.0)
    assert (train.optimizer, train.learning_rate, train.beta2) == ("adam", 1e-3, 0.999)
    assert (train.schedule, train.warmup_steps, train.label_smoothing) == ("cosine", 500, 0.0)
    assert (train.precision, train.param_dtype) == ("float32", "float32")
    assert train.steps == (5000 if config.sets.problem == "auto" else 20_000)
    clipped = config.sets.problem in ("unique", "clustering")
    assert train.max_grad_norm == (1.0 if clipped else 0.0)


def test_batches_are_counted_in_elements() -> None:
    sizes = {name: read_config(recipe=name).train.batch_tokens for name in NAMES}
    assert sizes["lee2019"] == sizes["lee2019_isab"] == 8192
    assert sizes["lee2019_max"] == sizes["zaheer2017_mean"] == 1024 * 10
    assert sizes["lee2019_unique"] == 128 * 10
