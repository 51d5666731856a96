"""Attention blocks for sets: MAB, SAB, ISAB and PMA of the Set Transformer.

Without positions, attention treats its keys as a set: permuting the elements permutes the output
of SAB and ISAB in the same way (equivariance) and leaves that of PMA unchanged (invariance).

Lee et al. (2019), "Set Transformer: A Framework for Attention-based Permutation-Invariant Neural
Networks". Equation numbers are theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.attention.multi_head import CrossAttention, SelfAttention
from dragoman.config import ModelConfig
from dragoman.layers.feed_forward import FeedForward
from dragoman.models.block_interface import Block, build_residual
from dragoman.models.forward_context import ForwardContext
from dragoman.ops.masked_pooling import max_pool, mean_pool, sum_pool
from dragoman.registry import catalogue


def build_feed_forward(config: ModelConfig) -> FeedForward:
    """Build rFF, a row-wise feed-forward network, from the settings of the model."""
    return FeedForward(
        config.width,
        config.ffn_width,
        activation=catalogue("activation").load(config.activation)(),
        dropout=config.ffn_dropout,
        bias=config.ffn_bias,
    )


class MultiheadAttentionBlock(nn.Module):
    r"""MAB: multi-head attention from one set to another, and a feed-forward network.

    .. math:: \mathrm{MAB}(X, Y) = \mathrm{LayerNorm}(H + \mathrm{rFF}(H)), \quad
        H = \mathrm{LayerNorm}(X + \mathrm{Multihead}(X, Y, Y))

    Lee et al. (2019), equations 6 and 7. `model.residual` chooses where the norms are: `post_norm`
    is the paper's, `no_norm` leaves them out as the released code does by default.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.cross = CrossAttention(
            config.width,
            config.heads,
            head_width=config.head_width,
            value_width=config.value_width,
            dropout=config.attention_dropout,
            bias=config.attention_bias,
        )
        self.cross_residual = build_residual(config)
        self.ffn = build_feed_forward(config)
        self.ffn_residual = build_residual(config)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend from (B, T, D) to (B, S, D), where the mask (B, S) is True."""
        key_mask = None if mask is None else mask.unsqueeze(1)  # (B, 1, S)
        attended = self.cross(self.cross_residual.prepare_input(x), memory, mask=key_mask)
        x = self.cross_residual.add_output(x, attended)
        return self.ffn_residual.add_output(x, self.ffn(self.ffn_residual.prepare_input(x)))


class SetAttentionBlock(Block):
    r"""SAB: attention between all elements of a set, quadratic in its size.

    .. math:: \mathrm{SAB}(X) = \mathrm{MAB}(X, X)

    Lee et al. (2019), equation 8: a Transformer layer without positions.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self = SelfAttention(
            config.width,
            config.heads,
            head_width=config.head_width,
            value_width=config.value_width,
            dropout=config.attention_dropout,
            bias=config.attention_bias,
        )
        self.self_residual = build_residual(config)
        self.ffn = build_feed_forward(config)
        self.ffn_residual = build_residual(config)
        self.final_norm = self.self_residual.final_norm

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Encode a set (B, N, D): (B, N, D)."""
        attended = self.self(
            self.self_residual.prepare_input(x), mask=context.self_mask(causal=False)
        )
        x = self.self_residual.add_output(x, attended)
        return self.ffn_residual.add_output(x, self.ffn(self.ffn_residual.prepare_input(x)))


class InducedSetAttentionBlock(Block):
    r"""ISAB: attention through m trained inducing points, linear in the size of the set.

    .. math:: \mathrm{ISAB}_m(X) = \mathrm{MAB}(X, H), \quad H = \mathrm{MAB}(I, X)

    Lee et al. (2019), equations 9 and 10.
    """

    def __init__(self, config: ModelConfig, *, inducing_points: int) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.empty(inducing_points, config.width))  # I
        nn.init.xavier_uniform_(self.points)
        self.gather = MultiheadAttentionBlock(config)
        self.spread = MultiheadAttentionBlock(config)
        self.final_norm = self.gather.cross_residual.final_norm

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Encode a set (B, N, D): (B, N, D)."""
        points = self.points.to(x.dtype).expand(x.size(0), -1, -1)
        hidden = self.gather(points, x, mask=context.mask)  # (B, m, D)
        return self.spread(x, hidden)


class ElementwiseBlock(Block):
    """A linear layer with ReLU on every element alone: the rFF encoder of Deep Sets.

    Zaheer et al. (2017); Lee et al. (2019) compare with it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Transform every element of (B, N, D): (B, N, D)."""
        return torch.relu(self.linear(x))


class PoolingByMultiheadAttention(Block):
    r"""PMA: k trained seed vectors attend to the set.

    .. math:: \mathrm{PMA}_k(Z) = \mathrm{MAB}(S, \mathrm{rFF}(Z))

    Lee et al. (2019), equation 11. The released code leaves rFF out, for the last block of the
    encoder ends in one; so do we.
    """

    def __init__(self, config: ModelConfig, *, seeds: int) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.empty(seeds, config.width))  # S
        nn.init.xavier_uniform_(self.seeds)
        self.pool = MultiheadAttentionBlock(config)
        self.final_norm = self.pool.cross_residual.final_norm

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pool a set (B, N, D): (B, k, D)."""
        return self.pool(self.seeds.to(x.dtype).expand(x.size(0), -1, -1), x, mask=context.mask)


class ElementPooling(Block):
    """Pooling of Deep Sets: a reduction over the elements of a set that are not padding."""

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pool a set (B, N, D): (B, 1, D)."""
        raise NotImplementedError


class SetMeanPooling(ElementPooling):
    """The mean over the elements."""

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pool a set (B, N, D): (B, 1, D)."""
        return mean_pool(x, context.mask).unsqueeze(1)


class SetSumPooling(ElementPooling):
    """The sum over the elements."""

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pool a set (B, N, D): (B, 1, D)."""
        return sum_pool(x, context.mask).unsqueeze(1)


class SetMaxPooling(ElementPooling):
    """The maximum over the elements, feature by feature."""

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Pool a set (B, N, D): (B, 1, D)."""
        return max_pool(x, context.mask).unsqueeze(1)


POOLINGS: dict[str, type[ElementPooling]] = {
    "mean": SetMeanPooling,
    "sum": SetSumPooling,
    "max": SetMaxPooling,
}
