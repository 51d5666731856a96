"""How order enters a model: every kind of position, against the scores of whole sentences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from teacher_forcing_kit import tiny_language_model, tiny_model, tiny_pair

from dragoman.attention.catalogue import POSITIONS
from dragoman.attention.multi_head import SelfAttention
from dragoman.attention.relative_position_encodings import alibi_slopes
from dragoman.config import ModelConfig
from dragoman.explain.position_encoding_analysis import (
    SIMILARITY,
    ConvolutionReach,
    PositionCurves,
    PositionEncodingTable,
    _collected_inputs,
    describe_missing,
    describe_reach,
    distance_curve,
    find_positions,
    position_similarity,
    save_positions,
    summarize_positions,
)
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.models.factory import build_model

SITES = {
    f"{side}.{layer}.self": f"{letter}{layer}"
    for side, letter in (("encoder", "e"), ("decoder", "d"))
    for layer in range(2)
}


def summary_of(pair: TeacherForcedPair) -> dict[str, Any]:
    return summarize_positions(pair, SITES).positions


@pytest.mark.parametrize(
    ("positions", "kind", "note"),
    [
        ("sinusoidal", "sinusoidal", "Sines and cosines"),
        ("learned", "learned", "A trained vector"),
        ("rotary", "rotary", "are rotated"),
        ("alibi", "relative", "A penalty that grows"),
        ("t5", "relative", "A trained number"),
        ("shaw", "relative", "A trained vector for each distance"),
        ("transformer_xl", "relative", "acts as a second key"),
        ("none", "none", "There is no position encoding"),
    ],
)
def test_every_encoding_is_described(positions: str, kind: str, note: str) -> None:
    pair = tiny_pair(tiny_model(positions=positions))
    found = summarize_positions(pair, SITES)
    assert found.positions["kind"] == kind
    assert note in found.positions["note"]
    has_table = kind in ("sinusoidal", "learned")
    assert found.positions["tensor"] == (SIMILARITY if has_table else None)
    assert set(found.arrays) == ({SIMILARITY} if has_table else set())
    curves = found.positions["curves"]
    assert len(curves) == (8 if kind in ("relative", "rotary") else 0)  # 2 heads of 4 layers
    for curve in curves:
        ends = (-4, 4) if curve["site"].startswith("e") else (-5, 0)
        assert (curve["x"][0], curve["x"][-1]) == ends
        assert len(curve["y"]) == len(curve["x"])
        assert np.isfinite(curve["y"]).all()
    assert found.positions["reach"] is None


@pytest.mark.parametrize(("src", "tgt"), [(5, 40), (40, 5)])
def test_similarity_covers_the_longer_side(src: int, tgt: int) -> None:
    pair = tiny_pair(tiny_model(positions="sinusoidal"), src=src, tgt=tgt)
    assert summarize_positions(pair, SITES).arrays[SIMILARITY].shape == (40, 40)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_similarity_is_the_cosine_of_position_vectors(positions: str) -> None:
    model = tiny_model(positions=positions)
    own = model.src_input.positions
    found = position_similarity(own, 40)
    assert found is not None
    assert found.shape == (40, 40)
    vectors = own.vectors(0, 40)
    assert vectors is not None
    one, two = vectors[3].double(), vectors[17].double()
    assert found[3, 17] == pytest.approx(float(one @ two / (one.norm() * two.norm())), abs=1e-6)
    np.testing.assert_allclose(np.diag(found), 1.0, atol=1e-6)
    assert np.array_equal(found, found.T)


def test_the_similarity_of_a_short_table_is_no_larger_than_the_table() -> None:
    model = tiny_model(positions="learned", max_positions=12)
    found = position_similarity(model.src_input.positions, 8)
    assert found is not None
    assert found.shape == (12, 12)


@pytest.mark.parametrize("positions", ["rotary", "alibi", "t5", "shaw", "transformer_xl"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_curve_is_the_mean_over_the_sentence(positions: str, side: str) -> None:
    """Brute force: the score of each query with each key at every distance."""
    model = tiny_model(positions=positions)
    pair = tiny_pair(model, src=7, tgt=7)
    attention = model.get_submodule(f"{side}.1.self")
    assert isinstance(attention, SelfAttention)
    assert attention.relative_position is not None
    with torch.no_grad(), _collected_inputs({"here": attention}) as inputs:
        pair.baseline()
        x = inputs["here"]
        curve = distance_curve(attention, x, 7, causal=side == "decoder")
        packed = attention.query_key_value(x)
        query, key = (attention.split(packed[..., at : at + 16], 1)[:, 0] for at in (0, 16))
        for distance in curve.distances:
            if positions == "rotary":
                late = max(0, -distance)
                turned = [
                    torch.cat(
                        [
                            attention.relative_position.rotate(row.unsqueeze(2), None, first=first)
                            for row in part.unbind(2)
                        ],
                        dim=2,
                    )
                    for part, first in ((query, late), (key, late + distance))
                ]
                expected = (turned[0] @ turned[1].mT / 8**0.5).mean(dim=(0, 2, 3))
            else:
                offsets = torch.full((7, 7), distance)
                bias = attention.relative_position.bias(offsets, query)
                expected = bias.expand(1, 2, 7, 7).mean(dim=(0, 2, 3))
            column = curve.scores[:, curve.distances.index(distance)]
            torch.testing.assert_close(column, expected, atol=1e-5, rtol=1e-4)


def test_grouped_and_normalized_heads_have_curves_too() -> None:
    model = tiny_model(positions="rotary", heads=4, kv_heads=2, qk_norm="layer")
    curves = summary_of(tiny_pair(model))["curves"]
    assert len(curves) == 16


@pytest.mark.parametrize(
    ("encoder", "decoder", "kind", "reach", "note"),
    [
        ("conv*2", "conv*3", "convolution", 2, "2 in the encoder and 6 in the decoder"),
        ("conv(kernel_size=5)", "lstm(attention=dot)", "recurrent", 2, "2 in the encoder"),
        ("bilstm", "gru(attention=dot)", "recurrent", None, ""),
        ("transformer(window=3)*2", "transformer", "none", 6, "6 in the encoder"),
        ("reformer(window=4)", "reformer", "none", None, ""),
    ],
)
def test_reach_counts_kernels_and_windows(
    encoder: str, decoder: str, kind: str, reach: int | None, note: str
) -> None:
    model = tiny_model(encoder, decoder, positions="none")
    found = summary_of(tiny_pair(model))
    assert found["kind"] == kind
    assert (found["reach"], describe_reach(model)[0]) == (reach, reach)
    assert note in found["note"]


def test_reach_is_the_distance_that_changes_an_encoders_output() -> None:
    model = tiny_model("conv(kernel_size=3) + conv(kernel_size=5)", "conv", positions="none")
    reach, _ = describe_reach(model)
    src = torch.randint(4, 20, (1, 21))
    changed = src.clone()
    changed[0, 10] = 21
    with torch.no_grad():
        difference = (model.encode(src).values - model.encode(changed).values)[0].abs().sum(-1)
    assert difference.nonzero().flatten().tolist() == list(range(10 - 3, 10 + 3 + 1))
    assert reach == 3


def test_a_prefix_lm_and_a_language_model_have_positions() -> None:
    prefix = tiny_pair(tiny_model("", architecture="prefix_lm"))
    assert summary_of(prefix)["kind"] == "sinusoidal"
    language = tiny_pair(tiny_language_model(positions="transformer_xl"))
    assert {curve["site"] for curve in summary_of(language)["curves"]} == {"d0", "d1"}


def test_no_hook_is_left() -> None:
    model = tiny_model(positions="shaw")
    summary_of(tiny_pair(model))
    assert not any(module._forward_pre_hooks for module in model.modules())


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
def test_every_kind_is_drawn_or_reported_to_be_missing(tmp_path, kind: str) -> None:
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
    assert isinstance(part, PositionEncodingTable)
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


@pytest.mark.parametrize("positions", ["t5", "transformer_xl"])
def test_curves_have_later_positions_where_these_can_be_attended(positions: str) -> None:
    parts = find_positions(tiny_model(positions=positions), positions=6)
    curves = [part for part in parts if isinstance(part, PositionCurves)]
    assert len(curves) == 4
    for curve in curves:
        last = 6 if "encoder" in curve.where else 0
        assert curve.distances.tolist() == list(range(-6, last + 1))
        assert curve.values.shape == (2, len(curve.distances))
