"""Masked softmax, and the attention mask made from a padding mask and causality."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Spread each row over the places where the mask is True; a row without any gets zeros."""
    if mask is None:
        return scores.softmax(dim=-1)
    # The lowest finite number, not -inf: a row with no place left must not turn NaN on its
    # way to zero, for autograd's anomaly detection would stop there.
    masked_out = ~mask
    masked_scores = scores.masked_fill(masked_out, torch.finfo(scores.dtype).min)
    return masked_scores.softmax(dim=-1).masked_fill(masked_out, 0.0)


def build_attention_mask(
    num_queries: int, num_keys: int, mask: Tensor | None, causal: bool, device: torch.device
) -> Tensor | None:
    """Put a mask and causality together, broadcastable to (B, H, T, S); None when everything is visible."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if not causal or num_queries == 1:  # the last position sees all
        return mask
    causal_mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(
        num_keys - num_queries
    )
    return causal_mask if mask is None else mask & causal_mask
