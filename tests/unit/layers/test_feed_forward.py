"""Norms, feed-forward network, residual connections and embeddings against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from dragoman.attention import SinusoidalPositions
from dragoman.layers.embedding_and_output_projection import (
    Embedding,
    OutputProjection,
    SegmentInput,
    StackInput,
)
from dragoman.layers.feed_forward import GELU, ChunkedFeedForward, FeedForward, ReLU, Swish
from dragoman.layers.norms_and_residuals import LayerNorm, NoNorm, PostNorm, PreNorm, RMSNorm


def test_norms_of_one_to_four() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    rms = torch.tensor([0.365148, 0.730297, 1.095445, 1.460593], dtype=torch.float64)
    layer = torch.tensor([-1.341641, -0.447214, 0.447214, 1.341641], dtype=torch.float64)
    torch.testing.assert_close(RMSNorm(4, 1e-12).double()(x), rms, atol=5e-7, rtol=0)
    torch.testing.assert_close(LayerNorm(4, 1e-12).double()(x), layer, atol=5e-7, rtol=0)


def test_norms_take_their_epsilon() -> None:
    tiny = torch.full((1, 4), 1e-4)
    assert RMSNorm(4, 1.0)(tiny).abs().max() < 2e-4
    assert RMSNorm(4, 1e-12)(tiny).abs().max() > 0.9
    assert LayerNorm(4, 0.5).eps == 0.5


@pytest.mark.parametrize(
    ("activation", "at_one"),
    [(ReLU(), 1.0), (GELU(), 0.5 * (1 + math.erf(2**-0.5))), (Swish(), 1 / (1 + math.exp(-1)))],
)
def test_activations(activation: nn.Module, at_one: float) -> None:
    assert activation(torch.tensor(1.0)).item() == pytest.approx(at_one, abs=1e-6)
    assert activation(torch.tensor(0.0)).item() == 0


def test_feed_forward_is_two_linear_layers_with_an_activation() -> None:
    torch.manual_seed(0)
    layer = FeedForward(4, 8)
    x = torch.randn(2, 3, 4)
    expected = (
        torch.relu(x @ layer.inner.weight.T + layer.inner.bias) @ layer.outer.weight.T
        + layer.outer.bias
    )
    torch.testing.assert_close(layer(x), expected)


def test_feed_forward_drops_inner_values_in_training_only() -> None:
    torch.manual_seed(0)
    layer, x = FeedForward(4, 64, dropout=0.5), torch.randn(2, 3, 4)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_residual_wirings_are_their_formulas() -> None:
    torch.manual_seed(0)
    x, layer, norm = torch.randn(2, 3, 4), nn.Linear(4, 4), LayerNorm(4)
    post, pre, plain = PostNorm(norm), PreNorm(norm), NoNorm(norm)
    torch.testing.assert_close(post.add_output(x, layer(post.prepare_input(x))), norm(x + layer(x)))
    torch.testing.assert_close(pre.add_output(x, layer(pre.prepare_input(x))), x + layer(norm(x)))
    torch.testing.assert_close(plain.add_output(x, layer(plain.prepare_input(x))), x + layer(x))
    assert (post.final_norm, pre.final_norm, plain.final_norm) == (False, True, False)
    assert not list(plain.parameters())


def test_dropout_applies_to_the_sublayer_output_only() -> None:
    torch.manual_seed(0)
    residual = NoNorm(dropout=0.5)
    x, change = torch.full((1, 1, 1000), 3.0), torch.ones(1, 1, 1000)
    assert set(residual.add_output(x, change).unique().tolist()) == {
        3.0,
        5.0,
    }  # kept ones are doubled
    residual.eval()
    assert set(residual.add_output(x, change).unique().tolist()) == {4.0}


def test_embeddings_are_scaled_to_the_size_of_the_positions() -> None:
    torch.manual_seed(0)
    embedding = Embedding(1000, 64, scale=8.0)
    assert embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    found = embedding(torch.arange(1000).view(10, 100))
    assert found.shape == (10, 100, 64)
    assert found.std().item() == pytest.approx(1.0, rel=0.02)
    torch.testing.assert_close(found[0, 7], embedding.weight[7] * 8)


def test_positions_are_added_before_dropout() -> None:
    """Dropping before the sum would leave every position's own vector undisturbed."""
    torch.manual_seed(0)
    stack_input = StackInput(SinusoidalPositions(width=8), dropout=0.5)
    dropped = stack_input(torch.zeros(1, 50, 8))
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    stack_input.eval()
    torch.testing.assert_close(
        stack_input(torch.zeros(1, 3, 8), first=5)[0], SinusoidalPositions(width=8).vectors(5, 3)
    )


def test_segments_are_added_before_dropout() -> None:
    torch.manual_seed(0)
    segment_input = SegmentInput(SinusoidalPositions(width=8), width=8, dropout=0.5)
    dropped = segment_input(torch.zeros(1, 50, 8))
    assert 0.3 < (dropped == 0).float().mean() < 0.7


def test_a_tied_output_has_no_matrix_of_its_own() -> None:
    assert dict(OutputProjection(10, 4, tied=True).named_parameters()) == {}
    assert list(dict(OutputProjection(10, 4, tied=False, bias=True).named_parameters())) == [
        "weight",
        "bias",
    ]


@pytest.mark.parametrize("kind", [FeedForward, partial(ChunkedFeedForward, chunks=2)])
def test_feed_forward_without_bias_maps_zeros_to_zeros(kind: Callable[..., FeedForward]) -> None:
    layer = kind(4, 8, bias=False)
    assert list(dict(layer.named_parameters())) == ["inner.weight", "outer.weight"]
    assert not layer(torch.zeros(1, 3, 4)).any()
