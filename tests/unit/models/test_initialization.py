"""Depth-dependent initialization against the papers' bounds and standard deviations."""

from __future__ import annotations

import pytest
import torch

from dragoman.config import Config, ModelConfig
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model


def build(scheme: str, **more: object) -> EncoderDecoder:
    torch.manual_seed(0)
    values = {
        "encoder": ("transformer*4",),
        "decoder": ("transformer*3",),
        "width": 32,
        "heads": 2,
        "ffn_width": 64,
        **more,
    }
    return build_model(
        ModelConfig(initialization=scheme, **values), src_vocab_size=11, tgt_vocab_size=11
    )  # type: ignore[arg-type]


def test_by_depth_the_bound_falls_with_the_root_of_the_depth() -> None:
    model = build("depth_scaled")
    for stack in (model.encoder, model.decoder):
        for depth, (_, block) in enumerate(stack.blocks(), start=1):
            inner = block.get_parameter("ffn.inner.weight")
            bound = (6 / (32 + 64)) ** 0.5 / depth**0.5
            assert 0.95 * bound < inner.abs().max() <= bound


def test_by_depth_every_matrix_of_a_layer_is_smaller_and_nothing_else() -> None:
    plain, scaled = build("xavier"), build("depth_scaled")
    for (path, one), (_, other) in zip(
        plain.named_parameters(), scaled.named_parameters(), strict=True
    ):
        parts = path.split(".")
        factor = (
            (int(parts[1]) + 1) ** -0.5
            if parts[0] in ("encoder", "decoder") and one.dim() == 2
            else 1.0
        )
        torch.testing.assert_close(other, one * factor)


def test_residual_scaled_initialization_shrinks_output_projections() -> None:
    plain, scaled = build("xavier"), build("residual_scaled")
    for (path, one), (_, other) in zip(
        plain.named_parameters(), scaled.named_parameters(), strict=True
    ):
        back = path.endswith(("self.output.weight", "cross.output.weight", "ffn.outer.weight"))
        counts = {"encoder": 2 * 4, "decoder": 3 * 3}
        torch.testing.assert_close(other, one * counts[path.split(".")[0]] ** -0.5 if back else one)


@pytest.mark.parametrize("scheme", ["depth_scaled", "residual_scaled"])
def test_the_same_seed_gives_the_same_weights(scheme: str) -> None:
    first, second = (
        torch.nn.utils.parameters_to_vector(build(scheme).parameters()) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_unknown_initialization_is_rejected() -> None:
    (problem,) = Config().replace(model={"initialization": "deep"}).problems()
    assert "found 'deep'" in problem


def test_biases_start_at_zero() -> None:
    model = build("xavier")
    biases = [value for path, value in model.named_parameters() if path.endswith("bias")]
    assert len(biases) > 20
    assert not any(value.any() for value in biases)
