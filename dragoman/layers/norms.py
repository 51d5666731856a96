"""Norms: put each position's vector on a common scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    r"""Mean nought and deviation one, then a trained scale and shift.

    .. math:: y = g \odot (x - \bar x) / \sqrt{\mathrm{var}(x) + \epsilon} + b

    Ba, Kiros and Hinton (2016).
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, eps=epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each vector of (..., D)."""
        with _keep_input_dtype(x, self.weight):
            return super().forward(x)


class RMSNorm(nn.RMSNorm):
    r"""Root mean square one, then a trained scale; the mean stays.

    .. math:: y = g \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    Zhang and Sennrich (2019).
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, eps=epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Rescale each vector of (..., D)."""
        with _keep_input_dtype(x, self.weight):
            return super().forward(x)


class T5Norm(nn.Module):
    r"""RMSNorm as T5 computes it: no mean, no shift, and the mean square in float32 at least whatever comes in.

    .. math:: y = g \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    Raffel et al. (2020), section 2.1; their epsilon is 1e-6.
    """

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))  # g
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Rescale each vector of (..., D)."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = exact * torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return self.weight * scaled.to(self.weight.dtype)


class ScaleNorm(nn.Module):
    r"""Put each vector on a sphere whose radius, one number for all positions, is trained.

    .. math:: y = g\, x / \max(\lVert x \rVert, \epsilon)

    Nguyen and Salazar (2019), equation 5; g starts at the root of the width, where the sphere's points have RMS one.
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), width**0.5))  # g
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Move each vector of (..., D) onto the sphere."""
        return x * (self.weight / x.norm(dim=-1, keepdim=True).clamp(min=self.epsilon))


class BatchNorm(nn.Module):
    r"""Mean nought and deviation one for each feature over all positions of the batch, padded ones included: to show why not.

    .. math:: y = g \odot (x - \mu_{BT}) / \sqrt{\sigma^2_{BT} + \epsilon} + b

    Ioffe and Szegedy (2015). While training, a sentence's numbers depend on its neighbours, and a position's on its
    future; afterwards running averages of mean and variance stand in. Shen et al. (2020) measure what it costs.
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
        # Not nn.BatchNorm1d: its count of batches, an integer among the weights, could be neither averaged nor cast.
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each feature of (..., D)."""
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


def _keep_input_dtype(x: Tensor, weight: Tensor) -> AbstractContextManager[object]:
    """Keep autocast from widening what has the weights' own type: the kernels sum in float32 by themselves, and the rest is traffic."""
    if x.dtype == torch.float32 or x.dtype != weight.dtype:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
