"""The Reformer recipes have the released settings; `recipes show` prints every layer."""

from __future__ import annotations

import pytest
import torch

from dragoman.cli.layer_diagram import format_stack
from dragoman.config import from_dict, read_config, to_dict
from dragoman.models.factory import build_model, summarize_model
from dragoman.models.reformer_blocks import Reformer, ReversibleLSHLayer
from dragoman.recipes.reformer import kitaev2020, kitaev2020_wmt
from dragoman.registry import catalogue

NAMES = ["kitaev2020", "kitaev2020_wmt"]


def test_the_translation_model_has_the_released_numbers() -> None:
    """google/trax, reformer_wmt_ende.gin."""
    config = kitaev2020_wmt()
    assert (
        config.model.width,
        config.model.heads,
        config.model.ffn_width,
        config.model.dropout,
    ) == (512, 8, 2048, 0.1)
    assert (
        config.train.beta1,
        config.train.beta2,
        config.train.epsilon,
        config.train.warmup_steps,
    ) == (0.9, 0.98, 1e-9, 8000)
    rate = catalogue("schedule").load("noam")(8000, config.train, 512)
    assert rate == pytest.approx(0.088 * 8000**-0.5, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_found_by_name_and_is_a_run_on_both_sides(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert from_dict(to_dict(config)) == config
    with torch.device("meta"):
        model = build_model(config.model, src_vocab_size=100, tgt_vocab_size=100)
    for stack in (model.encoder, model.decoder):
        (run,) = (block for _, block in stack.blocks())
        assert isinstance(run, Reformer)
        assert run.depth == 6
        assert all(
            isinstance(layer, ReversibleLSHLayer) == (name == "kitaev2020")
            for _, layer in run.layers()
        )
        assert stack.norm is not None


def test_the_recipe_keeps_the_papers_rule_of_buckets() -> None:
    model = kitaev2020().model
    assert (
        model.encoder
        == model.decoder
        == ("reformer(layers=6, rounds=4, buckets=64, window=64, ffn_chunks=4)",)
    )
    assert 2 * model.max_positions // 64 == 64


def test_a_run_is_drawn_layer_by_layer() -> None:
    config = kitaev2020().model
    lines = format_stack(summarize_model(config, src_vocab_size=100, tgt_vocab_size=100), config)
    assert sum("layers 0.0 to 0.5, each" in line for line in lines) == 2
    assert sum("LSHAttention" in line for line in lines) == 2
    assert any("cross " in line and "CrossAttention" in line for line in lines)
