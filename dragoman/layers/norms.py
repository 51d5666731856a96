"""Norms: put each position's vector on a common scale."""

from __future__ import annotations

from torch import nn


class LayerNorm(nn.LayerNorm):
    r"""Mean nought and deviation one, then a trained scale and shift.

    .. math:: y = g \odot (x - \bar x) / \sqrt{\mathrm{var}(x) + \epsilon} + b

    Ba, Kiros and Hinton (2016).
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, eps=epsilon)


class RMSNorm(nn.RMSNorm):
    r"""Root mean square one, then a trained scale; the mean stays.

    .. math:: y = g \odot x / \sqrt{\mathrm{mean}(x^2) + \epsilon}

    Zhang and Sennrich (2019).
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, eps=epsilon)
