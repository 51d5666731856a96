r"""Angular hashing: vectors that point alike fall into one bucket, and a sequence is put into the order of its buckets.

.. math:: h(x) = \arg\max\, [x R; -x R]

with R random, (d, b / 2): Andoni et al. (2015), as in Kitaev et al. (2020). Many buckets are the product of two hashes
with few each, as in the released code of the Reformer (google/trax), or the product with R would cost more than the attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Sorted(NamedTuple):
    """Tokens of all sequences, N = B * H * T, put into the order of their buckets, in each of R rounds."""

    order: Tensor  # (R, N): the token at each place of the order
    where: Tensor  # (R, N): the place of each token in the order
    codes: Tensor  # (R, N): of each token its place, with gaps between buckets that are wider than the window


def hash_vectors(x: Tensor, rotations: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Find the buckets (R, B, H, T) of vectors (B, H, T, d) by rotations (H, d, R, K), K half the sum of `parts`."""
    heads, width, rounds, size = rotations.shape
    turned = (x @ rotations.to(x.dtype).view(heads, width, rounds * size)).view(*x.shape[:-1], rounds, size)  # (B, H, T, R, K)
    buckets, scale = None, 1
    for part, half in zip(parts, turned.split_with_sizes([part // 2 for part in parts], dim=-1), strict=True):
        # The largest of a vector and its negative is where the magnitude is largest, on the side that its sign says.
        best = half.abs().argmax(dim=-1, keepdim=True)
        best = (best + (half.gather(-1, best) < 0) * (part // 2)).squeeze(-1)
        buckets = best if buckets is None else buckets + scale * best
        scale *= part
    assert buckets is not None, "there must be at least one hash"
    return buckets.permute(3, 0, 1, 2)


def sort_by_bucket(buckets: Tensor, window: int) -> Sorted:
    """Put tokens (R, B, H, T) into the order of (bucket, place) within each sequence, one sequence after the other."""
    rounds, _, _, length = buckets.shape
    found, order = buckets.reshape(rounds, -1, length).sort(dim=-1, stable=True)  # (R, B * H, T)
    new = F.pad(found[..., 1:] != found[..., :-1], (1, 0), value=True)  # the first of each bucket, and of each sequence
    order = (order + torch.arange(0, order.size(1) * length, length, device=order.device).unsqueeze(-1)).flatten(1)
    places = torch.arange(order.size(1), device=order.device)
    small = order.size(1) * (window + 2) < 2**31  # more than the last code
    codes = (places + new.flatten(1).cumsum(dim=-1) * (window + 1)).to(torch.int32 if small else torch.int64)
    where = torch.empty_like(order).scatter_(1, order, places.expand_as(order))
    return Sorted(order, where, codes.gather(1, where))
