"""Position encodings as they are in the model's modules, for every kind there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.attention.catalogue import POSITIONS
from dragoman.attention.relative_positions import alibi_slopes
from dragoman.config import ModelConfig
from dragoman.explain.positions import (
    ConvolutionReach,
    PositionCurves,
    PositionTable,
    describe_missing,
    find_positions,
    save_positions,
)
from dragoman.models.factory import build_model


def build(**changes):
    torch.manual_seed(0)
    sizes = {
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "encoder": ("transformer*2",),
        "decoder": ("transformer*2",),
    }
    config = ModelConfig(**(sizes | changes))
    return build_model(config, src_vocab_size=20, tgt_vocab_size=20).eval()


@pytest.mark.parametrize("kind", sorted(POSITIONS))
def test_every_kind_is_drawn_or_said_to_be_missing(tmp_path, kind: str) -> None:
    model = build(positions=kind)
    parts = find_positions(model, positions=8)
    if not parts:
        assert kind == "none"
        assert "does not know the order" in describe_missing(model)
        return
    assert save_positions(tmp_path / "p.svg", parts) == 0
    assert "<text" in (tmp_path / "p.svg").read_text(encoding="utf-8")


def test_sinusoids_are_those_of_the_paper() -> None:
    [part] = find_positions(build(positions="sinusoidal"), positions=8)
    assert isinstance(part, PositionTable)
    assert (part.kind, part.where) == ("sinusoidal", "encoder input")
    position, pair = 5, 3
    angle = position / 10_000 ** (2 * pair / 16)
    assert part.vectors[position, 2 * pair] == pytest.approx(np.sin(angle), abs=1e-6)
    assert part.vectors[position, 2 * pair + 1] == pytest.approx(np.cos(angle), abs=1e-6)
    np.testing.assert_allclose(np.diag(part.similarity), 1.0, atol=1e-5)


def test_alibi_has_the_slopes_of_its_heads() -> None:
    [part] = find_positions(build(positions="alibi"), positions=4)
    assert isinstance(part, PositionCurves)
    at = part.distances.tolist().index(-3)
    np.testing.assert_allclose(part.values[:, at], [-3 * each for each in alibi_slopes(2)])
    assert part.where == "every layer with these heads"  # they are alike, and drawn once


def test_rotary_is_the_mean_cosine_of_the_angles() -> None:
    [*parts] = find_positions(build(positions="rotary"), positions=4)
    part = parts[0]
    assert isinstance(part, PositionCurves)
    frequencies = 10_000.0 ** (-np.arange(0, 8, 2) / 8)  # heads of width 8
    np.testing.assert_allclose(
        part.values[0],
        np.cos(part.distances[:, None] * frequencies).mean(axis=1),
        atol=1e-6,
    )


def test_convolutions_reach_as_far_as_their_kernels() -> None:
    model = build(
        encoder=("conv(kernel_size=3)*3",), decoder=("conv(kernel_size=5)*2",), positions="none"
    )
    reaches = [part for part in find_positions(model) if isinstance(part, ConvolutionReach)]
    assert reaches == [
        ConvolutionReach("encoder", [1, 2, 3], [1, 2, 3]),
        ConvolutionReach("decoder", [4, 8], [0, 0]),
    ]


def test_recurrence_needs_no_positions() -> None:
    model = build(encoder=("bilstm",), decoder=("lstm(attention=additive)",), positions="none")
    assert find_positions(model) == []
    assert "recurrence" in describe_missing(model)
