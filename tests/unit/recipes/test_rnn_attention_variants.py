"""Recipes with monotonic or location-aware alignment: they cite the source of each setting, build,
and learn to copy in miniature.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_kit import generate_greedy
from torch.nn import functional as F

from dragoman.config import Config, ModelConfig
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model, count_parameters
from dragoman.recipes.catalogue import RECIPES

BOS, LONGEST = 1, 6
NAMES = ("raffel2017", "chorowski2015")


@pytest.mark.parametrize(
    ("name", "alignment"),
    [
        ("raffel2017", "monotonic"),
        ("chiu2018", "mocha"),
        ("chorowski2015", "location_sensitive"),
        ("xu2015", "reinforce"),
        ("see2017", "coverage"),
    ],
)
def test_the_alignment_is_the_papers(name: str, alignment: str) -> None:
    config: Config = RECIPES.load(name)()
    assert f"alignment={alignment}" in config.model.decoder[0]
    # Only summaries are written in the vocabulary of their source.
    assert config.text.shared_vocab is (name == "see2017")
    with torch.device("meta"):
        model = build_model(
            config.model,
            src_vocab_size=config.text.vocab_size,
            tgt_vocab_size=config.text.vocab_size,
        )
    assert 5e6 < count_parameters(model) < 60e6


@pytest.mark.parametrize(
    ("option", "kinds"),
    [
        (
            "alignment=location_sensitive, smoothing=true, radius=3",
            ("LocationSensitiveAlignment", "SmoothedSoftmax"),
        ),
        ("alignment=location_cumulative", ("CumulativeLocationAlignment", "Softmax")),
    ],
)
def test_chorowskis_variants_are_options(option: str, kinds: tuple[str, str]) -> None:
    config = RECIPES.load("chorowski2015")().model
    decoder = (config.decoder[0].replace("alignment=location_sensitive", option),)
    with torch.device("meta"):
        model = build_model(replace(config, decoder=decoder), src_vocab_size=9, tgt_vocab_size=9)
    ((_, block),) = model.decoder.blocks()
    assert (
        type(block.cross.alignment).__name__,
        type(block.cross.alignment.base_alignment).__name__,
    ) == kinds
    assert block.cross.alignment.filters.kernel_size == ((7,) if "radius=3" in option else (31,))


def miniature(config: ModelConfig) -> EncoderDecoder:
    """Build a recipe's model with small sizes: one layer a side, a vocabulary of 16."""
    torch.manual_seed(0)
    encoder = config.encoder[0].replace("layers=2", "layers=1").removesuffix("*3")
    decoder = config.decoder[0].replace("layers=2", "layers=1")
    small = replace(config, encoder=(encoder,), decoder=(decoder,), width=48, dropout=0.0)
    return build_model(small, src_vocab_size=16, tgt_vocab_size=16)


def draw(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sources of 4 to 6 tokens with their mask."""
    mask = torch.arange(LONGEST) < torch.randint(4, LONGEST + 1, (rows, 1), generator=generator)
    return torch.randint(4, 16, (rows, LONGEST), generator=generator) * mask, mask


@pytest.mark.parametrize("name", NAMES)
def test_the_miniature_learns_to_copy(name: str) -> None:
    """Translated step by step, greedily: for raffel2017 by hard choices, which training only knew
    as expectations.
    """
    model = miniature(RECIPES.load(name)().model)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        src, mask = draw(32, generator)
        logits = model(src, F.pad(src[:, :-1], (1, 0), value=BOS), mask)
        optimizer.zero_grad()
        F.cross_entropy(logits[mask], src[mask]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    src, mask = draw(100, generator)
    accuracy = ((generate_greedy(model, src, LONGEST, mask) == src) | ~mask).all(1).float().mean()
    assert accuracy >= 0.9
