"""Normalization layers: LayerNorm, RMSNorm, T5's norm, ScaleNorm and BatchNorm."""

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
