"""Parts of ConvS2S: weight normalization, gradient scaling, gated convolutions, scaled residual
sums.
"""

from __future__ import annotations

import math

import pytest
import torch
from convolution_kit import PAPER, build_conv_model
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from dragoman.config import ModelConfig
from dragoman.layers.convs2s import (
    ConvS2SAttention,
    ConvS2SLinear,
    GatedConvolution,
    PlainWeight,
    WeightNormWeight,
)
from dragoman.layers.norms_and_residuals import ScaledResidual
from dragoman.models.block_interface import BuildContext
from dragoman.models.convs2s_blocks import ConvolutionLayer
from dragoman.models.factory import build_model, count_parameters
from dragoman.models.forward_context import ForwardContext, Memory


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3)])
def test_normed_weights_are_pytorchs(shape: tuple[int, ...]) -> None:
    """Values and gradients, of a matrix and of a kernel, with lengths that have left their
    directions' own.
    """
    torch.manual_seed(0)
    ours = WeightNormWeight(*shape, std=0.5).double()
    module: nn.Module = (
        nn.Linear(4, 6, bias=False) if len(shape) == 2 else nn.Conv1d(4, 6, 3, bias=False)
    )
    theirs = weight_norm(module.double(), dim=0)
    with torch.no_grad():
        ours.length.mul_(torch.linspace(0.5, 2, 6))
        theirs.parametrizations.weight.original0.flatten().copy_(ours.length)
        theirs.parametrizations.weight.original1.copy_(ours.direction)
    torch.testing.assert_close(ours(), theirs.weight)
    pull = torch.randn(shape, dtype=torch.float64)
    (ours() * pull).sum().backward()
    (theirs.weight * pull).sum().backward()
    torch.testing.assert_close(
        ours.length.grad, theirs.parametrizations.weight.original0.grad.flatten()
    )
    torch.testing.assert_close(ours.direction.grad, theirs.parametrizations.weight.original1.grad)


def test_a_normed_weight_starts_as_the_plain_one() -> None:
    torch.manual_seed(0)
    plain = PlainWeight(5, 4, 3, std=0.1)
    torch.manual_seed(0)
    torch.testing.assert_close(WeightNormWeight(5, 4, 3, std=0.1)(), plain())


def test_weight_norm_is_computed_once_in_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And again as soon as it changes, whoever changes it: in place, by loading, by another tensor,
    or unseen between two modes.
    """
    weight = WeightNormWeight(3, 2, std=1.0).eval()
    made: list[int] = []
    plain = weight._compute_weight
    monkeypatch.setattr(weight, "_compute_weight", lambda: (made.append(1), plain())[1])

    def current() -> Tensor:
        return weight.direction * (weight.length / weight.direction.norm(dim=1)).unsqueeze(1)

    with torch.no_grad():
        assert weight() is weight()
        assert len(made) == 1
        weight.length.mul_(2)
        torch.testing.assert_close(weight(), current())
        weight.load_state_dict(
            {name: torch.randn_like(tensor) for name, tensor in weight.state_dict().items()}
        )
        torch.testing.assert_close(weight(), current())
        weight.double()
        torch.testing.assert_close(weight(), current())
        weight.length.data = weight.length.data.clone() * 3
        torch.testing.assert_close(weight(), current())
        weight.train()
        weight.length.data.numpy()[:] = 5  # unseen
        torch.testing.assert_close(weight.eval()(), current())
    assert weight().requires_grad  # whoever wants a gradient gets one
    with torch.inference_mode():
        torch.testing.assert_close(weight(), current())


def test_gradient_scaling_divides_the_gradient_of_the_encoder_outputs_only() -> None:
    """The released code's GradMultiply: by twice the number of attentions, not for the embeddings,
    and no value changes.
    """
    arguments = {
        "config": ModelConfig(width=4, heads=1, dropout=0.0, residual="scaled"),
        "causal": True,
        "memory_width": 4,
    }
    found = {}
    for scale_encoder_grad in (False, True):
        torch.manual_seed(0)
        block = ConvolutionLayer.build(
            BuildContext(**arguments), layers=3, scale_encoder_grad=scale_encoder_grad
        )  # type: ignore[arg-type]
        values, embeddings = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(2))
        output = block(
            torch.randn(2, 3, 4), ForwardContext(memory=Memory(values, None, embeddings))
        )
        found[scale_encoder_grad] = (
            output,
            *torch.autograd.grad(output.square().sum(), (values, embeddings)),
        )
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=0)
    torch.testing.assert_close(found[True][1], found[False][1] / 6)
    torch.testing.assert_close(found[True][2], found[False][2])


@pytest.mark.parametrize("dilation", [1, 2, 5])
@pytest.mark.parametrize(
    ("kernel", "causal"), [(1, False), (3, False), (5, False), (1, True), (2, True), (3, True)]
)
def test_the_gated_convolution_is_pytorchs(kernel: int, causal: bool, dilation: int) -> None:
    torch.manual_seed(0)
    ours = GatedConvolution(
        4, kernel, weight=WeightNormWeight, causal=causal, dilation=dilation
    ).double()
    nn.init.normal_(ours.bias)
    padding = dilation * (kernel - 1 if causal else kernel // 2)
    theirs = nn.Conv1d(4, 8, kernel, padding=padding, dilation=dilation).double()
    with torch.no_grad():
        theirs.weight.copy_(ours.weight())
        theirs.bias.copy_(ours.bias)  # type: ignore[union-attr]
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    content, gate = theirs(x.transpose(1, 2))[:, :, :6].transpose(1, 2).chunk(2, dim=-1)
    torch.testing.assert_close(ours(x), content * torch.sigmoid(gate))


def test_initialization_follows_section_3_5() -> None:
    torch.manual_seed(0)
    convolution = GatedConvolution(64, 3, weight=WeightNormWeight, causal=False, dropout=0.2)
    assert convolution.weight().std().item() == pytest.approx((4 * 0.8 / (3 * 64)) ** 0.5, rel=0.02)
    assert ConvS2SLinear(64, 64, weight=PlainWeight).weight().std().item() == pytest.approx(
        1 / 8, rel=0.03
    )
    model = build_conv_model(("conv",), ("conv",), width=64)
    assert model.decoder.get_submodule("0").convolution.weight().std().item() == pytest.approx(
        (4 / (3 * 64)) ** 0.5, rel=0.03
    )  # type: ignore[union-attr, operator]
    assert not any(
        weight.any()
        for name, weight in model.named_parameters()
        if name.endswith("convolution.bias")
    )


def test_the_scaled_residual_keeps_the_variance() -> None:
    torch.manual_seed(0)
    x, change = torch.randn(100, 100), torch.randn(100, 100)
    residual = ScaledResidual(nn.LayerNorm(100), dropout=0.5)  # the norm is not used
    assert count_parameters(residual) == 0
    torch.testing.assert_close(residual.add_output(x, change), (x + change) / math.sqrt(2))
    assert residual.add_output(x, change).std().item() == pytest.approx(1.0, rel=0.02)
    entered = residual.prepare_input(torch.ones(100, 100))
    assert set(entered.unique().tolist()) == {
        0.0,
        2.0,
    }  # what goes into the layer is dropped, the stream is not
    assert residual.eval().prepare_input(x) is x


def test_activations_stay_in_range_through_twenty_layers() -> None:
    """What the constants are for: 20 layers as in the paper's en-ro model, embeddings of deviation
    1 / 16.
    """
    torch.manual_seed(0)
    config = ModelConfig(encoder=("conv*20",), decoder=("conv(layers=20)",), width=256, **PAPER)  # type: ignore[arg-type]
    model = build_model(config, src_vocab_size=50, tgt_vocab_size=50).eval()
    with torch.inference_mode():
        memory = model.encode(torch.randint(4, 50, (2, 20)))
        hidden = model.decode(torch.randint(4, 50, (2, 20)), memory)
    assert memory.embeddings is not None
    for found in (memory.values, hidden):
        assert 0.05 < found.std().item() / memory.embeddings.std().item() < 20


@torch.no_grad()
def test_dropout_of_attention_weights_acts_in_training_only() -> None:
    torch.manual_seed(0)
    attention = ConvS2SAttention(8, weight=PlainWeight, dropout=0.5)
    x, source = torch.randn(2, 3, 8), attention.prepare(torch.randn(2, 5, 8), None)
    assert not torch.equal(attention(x, x, source), attention(x, x, source))
    attention.eval()
    assert torch.equal(attention(x, x, source), attention(x, x, source))
