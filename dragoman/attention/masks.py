"""Masks: True means "may be attended to". They come from lengths and positions, never from values."""

from __future__ import annotations

import torch
from torch import Tensor


def from_lengths(lengths: Tensor, size: int | None = None) -> Tensor:
    """Mark the real tokens of sentences (B,) long: a mask (B, S)."""
    size = int(lengths.max()) if size is None else size
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def causal(queries: int, keys: int | None = None, *, device: torch.device | None = None) -> Tensor:
    """Let each position see itself and what came before: (T, S), the queries being the last T of S positions."""
    keys = queries if keys is None else keys
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def local(
    queries: int, keys: int | None = None, *, radius: int, device: torch.device | None = None
) -> Tensor:
    """Let each position see those at most `radius` away: (T, S), the queries being the last T of S positions."""
    keys = queries if keys is None else keys
    reach = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return reach.tril(keys - queries + radius) & reach.triu(keys - queries - radius)


def combine(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Keep what two masks allow, None standing for "everything"."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
