"""The feed-forward layer: the same two products at every position, with a bend between them."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dragoman.ops import dropout, linear_relu


class ReLU(nn.ReLU):
    """The positive part, max(0, x)."""


class GELU(nn.GELU):
    """The input times the normal distribution's share below it; Hendrycks and Gimpel (2016)."""


class Swish(nn.SiLU):
    """The input times its sigmoid; Ramachandran, Zoph and Le (2017)."""


class GatedActivation(nn.Module):
    """An activation of two products: one bends, and opens or shuts the other; the inner product is made twice as wide."""

    parts: ClassVar[int] = 2

    def gate(self, x: Tensor) -> Tensor:
        """Bend the half that decides."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Multiply the halves of (..., 2 F): (..., F)."""
        gate, value = x.chunk(2, dim=-1)
        return self.gate(gate) * value


class SwiGLU(GatedActivation):
    r"""A gate bent by Swish.

    .. math:: \mathrm{swish}(x W) \odot x V

    Shazeer (2020), equation 5. It has three matrices for two: at two thirds of the inner size it is as large as without a gate.
    """

    def gate(self, x: Tensor) -> Tensor:
        """Multiply by the sigmoid."""
        return F.silu(x)


class GEGLU(GatedActivation):
    r"""A gate bent by GELU.

    .. math:: \mathrm{gelu}(x W) \odot x V

    Shazeer (2020), equation 5; T5 1.1 has it, with GELU approximated.
    """

    def gate(self, x: Tensor) -> Tensor:
        """Multiply by the normal distribution's share below."""
        return F.gelu(x)


class FeedForward(nn.Module):
    r"""Widen, bend, narrow.

    .. math:: \mathrm{FFN}(x) = f(x W_1 + b_1) W_2 + b_2

    Vaswani et al. (2017), equation 2, with f the positive part.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: nn.Module | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        activation = ReLU() if activation is None else activation
        self.inner = nn.Linear(width, inner * getattr(activation, "parts", 1), bias=bias)
        self.activation = activation
        self.outer = nn.Linear(inner, width, bias=bias)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Change every position of (B, T, D) by itself."""
        hidden = (
            linear_relu(x, self.inner.weight, self.inner.bias)
            if self.training and isinstance(self.activation, ReLU)
            else None
        )
        if hidden is None:
            hidden = self.activation(self.inner(x))
        if self.training and self.dropout:
            hidden = dropout(hidden, self.dropout)
        return self.outer(hidden)


class ChunkedFeedForward(FeedForward):
    """The same layer with the positions cut into `chunks`: Kitaev et al. (2020) note that positions do not depend on each other here.

    Training keeps each chunk's input and computes its inner values again on the way back, or they would all wait there.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        chunks: int,
        activation: nn.Module | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width, inner, activation=activation, dropout=dropout, bias=bias)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        """Change every position of (B, T, D) by itself."""
        if self.chunks == 1 or x.size(1) < self.chunks:
            return super().forward(x)
        change = super().forward
        if torch.is_grad_enabled():
            change = partial(
                checkpoint,
                change,
                use_reentrant=False,
                preserve_rng_state=self.training and self.dropout > 0,
            )
        return torch.cat([change(part) for part in x.tensor_split(self.chunks, dim=1)], dim=1)
