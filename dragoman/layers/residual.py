"""Residual connections around a sublayer, with their norm and dropout: post-norm, pre-norm, others.

A block calls `prepare_input` before each sublayer and `add_output` after it:

    sublayer_output = sublayer(residual.prepare_input(x))
    x = residual.add_output(x, sublayer_output)
"""

from __future__ import annotations

from torch import Tensor, nn

from dragoman import ops
from dragoman.layers.norms import LayerNorm


class Residual(nn.Module):
    """The residual connection around one sublayer."""

    final_norm = False  # whether a stack of these needs a norm after its last block
    cuda_graphs = False  # whether CUDA graphs replay this layer; set by the trainer
    locked = False  # whether all positions of a sequence share a dropout mask

    def __init__(self, norm: nn.Module | None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        if norm is not None:
            self.norm = norm

    def prepare_input(self, x: Tensor) -> Tensor:
        """Return the sublayer's input for the residual stream (B, T, D)."""
        return x

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add the sublayer's output, with dropout, to the residual stream (B, T, D)."""
        return x + self.apply_dropout(sublayer_output)

    def apply_dropout(self, x: Tensor) -> Tensor:
        """Apply this connection's dropout to (B, T, D), in training."""
        if self.locked:
            return ops.locked_dropout(x, self.dropout, training=self.training)
        return ops.dropout(x, self.dropout, training=self.training)


class PostNorm(Residual):
    """Norm(x + sublayer(x)): Vaswani et al. (2017), section 3.1; needs learning-rate warm-up."""

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add the sublayer's output, then normalize."""
        if self.locked or not isinstance(self.norm, LayerNorm):
            return self.norm(super().add_output(x, sublayer_output))
        return ops.dropout_add_norm(
            x,
            sublayer_output,
            self.dropout,
            self.norm.weight,
            self.norm.bias,
            self.norm.eps,
            training=self.training,
            cuda_graphs=self.cuda_graphs,
        )


class PreNorm(Residual):
    """x + sublayer(Norm(x)), and one norm after the stack: Xiong et al. (2020)."""

    final_norm = True

    def prepare_input(self, x: Tensor) -> Tensor:
        """Normalize the sublayer's input."""
        return self.norm(x)


class NoNorm(Residual):
    """x + sublayer(x), without a norm."""

    def __init__(self, norm: nn.Module | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(None, dropout=dropout)


class ScaledResidual(NoNorm):
    """(x + sublayer(x)) * sqrt(1/2), without a norm: Gehring et al. (2017), section 3.4.

    The sum of two terms of equal variance keeps that variance. Dropout is applied to the sublayer's
    input, as in the released code.
    """

    def prepare_input(self, x: Tensor) -> Tensor:
        """Apply dropout to the sublayer's input."""
        return self.apply_dropout(x)

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Add and scale."""
        return (x + sublayer_output) * 0.5**0.5


class NoResidual(NoNorm):
    """sublayer(x): no residual connection and no norm."""

    def add_output(self, x: Tensor, sublayer_output: Tensor) -> Tensor:
        """Return the sublayer's output, with dropout."""
        return self.apply_dropout(sublayer_output)
