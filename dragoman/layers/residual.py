"""How a layer's change is joined to its input: residual, norm and dropout, written once for every block.

A block calls `enter` before each of its layers and `leave` after it, and never adds or normalises itself:

    change = layer(residual.enter(x))
    x = residual.leave(x, change)
"""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.kernels import dropout, normed_sum
from dragoman.layers.norms import LayerNorm


class Residual(nn.Module):
    """The way around one layer."""

    final_norm = False  # whether a stack of these needs a norm after its last block

    def __init__(self, norm: nn.Module | None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        if norm is not None:
            self.norm = norm

    def enter(self, x: Tensor) -> Tensor:
        """Make the layer's input of the stream (B, T, D)."""
        return x

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Join the layer's output to the stream."""
        raise NotImplementedError

    def add(self, x: Tensor, change: Tensor) -> Tensor:
        """Add a change, some of it dropped in training."""
        return x + self.dropped(change)

    def dropped(self, change: Tensor) -> Tensor:
        """Drop some of a change, in training."""
        return dropout(change, self.dropout) if self.training and self.dropout else change


class PostNorm(Residual):
    """Norm(x + layer(x)): Vaswani et al. (2017), section 3.1; needs a learning rate that rises slowly."""

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Add, then normalise."""
        normed = None
        if self.training and isinstance(self.norm, LayerNorm):
            normed = normed_sum(x, change, self.dropout, self.norm.weight, self.norm.bias, self.norm.eps)
        return self.norm(self.add(x, change)) if normed is None else normed


class PreNorm(Residual):
    """x + layer(Norm(x)), and one norm at the stack's end: Xiong et al. (2020)."""

    final_norm = True

    def enter(self, x: Tensor) -> Tensor:
        """Normalise what the layer sees."""
        return self.norm(x)

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Add."""
        return self.add(x, change)


class Plain(Residual):
    """x + layer(x), without a norm anywhere."""

    def __init__(self, norm: nn.Module | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(None, dropout=dropout)

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Add."""
        return self.add(x, change)


class Scaled(Plain):
    """(x + layer(x)) times the root of a half, without a norm: Gehring et al. (2017), section 3.4.

    Two terms of one variance have a sum of the same. Dropout works on what goes into the layer, as in the released code.
    """

    def enter(self, x: Tensor) -> Tensor:
        """Drop some of what the layer sees, in training."""
        return dropout(x, self.dropout) if self.training and self.dropout else x

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Add and scale."""
        return (x + change) * 0.5**0.5
