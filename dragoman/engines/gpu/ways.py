"""The way around a layer, over a stream in float32: what `layers/residual.py` does on leaving one and on entering the next, at once."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dragoman.kernels.joining import Joined, Scale, join
from dragoman.layers.norms import LayerNorm, RMSNorm
from dragoman.layers.residual import Plain, PostNorm, PreNorm, Residual


class Way:
    """A copy of the way around one layer, in float32 whatever the model's weights are kept in."""

    def __init__(self, residual: Residual, dtype: torch.dtype) -> None:
        self._residual = copy.deepcopy(residual).float().eval()
        self._dtype = dtype
        scale = _scale(getattr(self._residual, "norm", None))
        self._on_entering = scale if type(residual) is PreNorm else None  # what may be computed with the sum before it
        self._on_leaving = scale if type(residual) is PostNorm else None
        self._adds = type(residual) in (PreNorm, Plain)

    @classmethod
    def out(cls, norm: nn.Module | None, dtype: torch.dtype) -> Way:
        """Make what stands behind a stack: its last norm, if it has one."""
        return cls(Plain() if norm is None else PreNorm(norm), dtype)

    def begin(self, x: Tensor) -> Joined:
        """Enter the first layer."""
        x = x.contiguous()
        if self._on_entering is not None:
            return join(x, None, self._on_entering, self._dtype, after=False)
        return Joined(x, self._entering(x))

    def leave(self, x: Tensor, change: Tensor, then: Way) -> Joined:
        """Join what a product made to the stream (..., D), and make what the next one, behind another way, reads of it."""
        if self._adds and then._on_entering is not None:
            return join(x, change, then._on_entering, self._dtype, after=False)
        if self._on_leaving is not None and type(then._residual) in (PostNorm, Plain):
            return join(x, change, self._on_leaving, self._dtype, after=True)
        x = self._residual.leave(x, change)
        return Joined(x, then._entering(x))

    def _entering(self, x: Tensor) -> Tensor:
        """Make what a product reads of the stream."""
        entering: Tensor = self._residual.enter(x).to(self._dtype)
        return entering


def _scale(norm: nn.Module | None) -> Scale | None:
    """Read a norm that can be computed with the sum before it; None for others."""
    if type(norm) is LayerNorm and norm.weight is not None:
        return Scale(norm.weight.detach(), norm.bias.detach(), norm.eps, True)
    if type(norm) is RMSNorm and norm.weight is not None and norm.eps is not None:
        return Scale(norm.weight.detach(), None, norm.eps, False)
    return None
