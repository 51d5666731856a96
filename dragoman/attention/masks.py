"""Attention masks for any model; True means that a position may be attended to.

Dragoman's self-attention makes its causal mask in `ops/attention.py`: `build_attention_mask`, or
`is_causal` of PyTorch's kernel in `attend`. Padding masks of a batch are `Batch.src_mask` and
`tgt_mask` in `data/collate.py`.
"""

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


def permuted(ranks: Tensor) -> Tensor:
    """Return the mask (B, T, T) of a factorization order, given the rank (B, T) of each position.

    A position attends to itself and to those of a lower or equal rank. Ranks that increase from
    left to right give the causal mask, equal ones a bidirectional mask.
    """
    return ranks.unsqueeze(1) <= ranks.unsqueeze(2)


def two_stream(ranks: Tensor, query_ranks: Tensor) -> Tensor:
    """Return the mask (B, T + P, T + P) of XLNet's two streams in one sequence.

    The content stream, the first T positions, attends to itself as in `permuted`. The P positions
    of the query stream attend to content of a strictly lower rank, so not to the token that they
    predict; nothing attends to them. Yang et al. (2019), figure 1.
    """
    key = ranks.unsqueeze(1)
    content = torch.cat([permuted(ranks), key < query_ranks.unsqueeze(2)], dim=1)  # (B, T + P, T)
    return torch.nn.functional.pad(content, (0, query_ranks.size(1)), value=False)


def combine(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the conjunction of two masks; None allows everything."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
