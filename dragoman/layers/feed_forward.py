"""Position-wise feed-forward networks and their activations."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dragoman import ops


class ReLU(nn.ReLU):
    """Rectified linear unit: max(0, x)."""


class GELU(nn.GELU):
    """Gaussian error linear unit: x times the normal CDF of x; Hendrycks and Gimpel (2016)."""


class Swish(nn.SiLU):
    """Swish or SiLU: x times its sigmoid; Ramachandran, Zoph and Le (2017)."""


class GatedActivation(nn.Module):
    """A gated linear unit with another activation than the sigmoid; its input is twice as wide."""

    projections: ClassVar[int] = 2  # linear projections that the activation takes

    def gate(self, x: Tensor) -> Tensor:
        """Return the gate's activation."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the halves of (..., 2 F): (..., F)."""
        gate, value = x.chunk(2, dim=-1)
        return self.gate(gate) * value


class SwiGLU(GatedActivation):
    r"""Gated linear unit with Swish.

    .. math:: \mathrm{swish}(x W) \odot x V

    Shazeer (2020), equation 5. It has three matrices instead of two: with two thirds of the inner
    width it has as many parameters as a network without a gate.
    """

    def gate(self, x: Tensor) -> Tensor:
        """Return Swish of the gate."""
        return F.silu(x)


class GEGLU(GatedActivation):
    r"""Gated linear unit with GELU.

    .. math:: \mathrm{gelu}(x W) \odot x V

    Shazeer (2020), equation 5; T5 1.1 uses it with an approximate GELU.
    """

    def gate(self, x: Tensor) -> Tensor:
        """Return GELU of the gate."""
        return F.gelu(x)


def count_projections(activation: nn.Module) -> int:
    """Return how many linear projections an activation takes: 2 if it is gated, else 1."""
    count: int = getattr(activation, "projections", 1)
    return count


class FeedForward(nn.Module):
    r"""Position-wise feed-forward network: two linear layers with an activation in between.

    .. math:: \mathrm{FFN}(x) = f(x W_1 + b_1) W_2 + b_2

    Vaswani et al. (2017), equation 2, where f is ReLU.
    """

    cuda_graphs = False  # whether CUDA graphs replay this layer; set by the trainer

    def __init__(
        self,
        width: int,
        ffn_width: int,
        *,
        activation: nn.Module | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        activation = ReLU() if activation is None else activation
        self.inner = nn.Linear(width, ffn_width * count_projections(activation), bias=bias)
        self.activation = activation
        self.outer = nn.Linear(ffn_width, width, bias=bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of (B, T, D) independently: (B, T, D)."""
        if isinstance(self.activation, ReLU):
            cuda_graphs = self.training and self.cuda_graphs
            hidden = ops.linear_relu(x, self.inner.weight, self.inner.bias, cuda_graphs=cuda_graphs)
        else:
            hidden = self.activation(self.inner(x))
        return self.outer(ops.dropout(hidden, self.dropout, training=self.training))


class ChunkedFeedForward(FeedForward):
    """A feed-forward network that computes the positions in chunks: Kitaev et al. (2020).

    Training saves each chunk's input only and recomputes its hidden values in the backward pass.
    """

    def __init__(
        self,
        width: int,
        ffn_width: int,
        *,
        chunks: int,
        activation: nn.Module | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width, ffn_width, activation=activation, dropout=dropout, bias=bias)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of (B, T, D) independently: (B, T, D)."""
        if self.chunks == 1 or x.size(1) < self.chunks:
            return super().forward(x)
        transform = super().forward
        if torch.is_grad_enabled():
            transform = partial(
                checkpoint,
                transform,
                use_reentrant=False,
                preserve_rng_state=self.training and self.dropout > 0,
            )
        return torch.cat([transform(part) for part in x.tensor_split(self.chunks, dim=1)], dim=1)
