"""Explained texts of masked and permuted language models: masks, and tokens masked in turn."""

from __future__ import annotations

import math

import pytest
from task_models_kit import LINES, subject_of

from dragoman.errors import DataError


@pytest.mark.parametrize("recipe", ["devlin2019", "yang2019", "lan2020_lm"])
def test_masks_are_filled_in_as_predicted(recipe: str) -> None:
    predictor = subject_of(recipe).predictor
    text = "The <mask> was very <mask>."
    found, filled = predictor.explain(text), predictor.fill_mask(text, top=4)
    assert len(found.steps) == 2
    for step, guesses in zip(found.steps, filled.guesses, strict=True):
        assert step.rank == 1
        assert not step.forced
        assert [math.exp(value) for _, _, value in step.top[:4]] == pytest.approx(
            [guess.probability for guess in guesses], abs=1e-5
        )
    masks = [at for at, token in enumerate(found.source.tokens) if token.text.strip() == "<mask>"]
    assert len(masks) == 2
    assert found.lens is not None
    assert found.arrays[found.lens["rank"]][-1].tolist() == [1, 1]
    for site in found.sites:
        assert found.arrays[site.tensor].shape[2] == len(found.source.tokens)
    if recipe == "yang2019":  # the masks are not seen
        assert all((found.arrays[site.tensor][:, :, masks] == 0).all() for site in found.sites)


@pytest.mark.parametrize("recipe", ["devlin2019", "yang2019", "lan2020_lm"])
def test_without_masks_each_token_is_masked_in_turn(recipe: str) -> None:
    subject = subject_of(recipe, language={"eval_masked": "one"})
    text = LINES[1]
    found = subject.predictor.explain(text)
    expected = subject.predictor.score([text])[0]
    assert len(found.steps) == expected.tokens
    assert all(step.forced for step in found.steps)
    assert found.score["sum"] == pytest.approx(expected.log_prob, abs=1e-3)
    ranks = found.arrays[found.lens["rank"]]
    assert ranks[-1].tolist() == [step.rank for step in found.steps]


def test_mistakes_are_named() -> None:
    predictor = subject_of("devlin2019").predictor
    with pytest.raises(DataError, match="must be text; found int 3"):
        predictor.explain(3)
    with pytest.raises(DataError, match="must have tokens; found ''"):
        predictor.explain("")
