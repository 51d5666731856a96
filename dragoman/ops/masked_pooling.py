"""Pooling of the real positions of (B, S, D) to (B, D); a mask (B, S) is True at real ones."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_pool(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the sum over the real positions."""
    return x.sum(dim=1) if mask is None else x.masked_fill(~mask.unsqueeze(2), 0.0).sum(dim=1)


def mean_pool(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the real positions; zeros for an empty sequence."""
    if mask is None:
        return x.mean(dim=1)
    return sum_pool(x, mask) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def max_pool(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the maximum of each feature over the real positions; zeros for an empty sequence."""
    if mask is None:
        return x.amax(dim=1)
    lowest = torch.finfo(x.dtype).min
    pooled = x.masked_fill(~mask.unsqueeze(2), lowest).amax(dim=1)
    return pooled.masked_fill(~mask.any(dim=1, keepdim=True), 0.0)
