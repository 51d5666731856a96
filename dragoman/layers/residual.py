"""How a layer's change is joined to its input: residual, norm and dropout, written once for every block.

A block calls `enter` before each of its layers and `leave` after it, and never adds or normalises itself:

    change = layer(residual.enter(x))
    x = residual.leave(x, change)
"""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.layers.norms import LayerNorm
from dragoman.ops import dropout
from dragoman.ops.fused_norm import dropout_add_norm


class Residual(nn.Module):
    """The way around one layer."""

    final_norm = False  # whether a stack of these needs a norm after its last block

    def __init__(self, norm: nn.Module | None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        if norm is not None:
            self.norm = norm

    def prepare_input(self, x: Tensor) -> Tensor:
        """Make the layer's input of the stream (B, T, D)."""
        return x

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Join the layer's output to the stream."""
        raise NotImplementedError

    def add(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add a change, some of it dropped in training."""
        return x + self.apply_dropout(sublayer_output)

    def apply_dropout(self, sublayer_output: Tensor) -> Tensor:
        """Drop some of a change, in training."""
        return (
            dropout(sublayer_output, self.dropout)
            if self.training and self.dropout
            else sublayer_output
        )


class PostNorm(Residual):
    """Norm(x + layer(x)): Vaswani et al. (2017), section 3.1; needs a learning rate that rises slowly."""

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add, then normalise."""
        normed = None
        if self.training and isinstance(self.norm, LayerNorm):
            normed = dropout_add_norm(
                x, sublayer_output, self.dropout, self.norm.weight, self.norm.bias, self.norm.eps
            )
        return self.norm(self.add(x, sublayer_output)) if normed is None else normed


class PreNorm(Residual):
    """x + layer(Norm(x)), and one norm at the stack's end: Xiong et al. (2020)."""

    final_norm = True

    def prepare_input(self, x: Tensor) -> Tensor:
        """Normalise what the layer sees."""
        return self.norm(x)

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add."""
        return self.add(x, sublayer_output)


class NoNorm(Residual):
    """x + layer(x), without a norm anywhere."""

    def __init__(self, norm: nn.Module | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(None, dropout=dropout)

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add."""
        return self.add(x, sublayer_output)


class ScaledResidual(NoNorm):
    """(x + layer(x)) times the root of a half, without a norm: Gehring et al. (2017), section 3.4.

    Two terms of one variance have a sum of the same. Dropout works on what goes into the layer, as in the released code.
    """

    def prepare_input(self, x: Tensor) -> Tensor:
        """Drop some of what the layer sees, in training."""
        return dropout(x, self.dropout) if self.training and self.dropout else x

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add and scale."""
        return (x + sublayer_output) * 0.5**0.5
