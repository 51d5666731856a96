"""The recipes of the Transformer's variants: each is the base model but for its paper's change."""

from __future__ import annotations

import pytest
import torch

from dragoman.config import read_config, to_dict
from dragoman.models.factory import build_model, count_parameters
from dragoman.recipes.catalogue import RECIPES, VARIANTS
from dragoman.recipes.recipe_miniature import mini

NAMES = [name for name, entry in RECIPES.items() if entry.family == VARIANTS]
CHANGED = {
    "shaw2018": {"positions"},
    "dai2019": {"positions"},
    "su2021": {"positions"},
    "press2022": {"positions"},
    "raffel2020": {"norm", "residual", "positions", "ffn_bias", "attention_dropout", "ffn_dropout"},
    "xiong2020": {"residual"},
    "lan2020": {"share_layers", "embedding_width", "activation"},
    "fan2020": {"encoder", "layer_drop"},
    "zhang2019": {"encoder", "decoder", "initialization"},
    "shazeer2020": {"talking_heads"},
    "shazeer2020_glu": {"activation", "ffn_width", "ffn_bias"},
    "ainslie2023": {"kv_heads"},
    "bhojanapalli2020": {"head_width"},
    "vaswani2017_restricted": {"window"},
}


def parameters(name: str) -> int:
    config = read_config(recipe=name)
    with torch.device("meta"):
        return count_parameters(
            build_model(config.model, src_vocab_size=37_000, tgt_vocab_size=37_000)
        )


def test_every_paper_is_there() -> None:
    assert set(NAMES) == {*CHANGED, "nguyen2019", "henry2020"}


@pytest.mark.parametrize("name", CHANGED)
def test_a_variant_is_the_base_model_but_for_its_papers_change(name: str) -> None:
    base, changed = (
        to_dict(read_config(recipe=recipe))["model"] for recipe in ("vaswani2017_base", name)
    )
    assert {setting for setting in base if base[setting] != changed[setting]} == CHANGED[name]


def test_the_papers_for_little_data_differ_by_one_norm() -> None:
    first, second = (to_dict(read_config(recipe=recipe)) for recipe in ("nguyen2019", "henry2020"))
    assert {key for key in first["model"] if first["model"][key] != second["model"][key]} == {
        "qk_norm"
    }
    assert first["train"] == second["train"]
    assert (first["model"]["norm"], first["model"]["fix_norm"]) == ("scale", True)


def test_weights_are_as_many_as_the_change_makes_them() -> None:
    base = parameters("vaswani2017_base")
    layers, wide = parameters("fan2020") - base, 37_000 * 512
    assert parameters("zhang2019") > base + layers
    assert (
        parameters("su2021")
        == parameters("press2022")
        == parameters("vaswani2017_restricted")
        == base
    )
    assert parameters("xiong2020") == base + 2 * 2 * 512  # a norm at the end of each stack
    assert (
        parameters("lan2020") < (base - wide) / 5 + 37_000 * 128
    )  # one layer of six a side, embeddings a quarter as wide
    assert abs(parameters("shazeer2020_glu") - base) < 0.01 * base
    assert parameters("shazeer2020") == base + 18 * 2 * 8 * 8
    assert parameters("ainslie2023") < base < parameters("bhojanapalli2020")


@pytest.mark.parametrize("name", NAMES)
def test_the_miniature_is_still_the_variant(name: str) -> None:
    whole = read_config(recipe=name)
    small = mini(whole)
    for setting in (
        "talking_heads",
        "share_layers",
        "layer_drop",
        "initialization",
        "fix_norm",
        "qk_norm",
        "ffn_bias",
    ):
        assert getattr(small.model, setting) == getattr(whole.model, setting)
    for setting in ("window", "embedding_width", "kv_heads", "head_width"):
        assert bool(getattr(small.model, setting)) == bool(getattr(whole.model, setting))
