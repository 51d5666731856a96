"""Finding the largest of many numbers without looking at each of them twice.

On a CPU torch compares one number after another to find where a largest stands, and many at once to find how large it is; on a GPU it
reads a row once for every two bits of a number to find several. So a row is cut into blocks: their maxima, made the quick way, say
which few blocks can hold what is looked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ONE_BLOCK, MANY_BLOCK = 256, 128  # numbers a block, where one is looked for and where several are
LEAST_BLOCKS = 4  # for each number looked for: below that, blocks gain nothing


class Largest(NamedTuple):
    """The largest numbers of each row, and where they stand."""

    values: Tensor
    ids: Tensor


def first_largest(x: Tensor) -> Largest:
    """Find the largest of each row of (N, V), the first of equal ones, NaN above all: (N,) each."""
    rows, width = x.shape
    count = width // ONE_BLOCK
    if x.device.type != "cpu" or count < LEAST_BLOCKS:
        return Largest(*x.max(dim=-1))
    whole = count * ONE_BLOCK
    blocks = x[:, :whole].view(rows, count, ONE_BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)  # the first of equal ones
    found = blocks[torch.arange(rows), block].max(dim=-1)
    values, ids = found.values, block * ONE_BLOCK + found.indices
    if whole == width:
        return Largest(values, ids)
    rest = x[:, whole:].max(dim=-1)
    later = ~(values >= rest.values) & ~values.isnan()
    return Largest(torch.where(later, rest.values, values), torch.where(later, rest.indices + whole, ids))


def largest(x: Tensor, count: int) -> Largest:
    """Find the `count` largest of each row of (N, V), in falling order, any of equal ones: (N, count) each."""
    width = x.size(1)
    number = width // MANY_BLOCK
    if number < LEAST_BLOCKS * count:
        return Largest(*x.topk(count, dim=-1))
    whole = number * MANY_BLOCK
    blocks = x[:, :whole].view(-1, number, MANY_BLOCK)
    # The largest are in the blocks with the largest maxima: as many blocks as numbers hold them all, whatever is equal.
    chosen = blocks.amax(dim=-1).topk(count, dim=-1).indices  # (N, count)
    rows = torch.arange(x.size(0), device=x.device).unsqueeze(1)
    within = blocks[rows, chosen].flatten(1)
    within = torch.cat([within, x[:, whole:]], dim=1) if whole < width else within
    values, places = within.topk(count, dim=-1)
    block = chosen.gather(1, (places // MANY_BLOCK).clamp_(max=count - 1))
    held = count * MANY_BLOCK
    ids = torch.where(places < held, block * MANY_BLOCK + places % MANY_BLOCK, places - held + whole)
    return Largest(values, ids)
