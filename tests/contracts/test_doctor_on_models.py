"""Every architecture is sound by the doctor's own checks: the miniature of every recipe, and
recurrences with every alignment.
"""

from __future__ import annotations

import functools

import pytest
import torch

from dragoman.attention.catalogue import ALIGNMENTS
from dragoman.bundle.golden_vectors import make_golden
from dragoman.config import Config, read_config
from dragoman.doctor import CHECKS, ModelUnderTest, run_checks
from dragoman.models.factory import build_model
from dragoman.recipes.catalogue import recipes_of
from dragoman.recipes.recipe_miniature import mini
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

LINES = ["das haus", "ein hund", "a", "hund und haus"]
TEXTS = ["a", "das", "hund", "ein haus"]  # four lengths, so that nothing is made up


@functools.cache
def tokenizers_of(text: object) -> Tokenizers:
    """Learn the tokenizers of some settings once."""
    return train_tokenizers(LINES * 9, [line.upper() for line in LINES] * 9, text)  # type: ignore[arg-type]


def subject_of(config: Config) -> ModelUnderTest:
    """Build the model of a configuration with random weights, wrapped for the doctor's checks."""
    tokenizers = tokenizers_of(config.text)
    torch.manual_seed(5)
    model = (
        build_model(
            config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
        )
        .eval()
        .requires_grad_(False)
    )
    golden = make_golden(model, tokenizers, TEXTS[:1])
    return ModelUnderTest(
        lambda: model, config=config, tokenizers=tokenizers, golden=golden, texts=TEXTS
    )


def require_sound(subject: ModelUnderTest) -> None:
    """Assert that every check but that of engines passes."""
    findings = {finding.name: finding for finding in run_checks(subject)}
    assert {name: finding for name, finding in findings.items() if finding.passed is False} == {}
    assert [name for name, finding in findings.items() if finding.passed is None] == [
        "exported engines"
    ]
    assert set(CHECKS) < set(findings)


@functools.cache
def miniatures() -> dict[str, Config]:
    """Read the miniature of every recipe; outputs that are not trained to end are cut short."""
    return {
        name: read_config(recipe=name, scale=mini).replace(
            decode={"max_length_ratio": 1.0, "max_length_extra": 2}
        )
        for name in recipes_of("translate")
    }


@pytest.mark.parametrize("name", recipes_of("translate"))
def test_the_miniature_of_every_recipe_is_sound(name: str) -> None:
    twin = next(
        other for other in miniatures() if miniatures()[other].model == miniatures()[name].model
    )
    if twin != name:
        pytest.skip(f"in miniature it is {twin}, which is examined")
    require_sound(subject_of(miniatures()[name]))


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_recurrences_with_every_alignment_are_sound(alignment: str) -> None:
    small = {"encoder": ["bigru"], "width": 16, "dropout": 0.0}
    decoder = [
        "lstm(attention=additive, alignment=" + alignment + ")",
        "gru(attention=additive, alignment=" + alignment + ")",
    ]
    require_sound(subject_of(miniatures()["tiny"].replace(model={**small, "decoder": decoder})))
