"""Norms and gated activations against other implementations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dragoman.layers.feed_forward import GEGLU, FeedForward, SwiGLU
from dragoman.layers.norms_and_residuals import (
    BatchNorm,
    LayerNorm,
    NoNorm,
    NoResidual,
    PostNorm,
    PreNorm,
    Residual,
    RMSNorm,
    ScaledResidual,
    ScaleNorm,
    T5Norm,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t5s_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    torch.manual_seed(0)
    ours, theirs = T5Norm(8).to(dtype), T5LayerNorm(8, eps=1e-6).to(dtype)
    nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 8, dtype=dtype) * 30
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)


def test_t5s_norm_is_rms_norm_where_numbers_are_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(T5Norm(8, 1e-5).double()(x), RMSNorm(8, 1e-5).double()(x))


def test_scale_norm_puts_vectors_on_one_sphere() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, -2.0], [0.0, 0.0]])
    norm = ScaleNorm(2)
    torch.testing.assert_close(
        norm(x)[:2].norm(dim=-1), torch.full((2,), 2**0.5)
    )  # g starts at the root of the width
    torch.testing.assert_close(norm(x), norm.weight * nn.functional.normalize(x, eps=1e-5))
    assert not norm(x)[2].any()
    nn.init.constant_(norm.weight, 10.0)
    torch.testing.assert_close(norm(x)[0], torch.tensor([6.0, 8.0]))
    assert norm.weight.numel() == 1


def test_a_zero_vector_has_a_finite_gradient() -> None:
    x = torch.zeros(1, 4, requires_grad=True)
    ScaleNorm(4)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_batch_norm_is_pytorchs() -> None:
    torch.manual_seed(0)
    ours, theirs = BatchNorm(4), nn.BatchNorm1d(4)
    for _ in range(3):  # training: the batch's own numbers, and averages that run
        x = torch.randn(2, 3, 4) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x.flatten(0, 1)).view(x.shape))
    ours.eval(), theirs.eval()
    x = torch.randn(1, 1, 4)
    torch.testing.assert_close(ours(x), theirs(x.flatten(0, 1)).view(x.shape))
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_batch_norm_of_one_vector_uses_the_averages() -> None:
    norm, x = BatchNorm(4), torch.randn(1, 1, 4)
    torch.testing.assert_close(norm(x), norm.eval()(x))


def test_batch_norm_in_evaluation_ignores_the_other_sentences() -> None:
    norm = BatchNorm(2).eval()
    norm.running_mean.copy_(torch.tensor([1.0, -1.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    found = norm(torch.tensor([[[3.0, -1.0]], [[5.0, 0.0]]]))
    torch.testing.assert_close(found, torch.tensor([[[1.0, 0.0]], [[2.0, 2.0]]]), rtol=0, atol=1e-4)
    assert norm.running_mean.tolist() == [1.0, -1.0]
    assert norm.running_var.tolist() == [4.0, 0.25]


@pytest.mark.parametrize(
    ("kind", "epsilon"),
    [(LayerNorm, 3.0), (RMSNorm, 3.0), (T5Norm, 3.0), (BatchNorm, 3.0), (ScaleNorm, 8**0.5)],
)
def test_norms_use_the_epsilon_that_is_given(
    kind: Callable[[int, float], nn.Module], epsilon: float
) -> None:
    x = torch.tensor([[-1.0, 1.0]])  # with a variance and mean square of 1, and a norm of sqrt(2)
    torch.testing.assert_close(kind(2, epsilon).eval()(x), x / 2)


@pytest.mark.parametrize(("gate", "name"), [(SwiGLU, "silu"), (GEGLU, "gelu")])
def test_gated_layers_are_those_of_transformers(gate: type[nn.Module], name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    torch.manual_seed(0)
    theirs = LlamaMLP(
        LlamaConfig(
            hidden_size=6,
            num_attention_heads=2,
            intermediate_size=10,
            hidden_act=name,
            mlp_bias=True,
        )
    )
    ours = FeedForward(6, 10, activation=gate())
    assert ours.inner.weight.shape == (20, 6)
    with torch.no_grad():
        ours.inner.weight.copy_(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
        ours.inner.bias.copy_(torch.cat([theirs.gate_proj.bias, theirs.up_proj.bias]))
        ours.outer.load_state_dict(theirs.down_proj.state_dict())
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", [PostNorm, PreNorm])
def test_locked_dropout_has_one_mask_for_all_positions(kind: type[Residual]) -> None:
    torch.manual_seed(0)
    residual = kind(LayerNorm(64), dropout=0.5)
    residual.locked = True
    added = residual.add_output(torch.zeros(2, 5, 64), torch.ones(2, 5, 64))
    assert torch.equal(added, added[:, :1].expand_as(added))
    assert not torch.equal(added[0], added[1])


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(
    ("kind", "prepared", "added"),
    [
        (PostNorm, [0.0, 2.0], [1.0, -1.0]),
        (PreNorm, [-1.0, 1.0], [4.0, 2.0]),
        (NoNorm, [0.0, 2.0], [4.0, 2.0]),
        (ScaledResidual, [0.0, 2.0], [8**0.5, 2**0.5]),
        (NoResidual, [0.0, 2.0], [4.0, 0.0]),
    ],
)
def test_residual_connections_have_no_dropout_in_evaluation(
    kind: type[Residual], prepared: list[float], added: list[float], locked: bool
) -> None:
    torch.manual_seed(0)
    residual = kind(LayerNorm(2), dropout=0.99).eval()
    residual.locked = locked
    x, sublayer_output = torch.tensor([[[0.0, 2.0]]]), torch.tensor([[[4.0, 0.0]]])
    torch.testing.assert_close(residual.prepare_input(x), torch.tensor([[prepared]]))
    torch.testing.assert_close(residual.add_output(x, sublayer_output), torch.tensor([[added]]))


def test_t5s_norm_has_the_epsilon_of_t5() -> None:
    assert T5Norm(4).epsilon == 1e-6


def test_without_a_residual_connection_dropout_acts_on_the_output() -> None:
    torch.manual_seed(0)
    residual = NoResidual(dropout=0.5)
    added = residual.add_output(torch.full((1, 1, 1000), 3.0), torch.ones(1, 1, 1000))
    assert set(added.unique().tolist()) == {0.0, 2.0}  # kept ones are doubled


def test_batch_norm_averages_move_by_the_momentum() -> None:
    norm = BatchNorm(1, momentum=0.25)
    norm(torch.tensor([[[2.0], [6.0]]]))  # a mean of 4 and an unbiased variance of 8
    assert norm.running_mean.item() == pytest.approx(0.25 * 4)
    assert norm.running_var.item() == pytest.approx(0.75 * 1 + 0.25 * 8)
