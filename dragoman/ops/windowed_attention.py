"""Self-attention restricted to neighbours, in time and memory that grow with the length instead of with its square."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops import attend

MIN_BLOCK = (
    64  # queries that are looked up together: products of narrower blocks are too small to be quick
)


def is_faster_windowed(length: int, radius: int) -> bool:
    """Say whether a sequence is long enough for blocks, each of which sees up to three times its own size."""
    return length > 3 * max(radius, MIN_BLOCK)


def attend_windowed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    radius: int,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    r"""Scaled dot-product attention of (B, H, T, Dh) to itself, each position to those at most `radius` away.

    .. math:: \mathrm{softmax}_{|t - s| \le r}(q_t^\top k_s / \sqrt{d_h})\, v_s

    Vaswani et al. (2017), section 4 and table 1: O(r T) in place of O(T^2). Queries are cut into blocks; a block of n sees the n + 2 r
    keys around it, or n + r where it may not look ahead. `mask`, broadcastable to (B, 1, T), hides padding. The same numbers as
    `attend` under `masks.local`.
    """
    rows, heads, length, width = query.shape
    block, ahead = max(radius, MIN_BLOCK), 0 if causal else radius
    blocks = -(-length // block)
    rest, seen = blocks * block - length, radius + block + ahead

    def neighbourhoods(x: Tensor) -> Tensor:
        """Cut keys or values into overlapping pieces: (B, H, T, Dh) gives (B * blocks, H, seen, Dh)."""
        pieces = F.pad(x, (0, 0, radius, rest + ahead)).unfold(
            2, seen, block
        )  # (B, H, blocks, Dh, seen)
        return pieces.permute(0, 2, 1, 4, 3).flatten(0, 1)

    queries = (
        F.pad(query, (0, 0, 0, rest))
        .reshape(rows, heads, blocks, block, width)
        .transpose(1, 2)
        .flatten(0, 1)
    )
    distance = (
        torch.arange(seen, device=query.device)
        - radius
        - torch.arange(block, device=query.device).unsqueeze(1)
    )
    near = (distance >= -radius) & (distance <= ahead)  # (block, seen)
    real = (
        torch.ones(1, length, dtype=torch.bool, device=query.device)
        if mask is None
        else mask.squeeze(-2)
    )
    real = F.pad(real, (radius, rest + ahead), value=False).unfold(
        1, seen, block
    )  # (1 or B, blocks, seen)
    visible = (
        (near & real.unsqueeze(2)).expand(rows, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    )  # (B * blocks, 1, block, seen)
    found = attend(
        queries, neighbourhoods(key), neighbourhoods(value), mask=visible, dropout=dropout
    )
    return (
        found.view(rows, blocks, heads, block, width).transpose(1, 2).flatten(2, 3)[:, :, :length]
    )
