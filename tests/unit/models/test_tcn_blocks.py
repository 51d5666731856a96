"""The TCN block against convolutions of PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dragoman.config import ModelConfig
from dragoman.models.factory import build_stack
from dragoman.models.forward_context import ForwardContext


def test_it_is_two_causal_dilated_convolutions_with_a_residual_connection() -> None:
    torch.manual_seed(0)
    blocks = ("tcn(kernel_size=3, dilation=2)",)
    config = ModelConfig(width=4, encoder=blocks, dropout=0.0)
    stack = build_stack(config, blocks, "model.encoder", causal=False, memory_width=None).double()
    x = torch.randn(2, 9, 4, dtype=torch.float64)
    _, block = next(stack.blocks())
    hidden = x.transpose(1, 2)
    for part in (block.first, block.second):
        direction, length = part.weight.direction, part.weight.length
        weight = direction * (length / direction.flatten(1).norm(dim=1)).view(-1, 1, 1)
        hidden = F.relu(F.conv1d(F.pad(hidden, (4, 0)), weight, part.bias, dilation=2))
    expected = F.relu(x + hidden.transpose(1, 2))
    torch.testing.assert_close(stack(x, ForwardContext()), expected)


def test_the_last_position_reads_as_far_as_the_dilations_reach() -> None:
    torch.manual_seed(0)
    blocks = ("tcn(kernel_size=2)", "tcn(kernel_size=2, dilation=2)")
    config = ModelConfig(width=4, encoder=blocks, dropout=0.0)
    stack = build_stack(config, blocks, "model.encoder", causal=False, memory_width=None).double()
    x = torch.rand(1, 12, 4, dtype=torch.float64, requires_grad=True)
    stack(x, ForwardContext())[0, -1].sum().backward()
    assert x.grad is not None
    read = x.grad[0].abs().sum(dim=1) > 0
    assert read.tolist() == [False] * 5 + [True] * 7  # 1 + 2 (1 + 2)


@torch.no_grad()
def test_dropout_follows_both_convolutions() -> None:
    """With a probability of 1 the second reads zeros, and nothing is added to the input."""
    torch.manual_seed(0)
    config = ModelConfig(width=4, encoder=("tcn",), dropout=0.1)
    stack = build_stack(config, ("tcn",), "model.encoder", causal=False, memory_width=None)
    _, block = next(stack.blocks())
    assert block.dropout == 0.1
    block.dropout = 1.0
    for part in (block.first, block.second):
        torch.nn.init.ones_(part.bias)
    read = []
    block.second.register_forward_pre_hook(lambda _, arguments: read.append(arguments[0]))
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(stack(x, ForwardContext()), F.relu(x))
    assert not read[0].any()
    stack.eval()
    assert not torch.allclose(stack(x, ForwardContext()), F.relu(x))
    assert read[1].any()
