"""Every recipe's miniature: heads off, their effects, the lens and attribution, with their
invariants.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from model_kit import perturb_weights
from teacher_forcing_kit import VOCABULARY, measure_head_effects, tiny_pair

from dragoman.attention.attention_weight_hooks import record
from dragoman.config import ModelConfig, read_config
from dragoman.errors import DataError
from dragoman.explain.attribution import attribute_tokens, attribute_with_heads, attribution_note
from dragoman.explain.head_ablation import (
    ablate_heads,
    attention_parts,
)
from dragoman.explain.position_encoding_analysis import summarize_positions
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.explain.translation_explanation_builder import read_logit_lens, token_ranks
from dragoman.models.factory import build_model
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.recipe_miniature import mini

# What they choose changes on the way from the baseline, and no number of points resolves a jump.
HARD_CHOICES = ("kitaev2020", "luong2015_local_p", "raffel2017", "chiu2018", "xu2015")


@functools.cache
@functools.cache
def settings() -> dict[str, ModelConfig]:
    """Return the model of every recipe's miniature, each different one once."""
    found: dict[str, ModelConfig] = {}
    for name in recipes_of("translate"):
        config = read_config(recipe=name, scale=mini).model
        if config not in found.values():
            found[name] = config
    return found


@pytest.fixture
def pair(name: str) -> TeacherForcedPair:
    torch.manual_seed(0)
    model = build_model(settings()[name], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)
    return tiny_pair(perturb_weights(model, 0.05).eval().requires_grad_(False))


@pytest.mark.parametrize("name", settings())
def test_heads_off(pair: TeacherForcedPair, name: str) -> None:
    parts = attention_parts(pair.model)
    estimates = attribute_with_heads(pair)[1]
    assert {path: len(row) for path, row in estimates.items()} == {
        path: part.heads for path, part in parts.items()
    }
    effects = measure_head_effects(pair)
    assert len(effects) == sum(part.heads for part in parts.values())
    for each in effects[:: max(1, len(effects) // 4)]:
        np.testing.assert_allclose(
            each.changes, ablate_heads(pair, {each.path: [each.head]}), atol=1e-5
        )
    assert not ablate_heads(pair, {}).any()
    assert np.isfinite(ablate_heads(pair, {path: [0] for path in parts})).all()
    if not parts:
        with pytest.raises(DataError, match="its attentions are none"):
            ablate_heads(pair, {"decoder.0.cross": [0]})


@pytest.mark.parametrize("name", settings())
def test_the_lens_ends_in_the_models_logits(pair: TeacherForcedPair, name: str) -> None:
    lens = read_logit_lens(pair)
    with torch.no_grad(), record(pair.model):
        logits = pair.model(pair.src, pair.tgt_in)[0]
    assert torch.equal(lens.final_logits, logits)
    assert np.array_equal(lens.ranks[-1], token_ranks(logits, pair.tgt_out).numpy())
    assert lens.ranks.min() >= 1
    assert lens.ranks.max() <= VOCABULARY
    found = summarize_positions(pair, {}).positions
    assert found["note"]


@pytest.mark.parametrize("name", settings())
def test_attribution(pair: TeacherForcedPair, name: str) -> None:
    found = attribute_tokens(pair, "integrated_gradients")
    assert found.gap is not None
    assert found.gap <= 0.05 or name in HARD_CHOICES
    gradients, occluded = (
        attribute_tokens(pair, method) for method in ("input_x_gradient", "occlusion")
    )
    for each in (found, gradients, occluded):
        assert each.source is not None
        assert each.source.shape == (6, 5)
        assert np.isfinite(each.source).all()
        assert np.array_equal(each.target, np.tril(each.target))
    if attention_parts(pair.model):
        assert attribute_tokens(pair, "value_zeroing").target.min() >= 0.0
    else:
        with pytest.raises(DataError, match="value zeroing needs a model with attention"):
            attribute_tokens(pair, "value_zeroing")
    assert bool(attribution_note(pair)) == (name in HARD_CHOICES)
