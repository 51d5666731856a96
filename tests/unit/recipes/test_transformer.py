"""Transformer recipes have the paper's settings, and build."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dragoman.config import apply_overrides, from_dict, read_config, to_dict
from dragoman.models.factory import build_model, count_parameters
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.transformer import vaswani2017_base, vaswani2017_big
from dragoman.registry import catalogue

MILLIONS = {"tiny": 1.4, "small": 9.4, "vaswani2017_base": 63, "vaswani2017_big": 214}


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_every_recipe_is_consistent_and_builds(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert from_dict(to_dict(config)) == config
    with torch.device("meta"):
        model = build_model(
            config.model,
            src_vocab_size=config.text.vocab_size,
            tgt_vocab_size=config.text.vocab_size,
        )
    if name in MILLIONS:
        assert count_parameters(model) / 1e6 == pytest.approx(MILLIONS[name], rel=0.03)


def test_the_paper_models_have_the_papers_numbers() -> None:
    base, big = vaswani2017_base(), vaswani2017_big()
    assert (base.model.width, base.model.heads, base.model.ffn_width, base.model.dropout) == (
        512,
        8,
        2048,
        0.1,
    )
    assert (big.model.width, big.model.heads, big.model.ffn_width, big.model.dropout) == (
        1024,
        16,
        4096,
        0.3,
    )
    for config in (base, big):
        assert (config.model.encoder, config.model.decoder, config.model.residual) == (
            ("transformer*6",),
            ("transformer*6",),
            "post_norm",
        )
        assert (
            config.train.beta1,
            config.train.beta2,
            config.train.epsilon,
            config.train.warmup_steps,
        ) == (0.9, 0.98, 1e-9, 4000)
        assert (config.train.schedule, config.train.label_smoothing) == ("noam", 0.1)
        assert (config.decode.beam, config.decode.length_penalty) == (4, 0.6)
        peak = catalogue("schedule").load("noam")(
            config.train.warmup_steps, config.train, config.model.width
        )
        assert peak == pytest.approx((config.model.width * config.train.warmup_steps) ** -0.5)


def test_the_paper_models_average_checkpoints_of_ten_minutes() -> None:
    base, big = vaswani2017_base().train, vaswani2017_big().train
    assert (base.steps, base.batch_tokens) == (100_000, 25_000)
    assert (big.steps, big.batch_tokens) == (300_000, 25_000)
    assert (base.average_checkpoints, base.checkpoint_every, base.validate_every) == (5, 1500, 1500)
    assert (big.average_checkpoints, big.checkpoint_every, big.validate_every) == (20, 600, 600)
    for train in (base, big):
        assert train.keep_checkpoints == train.average_checkpoints
        assert train.final_checkpoint == "last"
    decode = vaswani2017_base().decode
    assert (decode.max_length_ratio, decode.max_length_extra) == (1.0, 50)


def test_the_small_models_have_the_documented_sizes() -> None:
    found = {}
    for name in ("small", "tiny"):
        config = read_config(recipe=name)
        model, train = config.model, config.train
        found[name] = (
            (config.text.vocab_size, model.encoder, model.decoder),
            (model.width, model.heads, model.ffn_width, model.dropout),
            (train.steps, train.batch_tokens, train.learning_rate, train.warmup_steps),
        )
        assert (model.residual, train.optimizer, train.schedule) == ("pre_norm", "adamw", "linear")
        assert (train.label_smoothing, train.ema_decay, train.max_grad_norm) == (0.1, 0.999, 1.0)
        assert (config.decode.beam, config.decode.length_penalty) == (5, 1.0)
    assert found == {
        "small": (
            (8000, ("transformer*4",), ("transformer*4",)),
            (256, 4, 1024, 0.2),
            (10_000, 6000, 2e-3, 400),
        ),
        "tiny": (
            (4000, ("transformer*2",), ("transformer*2",)),
            (128, 4, 512, 0.1),
            (2000, 2500, 4e-3, 200),
        ),
    }


def test_settings_can_be_changed_on_top() -> None:
    config = apply_overrides(
        read_config(recipe="tiny"), ["model.encoder=[transformer*3]", "model.width=64"]
    )
    assert (config.model.encoder, config.model.width) == (("transformer*3",), 64)


def test_catalogues_and_block_lists_are_read_without_torch() -> None:
    code = """
import sys
import dragoman.attention.catalogue, dragoman.layers.norm_and_activation_catalogue
import dragoman.models.block_catalogue, dragoman.recipes.catalogue
import dragoman.attention
from dragoman.config import read_config
from dragoman.models.block_list_parser import parse_blocks
for name in dragoman.recipes.catalogue.RECIPES:
    model = read_config(recipe=name).model
    parse_blocks(model.encoder or model.decoder)
assert "torch" not in sys.modules, "torch was imported"
assert "SelfAttention" in dir(dragoman.attention)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_of_attention_are_there() -> None:
    import dragoman.attention as attention

    assert all(getattr(attention, name) for name in attention.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        attention.Nothing  # noqa: B018
