"""What a query may see, and how its attention is spread over that."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Spread each row over the places where the mask is True; a row without any gets zeros."""
    if mask is None:
        return scores.softmax(dim=-1)
    # The lowest finite number, not -inf: a row with no place left must not turn NaN on its
    # way to zero, for autograd's anomaly detection would stop there.
    hidden = ~mask
    lowest = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return lowest.softmax(dim=-1).masked_fill(hidden, 0.0)


def visibility(queries: int, keys: int, mask: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """Put a mask and causality together, broadcastable to (B, H, T, S); None when everything is visible."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if not causal or queries == 1:  # the last position sees all
        return mask
    past = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return past if mask is None else mask & past
