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


def prefix(length: int, size: int, *, device: torch.device | None = None) -> Tensor:
    """Return the mask (T, T) of a prefix language model over `size` positions.

    The first `length` positions attend to each other in both directions, the others to the whole
    prefix and to what precedes them. Dong et al. (2019), "UniLM".
    """
    return causal(size, device=device) | (torch.arange(size, device=device) < length)


def permuted(ranks: Tensor, *, itself: bool) -> Tensor:
    """Return the mask (B, T, T) of a factorization order; ranks (B, T) are permutations.

    A position attends to those of a lower rank, and to itself if `itself`: the content stream of
    Yang et al. (2019), "XLNet"; without it the query stream, which must not see its own token.
    """
    query, key = ranks.unsqueeze(2), ranks.unsqueeze(1)
    return key <= query if itself else key < query


def combine(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the conjunction of two masks; None allows everything."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
