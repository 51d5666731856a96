"""Local self-attention in blocks: time and memory grow linearly with the sequence length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.attention import attend

MIN_BLOCK = 64  # queries per block; matmuls of narrower blocks are too small to be efficient


def is_faster_windowed(length: int, radius: int) -> bool:
    """Whether blocks, each with up to three times as many keys as queries, beat a mask."""
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
    r"""Return self-attention of (B, H, T, Dh) in which positions see at most `radius` to each side.

    .. math:: \mathrm{softmax}_{|t - s| \le r}(q_t^\top k_s / \sqrt{d_h})\, v_s

    Vaswani et al. (2017), section 4 and table 1: O(r T) instead of O(T^2). Queries are cut into
    blocks; a block of n attends to the n + 2 r keys around it, or to n + r if it is causal. `mask`,
    broadcastable to (B, 1, T), hides padding. The result equals `attend` under `masks.local`.
    """
    rows, heads, length, width = query.shape
    block, ahead = max(radius, MIN_BLOCK), 0 if causal else radius
    blocks = -(-length // block)
    padding, span = blocks * block - length, radius + block + ahead
    device = query.device

    def key_windows(x: Tensor) -> Tensor:
        """Cut keys or values into overlapping windows: (B * blocks, H, span, Dh)."""
        windows = F.pad(x, (0, 0, radius, padding + ahead)).unfold(2, span, block)
        return windows.permute(0, 2, 1, 4, 3).flatten(0, 1)  # from (B, H, blocks, Dh, span)

    query_blocks = (
        F.pad(query, (0, 0, 0, padding))
        .reshape(rows, heads, blocks, block, width)
        .transpose(1, 2)
        .flatten(0, 1)
    )
    block_positions = torch.arange(block, device=device).unsqueeze(1)
    distance = torch.arange(span, device=device) - radius - block_positions
    near = (distance >= -radius) & (distance <= ahead)  # (block, span)
    real = (
        torch.ones(1, length, dtype=torch.bool, device=device) if mask is None else mask.squeeze(-2)
    )
    real = F.pad(real, (radius, padding + ahead), value=False)
    real = real.unfold(1, span, block)  # (1 or B, blocks, span)
    visible = (near & real.unsqueeze(2)).expand(rows, -1, -1, -1).flatten(0, 1).unsqueeze(1)
    context = attend(  # the mask is (B * blocks, 1, block, span)
        query_blocks, key_windows(key), key_windows(value), mask=visible, dropout=dropout
    )
    context = context.view(rows, blocks, heads, block, value.size(-1)).transpose(1, 2)
    return context.flatten(2, 3)[:, :, :length]
