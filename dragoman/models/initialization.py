"""First values, chosen so that the paper's post-norm model trains with the paper's schedule.

- A matrix gets Xavier-uniform values: bound sqrt(6 / (inputs + outputs)). Matrices stored as one (query, key and value)
  are filled as one, which makes each smaller by the root of two; fairseq found this to train post-norm stacks better.
- An embedding gets N(0, 1 / D). Times sqrt(D) on the way in, its numbers are of size one, as are the positions'; on the way
  out, where it is the projection, logits start with variance one. N(0, 1) instead would give them variance D.
- Biases start at nought, norms at the identity.

Deep stacks start better with smaller weights. `by_depth` makes those of the l-th block smaller, `by_residuals` those that lead back
into the stream; `DEPTHS` names them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dragoman.attention.multi_head import CrossAttention, MultiHead
from dragoman.layers.feed_forward import FeedForward
from dragoman.models.stack import Stack


def initialize_weights(
    model: nn.Module, scale_stack: Callable[[Stack], None] | None = None
) -> None:
    """Fill the weights of a model, in the order of its modules: the same values after the same `torch.manual_seed`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, CrossAttention):
            # As in self-attention: queries as small as keys and values.
            nn.init.xavier_uniform_(module.query.weight, gain=2**-0.5)
            nn.init.xavier_uniform_(module.key_value.weight, gain=0.75**0.5)
    if scale_stack is not None:
        for module in model.modules():
            if isinstance(module, Stack):
                scale_stack(module)


@torch.no_grad()
def scale_by_depth(stack: Stack) -> None:
    r"""Divide the matrices of the l-th block by the root of l.

    .. math:: W^l \sim U\left(\pm \sqrt{6 / (d_i + d_o)} / \sqrt l\right)

    DS-Init, Zhang, Titov and Sennrich (2019), with their alpha at one: a deep post-norm stack then keeps its gradients.
    """
    for scale_stack, (_, block) in enumerate(stack.blocks(), start=1):
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight *= scale_stack**-0.5


@torch.no_grad()
def scale_by_residual_count(stack: Stack) -> None:
    r"""Divide the matrices whose output is added to the stream by the root of their number, N.

    .. math:: W \leftarrow W / \sqrt N

    Radford et al. (2019), "GPT-2": with two such places a layer, the root of twice the layers. Attention's W^O and the
    feed-forward layer's second matrix are such; a decoder's layer has three.
    """
    last = [module.output for module in stack.modules() if isinstance(module, MultiHead)]
    last += [module.outer for module in stack.modules() if isinstance(module, FeedForward)]
    for linear in last:
        linear.weight *= len(last) ** -0.5


DEPTH_SCALINGS: dict[str, Callable[[Stack], None] | None] = {
    "xavier": None,
    "depth_scaled": scale_by_depth,
    "residual_scaled": scale_by_residual_count,
}
