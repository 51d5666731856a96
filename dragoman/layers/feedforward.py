"""The feed-forward layer: the same two products at every position, with a bend between them."""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.kernels import dropout


class ReLU(nn.ReLU):
    """The positive part, max(0, x)."""


class GELU(nn.GELU):
    """The input times the normal distribution's share below it; Hendrycks and Gimpel (2016)."""


class Swish(nn.SiLU):
    """The input times its sigmoid; Ramachandran, Zoph and Le (2017)."""


class FeedForward(nn.Module):
    r"""Widen, bend, narrow.

    .. math:: \mathrm{FFN}(x) = f(x W_1 + b_1) W_2 + b_2

    Vaswani et al. (2017), equation 2, with f the positive part.
    """

    def __init__(self, width: int, inner: int, *, activation: nn.Module | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(width, inner)
        self.activation = ReLU() if activation is None else activation
        self.outer = nn.Linear(inner, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Change every position of (B, T, D) by itself."""
        bent = self.activation(self.inner(x))
        if self.training and self.dropout:
            bent = dropout(bent, self.dropout)
        return self.outer(bent)
