"""Attention masks; True means that a position may be attended to."""

from __future__ import annotations

import torch
from torch import Tensor


def from_lengths(lengths: Tensor, size: int | None = None) -> Tensor:
    """Return the padding mask (B, S) of sentences of the given lengths (B,)."""
    size = int(lengths.max()) if size is None else size
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(1)


def causal(queries: int, keys: int | None = None, *, device: torch.device | None = None) -> Tensor:
    """Return a causal mask (T, S); the queries are the last T of S positions."""
    keys = queries if keys is None else keys
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def local(
    queries: int, keys: int | None = None, *, radius: int, device: torch.device | None = None
) -> Tensor:
    """Return a mask (T, S) of positions at most `radius` apart; queries are the last T of S."""
    keys = queries if keys is None else keys
    ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return ones.tril(keys - queries + radius) & ones.triu(keys - queries - radius)


def combine(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the conjunction of two masks; None allows everything."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
