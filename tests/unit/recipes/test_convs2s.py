"""The ConvS2S recipe has the settings of the paper and its released code, and its miniature
learns.
"""

from __future__ import annotations

import pytest
import torch

from dragoman.config import apply_overrides, from_dict, read_config, to_dict
from dragoman.models.factory import build_model, count_parameters
from dragoman.recipes.convs2s import gehring2017, gehring2017_wmt
from dragoman.recipes.recipe_miniature import mini
from dragoman.registry import catalogue


def test_the_recipe_has_the_released_numbers() -> None:
    """`fconv_iwslt_de_en`, and the paper where the code leaves it alone."""
    config = gehring2017()
    assert (config.model.encoder, config.model.decoder) == (
        ("conv(kernel_size=3)*4",),
        ("conv(kernel_size=3, layers=3, scale_encoder_grad=true)",),
    )
    assert (config.model.width, config.model.dropout, config.model.max_positions) == (
        256,
        0.2,
        1024,
    )
    assert (config.model.residual, config.model.positions, config.model.tie_embeddings) == (
        "scaled",
        "learned",
        "none",
    )
    assert not config.model.scale_embeddings
    assert (
        config.train.max_grad_norm,
        config.train.batch_tokens,
        config.train.label_smoothing,
    ) == (0.1, 4000, 0.1)
    assert (config.decode.beam, config.decode.length_penalty) == (5, 1.0)


def test_the_recipe_is_found_by_name_and_builds() -> None:
    config = read_config(recipe="gehring2017")
    assert config.problems() == []
    assert from_dict(to_dict(config)) == config
    with torch.device("meta"):
        model = build_model(config.model, src_vocab_size=10_000, tgt_vocab_size=10_000)
    width, kernel, vocabulary = 256, 3, 10_000
    layer = 2 * width * (width * kernel + 2)  # directions, lengths and biases
    attention = 2 * width * (width + 2)
    tables = 3 * vocabulary * width + vocabulary + 2 * 1024 * width
    assert count_parameters(model) == 7 * layer + 3 * attention + tables


def test_wmt_recipe_has_the_released_15_layers_each() -> None:
    """`fconv_wmt_en_de`, counted by hand: kernels, projected residuals, fc1 and fc2, attention in
    every layer.
    """
    config = read_config(recipe="gehring2017_wmt")
    assert config.problems() == []
    assert from_dict(to_dict(config)) == config
    with torch.device("meta"):
        model = build_model(config.model, src_vocab_size=40_000, tgt_vocab_size=40_000)
    widths = [512] * 9 + [1024] * 4 + [2048] * 2
    kernels = [3] * 13 + [1] * 2
    for stack in (model.encoder, model.decoder):
        layers = [layer for _, layer in stack.blocks()]
        assert [layer.convolution.output_width for layer in layers] == widths
        assert [layer.convolution.weight.direction.size(2) for layer in layers] == kernels
        assert [layer.has_shortcut for layer in layers] == [
            number in (9, 13) for number in range(15)
        ]

    def linear(inputs: int, outputs: int) -> int:
        return outputs * (inputs + 2)  # directions, lengths and biases

    stack = linear(768, 512) + linear(2048, 768) + linear(512, 1024) + linear(1024, 2048)
    stack += sum(
        linear(inputs * kernel, 2 * outputs)
        for inputs, outputs, kernel in zip([512, *widths], widths, kernels, strict=False)
    )
    attention = sum(linear(width, 768) + linear(768, width) for width in widths)
    tables = 3 * 40_000 * 768 + 40_000 + 2 * 1024 * 768
    assert count_parameters(model) == 2 * stack + attention + tables
    grad_scales = {layer.cross.grad_scale for _, layer in model.decoder.blocks()}
    assert grad_scales == {1 / 30}
    train = gehring2017_wmt().train
    assert (train.optimizer, train.momentum, train.learning_rate) == ("sgd", 0.99, 0.25)


def test_the_miniature_keeps_the_widths_in_proportion() -> None:
    small = mini(gehring2017_wmt()).model
    assert small.encoder == (
        "conv(width=42)",
        "conv(width=85)",
        "conv(width=170, kernel_size=1)",
    )


def test_the_rate_stays_and_then_falls() -> None:
    train = gehring2017().train
    rate = catalogue("schedule").load(train.schedule)
    assert rate(1, train, 256) == rate(40_000, train, 256) == 1e-3
    assert 0 < rate(50_000, train, 256) < 1e-6


def test_settings_can_be_changed_on_top() -> None:
    config = apply_overrides(
        read_config(recipe="gehring2017"),
        ["model.encoder=[conv*2, transformer*1]", "model.width=64"],
    )
    assert config.problems() == []
    with torch.device("meta"):
        build_model(config.model, src_vocab_size=100, tgt_vocab_size=100)


def test_embeddings_start_near_the_papers_tenth() -> None:
    """Section 3.5: N(0, 0.1). Embeddings of size one would saturate attention, whose dot product
    has no divisor.
    """
    torch.manual_seed(0)
    model = build_model(gehring2017().model, src_vocab_size=100, tgt_vocab_size=100).eval()
    assert model.embeddings["src"].weight.std().item() == pytest.approx(1 / 16, rel=0.1)  # type: ignore[operator]
