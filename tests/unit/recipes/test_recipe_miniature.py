"""The miniature of every recipe: it parses, builds, is small, and is still the recipe's kind of
model.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dragoman.config import Config, from_dict, read_config, to_dict
from dragoman.models.block_list_parser import parse_blocks
from dragoman.models.factory import build_model, count_parameters
from dragoman.recipes.catalogue import RECIPES, recipes_of
from dragoman.recipes.recipe_miniature import LAYERS, MAX_STEPS, RADIUS, TARGET_EXACT, WIDTH, mini

SIZES = {
    "layers",
    "heads",
    "kv_heads",
    "head_width",
    "width",
    "ffn_width",
    "buckets",
    "coverage_loss_weight",
    "radius",
}


def kinds(blocks: tuple[str, ...]) -> set[tuple[str, str]]:
    """Return the block types of a stack, without sizes."""
    return {
        (spec.name, str({k: v for k, v in spec.options.items() if k not in SIZES}))
        for spec in parse_blocks(blocks)
    }


def depth(blocks: tuple[str, ...]) -> int:
    """Count a stack's layers, those within a block too."""
    return sum(int(spec.options.get("layers", 1)) for spec in parse_blocks(blocks))


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_the_miniature_parses_builds_and_is_small(name: str) -> None:
    config = read_config(recipe=name, scale=mini)
    assert config.problems() == []
    assert config.recipe == name
    assert from_dict(to_dict(config)) == config
    with torch.device("meta"):
        model = build_model(
            config.model,
            src_vocab_size=config.text.vocab_size,
            tgt_vocab_size=config.text.vocab_size,
        )
    assert count_parameters(model) < 1_000_000


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_miniature_keeps_the_block_types_of_the_recipe(name: str) -> None:
    recipe = read_config(recipe=name)
    small = mini(recipe)
    for now, was in (
        *([(small.model.encoder, recipe.model.encoder)] if recipe.model.encoder else []),
        (small.model.decoder, recipe.model.decoder),
    ):
        assert kinds(now) == kinds(was)
        assert (
            min(depth(was), LAYERS)
            <= depth(now)
            <= max(LAYERS * len(kinds(was)), min(depth(was), 2 * len(was)))
        )  # two repeats
    for kept in (
        "architecture",
        "norm",
        "residual",
        "positions",
        "activation",
        "tie_embeddings",
        "scale_embeddings",
        "attention_bias",
        "output_bias",
    ):
        assert getattr(small.model, kept) == getattr(recipe.model, kept)
    assert small.text.shared_vocab == recipe.text.shared_vocab
    assert mini(small) == small


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_explicit_settings_take_precedence(name: str) -> None:
    config = read_config(
        recipe=name,
        overrides=["model.width=32", "train.steps=7", "text.tokenizer=bpe", "text.vocab_size=300"],
        scale=mini,
    )
    assert (
        config.model.width,
        config.train.steps,
        config.text.tokenizer,
        config.text.vocab_size,
    ) == (32, 7, "bpe", 300)


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_the_miniature_trains_until_validation_has_converged(name: str) -> None:
    """The same for every recipe: no table of steps for names, and a schedule that does not depend
    on a planned end.
    """
    train = read_config(recipe=name, scale=mini).train
    assert (train.steps, train.target_exact, train.schedule, train.patience) == (
        MAX_STEPS,
        TARGET_EXACT,
        "inverse_sqrt",
        0,
    )
    assert train.validate_sentences >= 1 / (1 - TARGET_EXACT)  # or one mistake would be too many
    assert 20 * train.validate_every <= MAX_STEPS


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_only_miniatures_of_translation_are_on_characters(name: str) -> None:
    """As the help of --mini states."""
    recipe = read_config(recipe=name)
    if recipe.task == "translate":
        assert mini(recipe).text.tokenizer == "characters"
    else:
        assert mini(recipe).text == recipe.text


def test_mixed_blocks_and_their_own_sizes() -> None:
    model = {
        "encoder": ("conv(kernel_size=3)*4", "transformer(heads=16, ffn_width=4096)*3"),
        "decoder": ("lstm(attention=dot, layers=8)",),
    }
    small = mini(
        Config().replace(model={**model, "heads": 16, "kv_heads": 4, "head_width": 128})
    ).model
    assert small.encoder == ("conv(kernel_size=3)", "transformer(heads=4, ffn_width=256)")
    assert small.decoder == ("lstm(attention=dot, layers=2)",)
    assert (small.width, small.heads, small.kv_heads, small.head_width) == (WIDTH, 4, 1, 16)


def test_a_window_over_the_source_spans_characters() -> None:
    """Ten subwords are a sentence, ten characters a word or two: a window that short could not
    reach the end of a reversed string.
    """
    for name in ("luong2015_local_m", "luong2015_local_p"):
        (spec,) = parse_blocks(read_config(recipe=name, scale=mini).model.decoder)
        assert spec.options["radius"] == RADIUS
    (spec,) = parse_blocks(read_config(recipe="luong2015_general", scale=mini).model.decoder)
    assert "reach" not in spec.options


def test_scaling_down_imports_no_tensors() -> None:
    code = "import sys, dragoman.recipes.recipe_miniature; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
