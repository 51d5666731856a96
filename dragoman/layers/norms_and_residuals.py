"""Normalization layers, and residual connections with their norm: post-norm, pre-norm, others.

A block calls the `prepare_input` of a residual connection before each sublayer and its `add_output`
after it:

    sublayer_output = sublayer(residual.prepare_input(x))
    x = residual.add_output(x, sublayer_output)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops


class LayerNorm(nn.LayerNorm):
    r"""Layer normalization: zero mean and unit variance, then a trained scale and shift.

    .. math:: y = g \odot (x - \bar x) / \sqrt{\mathrm{var}(x) + \epsilon} + b

    Ba, Kiros and Hinton (2016).
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, eps=epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each vector of (..., D)."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    r"""RMS normalization: unit root mean square, then a trained scale; no centering.

    .. math:: y = g \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    Zhang and Sennrich (2019).
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, eps=epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each vector of (..., D)."""
        return ops.rms_norm(x, self.weight, self.eps)


class T5Norm(nn.Module):
    r"""RMSNorm as T5 computes it: the mean square in float32 at least, whatever the input's dtype.

    .. math:: y = g \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    Raffel et al. (2020), section 2.1; their epsilon is 1e-6.
    """

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))  # g
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each vector of (..., D)."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return self.weight * scaled.to(self.weight.dtype)


class ScaleNorm(nn.Module):
    r"""Scaled L2 normalization with one trained length for all positions.

    .. math:: y = g\, x / \max(\lVert x \rVert, \epsilon)

    Nguyen and Salazar (2019), equation 5; g starts at the square root of the
    width, where vectors have an RMS of one.
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), width**0.5))  # g
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each vector of (..., D)."""
        return x * (self.weight / x.norm(dim=-1, keepdim=True).clamp(min=self.epsilon))


class BatchNorm(nn.Module):
    r"""Batch normalization over all positions, padding included; for comparison only.

    .. math:: y = g \odot (x - \mu_{BT}) / \sqrt{\sigma^2_{BT} + \epsilon} + b

    Ioffe and Szegedy (2015). In training a sentence depends on the other sentences of its batch and
    a position on its future; evaluation uses running averages of mean and variance. Shen et al.
    (2020) measure the cost.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int, epsilon: float = 1e-5, *, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.zeros(width)),
        )  # g, b
        self.epsilon, self.momentum = epsilon, momentum
        # Not nn.BatchNorm1d: its integer counter in the state_dict could be neither averaged nor
        # cast.
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each feature of (..., D)."""
        rows = x.flatten(0, -2)
        batch = self.training and rows.size(0) > 1  # one vector has no variance
        normed = F.batch_norm(
            rows,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            batch,
            self.momentum,
            self.epsilon,
        )
        return normed.view(x.shape)


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
