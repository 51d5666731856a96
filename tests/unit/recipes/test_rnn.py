"""RNN recipes have their papers' settings, build, and learn in miniature."""

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
from dragoman.recipes.rnn import bahdanau2015, luong2015_general, wu2016

BOS = 1
NAMES = ("bahdanau2015", "luong2015_general")


def test_the_papers_numbers() -> None:
    bahdanau, luong = bahdanau2015(), luong2015_general()
    for config, words, clip, dropout in ((bahdanau, 30_000, 1.0, 0.0), (luong, 50_000, 5.0, 0.2)):
        assert (config.text.vocab_size, config.train.max_grad_norm, config.model.dropout) == (
            words,
            clip,
            dropout,
        )
        assert (config.model.width, config.data.max_length, config.train.label_smoothing) == (
            1000,
            50,
            0.0,
        )
    assert bahdanau.train.steps == 288_000
    assert luong.train.cooldown_fraction == 0.33


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("general", "attention=general"),
        ("dot", "attention=dot"),
        ("concat", "attention=additive"),
        ("location", "attention=location"),
        ("local_m", "attention=general, alignment=local_m"),
        ("local_p", "attention=general, alignment=local_p"),
    ],
)
def test_luongs_models_differ_in_their_attention_alone(name: str, attention: str) -> None:
    config, general = RECIPES.load(f"luong2015_{name}")(), luong2015_general()
    decoder = (
        f"lstm(layers=4, {attention}, decoder=luong, input_feeding=true, "
        f"initial_state=first, initial_cell=true, residual_connection=false)"
    )
    assert config == general.replace(model={"decoder": (decoder,)})
    assert (
        "reverse=true" in config.model.encoder[0]
    )  # the source reversed is an option of the block


def test_gnmts_stacks() -> None:
    """Eight layers each, the lowest encoder layer bidirectional, residual connections from the
    third on.
    """
    config = wu2016()
    with torch.device("meta"):
        model = build_model(config.model, src_vocab_size=32_000, tgt_vocab_size=32_000)
    encoder = [block for _, block in model.encoder.blocks()]
    assert [type(block).__name__ for block in encoder] == ["BiLSTMLayer", *["LSTMLayer"] * 7]
    assert [type(block.residual).__name__ for block in encoder] == [
        "NoResidual",
        "NoResidual",
        *["NoNorm"] * 6,
    ]
    (decoder,) = (block for _, block in model.decoder.blocks())
    assert (decoder.attention_decoder.layers, decoder.attention_decoder.width, decoder.summary) == (
        8,
        1024,
        None,
    )
    # By hand, in thousands of rows of 1024: three tables; two halves of 512 and seven layers; eight
    # layers with the context, and the score.
    thousands = (
        3 * 32
        + 2 * 2 * (1.024 + 0.512 + 0.002)
        + 7 * 4 * (2.048 + 0.002)
        + 8 * 4 * (3.072 + 0.002)
        + 2 * 1.024
        + 0.002
    )
    assert count_parameters(model) == round(1000 * 1024 * thousands) + 1


# By hand, in thousands of rows of 1000: three tables; the encoder; cells, readout, score and first
# states of the decoder.
BAHDANAU = 3 * 30_000 + (2 * 1.5 * (1000 + 500 + 2)) + (3 * (3000 + 2) + 2 * 3000 + 2001 + 501)
LUONG = (
    3 * 50_000
    + (4 * 4 * (2000 + 2))
    + (4 * (3000 + 2) + 3 * 4 * (2000 + 2) + 2000 + 1000 + 2 * 4004)
)


@pytest.mark.parametrize(
    ("name", "thousands"), [("bahdanau2015", BAHDANAU), ("luong2015_general", LUONG)]
)
def test_sizes(name: str, thousands: float) -> None:
    config: Config = RECIPES.load(name)()
    with torch.device("meta"):
        model = build_model(
            config.model,
            src_vocab_size=config.text.vocab_size,
            tgt_vocab_size=config.text.vocab_size,
        )
    assert count_parameters(model) == round(1000 * thousands)


def miniature(config: ModelConfig) -> EncoderDecoder:
    """Build a recipe's model with small sizes: one layer, a vocabulary of 16."""
    torch.manual_seed(0)
    encoder, decoder = (
        (stack[0].replace("layers=4", "layers=1"),) for stack in (config.encoder, config.decoder)
    )
    small = replace(config, encoder=encoder, decoder=decoder, width=48, dropout=0.0)
    return build_model(small, src_vocab_size=16, tgt_vocab_size=16)


@pytest.mark.parametrize("name", NAMES)
def test_the_miniature_learns_to_reverse(name: str) -> None:
    """Sources of 4 to 6 tokens, padded; greedy decoding."""
    model = miniature(RECIPES.load(name)().model)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        src = torch.randint(4, 16, (rows, 6), generator=generator)
        mask = torch.arange(6) < torch.randint(4, 7, (rows, 1), generator=generator)
        order = (mask.sum(1, keepdim=True) - 1 - torch.arange(6)).clamp(min=0)
        return src * mask, mask, src.gather(1, order).masked_fill(~mask, 0)

    for _ in range(300):
        src, mask, tgt = draw(32)
        logits = model(src, F.pad(tgt[:, :-1], (1, 0), value=BOS), mask)
        optimizer.zero_grad()
        F.cross_entropy(logits[mask], tgt[mask]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    src, mask, tgt = draw(100)
    assert ((generate_greedy(model, src, 6, mask) == tgt) | ~mask).all(1).float().mean() >= 0.9
