"""Weight initialization: Xavier, optionally scaled by depth.

- Linear layers are Xavier-uniform: bound sqrt(6 / (inputs + outputs)). Query, key and value
  projections stored as one matrix are initialized as one, which divides each by sqrt(2); fairseq
  found that post-norm stacks train better so.
- Embeddings are N(0, 1 / D). Multiplied by sqrt(D) they have unit variance, as the positions have;
  tied to the output projection they give logits of unit variance.
- Biases are zero, norms the identity.

Deep stacks train better with smaller weights: `DEPTH_SCALINGS` names the scalings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dragoman.attention.multi_head import CrossAttention, MultiHead
from dragoman.layers.feed_forward import FeedForward
from dragoman.models.block_stack import Stack


def initialize_weights(
    model: nn.Module, scale_stack: Callable[[Stack], None] | None = None
) -> None:
    """Initialize the weights of a model in the order of its modules, reproducibly for a seed."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, CrossAttention):
            # The scale that self-attention's joint projection gives queries, keys and values.
            nn.init.xavier_uniform_(module.query.weight, gain=2**-0.5)
            nn.init.xavier_uniform_(module.key_value.weight, gain=0.75**0.5)
    if scale_stack is not None:
        for module in model.modules():
            if isinstance(module, Stack):
                scale_stack(module)


@torch.no_grad()
def scale_by_depth(stack: Stack) -> None:
    r"""Divide the weight matrices of the l-th block by sqrt(l).

    .. math:: W^l \sim U\left(\pm \sqrt{6 / (d_i + d_o)} / \sqrt l\right)

    DS-Init, Zhang, Titov and Sennrich (2019), with alpha = 1: it keeps the gradients of deep
    post-norm stacks from vanishing.
    """
    for depth, (_, block) in enumerate(stack.blocks(), start=1):
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight *= depth**-0.5


@torch.no_grad()
def scale_by_residual_count(stack: Stack) -> None:
    r"""Divide the N output matrices of a stack's residual branches by sqrt(N).

    .. math:: W \leftarrow W / \sqrt N

    Radford et al. (2019), "GPT-2". The matrices are attention's W^O and the second matrix of the
    feed-forward network: two in an encoder layer, three in a decoder layer.
    """
    outputs = [module.output for module in stack.modules() if isinstance(module, MultiHead)]
    outputs += [module.outer for module in stack.modules() if isinstance(module, FeedForward)]
    for linear in outputs:
        linear.weight *= len(outputs) ** -0.5


DEPTH_SCALINGS: dict[str, Callable[[Stack], None] | None] = {
    "xavier": None,
    "depth_scaled": scale_by_depth,
    "residual_scaled": scale_by_residual_count,
}
