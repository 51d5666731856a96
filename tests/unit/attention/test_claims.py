"""Claims about attention that papers and surveys make, as equalities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention import SelfAttention, T5RelativeBias
from dragoman.config import ModelConfig
from dragoman.models.factory import build_model
from dragoman.models.forward_context import ForwardContext, Memory

SURE = 1e4  # a score whose softmax is one-hot in float32


@torch.no_grad()
def convolution_as_attention(filters: Tensor, bias: Tensor) -> SelfAttention:
    """Build self-attention that computes a convolution: filters (out, in, K), K odd, bias (out,).

    Cordonnier, Loukas and Jaggi (2020): as many heads as the filter is wide, each attending to one
    relative position whatever the content; W^V copies, and W^O holds the filter.
    """
    width, inputs, kernel = filters.shape
    assert inputs == width
    positions = T5RelativeBias(kernel, causal=False)
    attention = SelfAttention(width, kernel, head_width=width, relative_position=positions)
    attention.query_key_value.weight.zero_()  # scores do not depend on the content
    attention.query_key_value.bias.zero_()
    positions.weight.zero_()
    for head in range(kernel):
        distance = torch.tensor(head - kernel // 2)
        positions.weight[positions.bucket(distance), head] = SURE
        values = attention.query_key_value.weight[-kernel * width :]  # W^V
        values[head * width : (head + 1) * width] = torch.eye(width)
        attention.output.weight[:, head * width : (head + 1) * width] = filters[:, :, head]
    attention.output.bias.copy_(bias)
    return attention


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_self_attention_expresses_any_convolution(kernel: int) -> None:
    torch.manual_seed(kernel)
    filters, bias, x = torch.randn(6, 6, kernel), torch.randn(6), torch.randn(2, 11, 6)
    attention = convolution_as_attention(filters, bias)
    edge = kernel // 2
    padded = F.pad(x, (0, 0, edge, edge))  # zeros for the filter to read at the edges
    found = attention(padded)[:, edge : edge + 11]
    expected = F.conv1d(x.transpose(1, 2), filters, bias, padding=edge).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_that_ignore_the_content_are_a_linear_layer() -> None:
    """With fixed weights attention is linear in its input; otherwise it is not."""
    torch.manual_seed(0)
    fixed = convolution_as_attention(torch.randn(6, 6, 3), torch.zeros(6))
    free = SelfAttention(6, 2, bias=False)
    one, other = torch.randn(2, 1, 5, 6)
    torch.testing.assert_close(fixed(one + other), fixed(one) + fixed(other), atol=1e-5, rtol=1e-5)
    assert (free(one + other) - free(one) - free(other)).abs().max() > 1e-3


def test_attention_has_parameters_for_the_width_and_none_for_the_length() -> None:
    def parameters(module: nn.Module) -> int:
        return sum(weight.numel() for weight in module.parameters())

    attention = SelfAttention(64, 8, bias=False)
    assert parameters(attention) == 4 * 64 * 64
    for length in (10, 100):
        assert attention(torch.randn(1, length, 64)).shape == (1, length, 64)
    # a fully connected layer between all positions has length^2 as many
    assert parameters(nn.Linear(10 * 64, 10 * 64, bias=False)) == 10**2 * 64**2


def test_stacked_cross_attention_is_a_memory_network() -> None:
    """Hops of Sukhbaatar et al. (2015): u <- u + sum_i softmax(u . A m_i) C m_i."""
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("ffn",),
        decoder=("cross_attention(residual=no_norm)*3",),
        width=8,
        heads=1,
        ffn_width=16,
        dropout=0.0,
        attention_bias=False,
    )
    stack = build_model(config, src_vocab_size=9, tgt_vocab_size=9).eval().decoder
    question, memory = torch.randn(2, 1, 8), torch.randn(2, 5, 8)
    found = stack(question, ForwardContext(memory=Memory(memory)))
    u = question
    for _, block in stack.blocks():
        cross = block.cross
        a, c = cross.key_value.weight.chunk(2)
        matching = (u @ cross.query.weight.T) @ (memory @ a.T).transpose(1, 2) / 8**0.5
        u = u + matching.softmax(-1) @ (memory @ c.T) @ cross.output.weight.T
    torch.testing.assert_close(found, u, atol=1e-5, rtol=1e-5)
