"""Dropout, from random numbers that cost little: on a CPU many bits at a time, in compiled code a hash of each number's place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PLACES = 2**31 - 1  # what an int32 counts


def dropout(x: Tensor, rate: float) -> Tensor:
    """Set a share of the numbers to nought and enlarge the others to make up for it.

    A CPU's random numbers are most of the cost: there 64 bits decide about four numbers, the rate rounded to 1 / 65,536. Compiled
    code goes by `hashed_dropout`; on other devices the rest is PyTorch's, and so are rates that round to 0 or 1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"a dropout probability must be from 0 to 1; found {rate}")
    if torch.compiler.is_compiling() and 0 < rate < 1 and x.numel() <= PLACES:
        return hashed_dropout(x, rate)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    dropped = round(rate * 65_536)
    if not 0 < dropped < 65_536:  # past the ends of an int16 a comparison wraps around
        return F.dropout(x, rate)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = bits.view(torch.int16)[: x.numel()] >= dropped - 32_768
    return x * kept.to(x.dtype).mul_(65_536 / (65_536 - dropped)).view(x.shape)


def hashed_dropout(x: Tensor, rate: float) -> Tensor:
    """Do the same by a hash of each number's place and of two seeds, which are drawn; the rate is rounded to 1 / 2**32.

    A compiler puts all this into the kernels before and behind it, and on the way back once more: nothing is kept but the seeds.
    What PyTorch draws is kept, a byte for each number, and drawing takes ten rounds of multiplying where this takes two.
    """
    dropped: Tensor = _HashedDropout.apply(x, draw_seeds(x.device), rate)  # type: ignore[no-untyped-call]
    return dropped


class _HashedDropout(torch.autograd.Function):
    """The same noughts on the way back, found again from the seeds.

    They are kept inverted: in a compiler's eyes both ways then compute different things, or it would see that they are the same
    and keep them, which in a graph of several layers it does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seeds: Tensor, rate: float) -> Tensor:
        """Keep the seeds, and of the numbers those whose hash is high enough."""
        ctx.save_for_backward(~seeds)
        ctx.rate = rate
        return thin(x, seeds, rate)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        """Thin the gradient out alike."""
        (inverted,) = ctx.saved_tensors
        return thin(outer, ~inverted, ctx.rate), None, None


def draw_seeds(device: torch.device) -> Tensor:
    """Draw two numbers between the ends of an int32."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), device=device)


def thin(x: Tensor, seeds: Tensor, rate: float) -> Tensor:
    """Keep of the numbers those whose hash is high enough, enlarged to make up for the others."""
    dropped = round(rate * 2**32)
    if dropped >= 2**32:  # past the end of an int32 a comparison wraps around
        return torch.zeros_like(x)
    kept = hash_places(x.shape, seeds) >= dropped - 2**31
    return torch.where(kept, x * (1 / (1 - rate)), 0.0)


def hash_places(shape: torch.Size, seeds: Tensor) -> Tensor:
    """Give each place of a tensor an int32 that looks random, by two seeds (2,) between the ends of an int32.

    The mixer is `lowbias32` of Wellons (2018), two multiplications between three shifts. One seed goes in with the place and one
    halfway: with the first alone, two calls could get the same numbers in another order.
    """
    first, second = seeds.to(torch.int32).unbind()
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device) ^ first
    bits = (_folded(bits, 16) * 0x7FEB352D) ^ second
    bits = _folded(_folded(bits, 15) * (0x846CA68B - 2**32), 16)
    return bits.view(shape)


def _folded(bits: Tensor, by: int) -> Tensor:
    """Put the upper bits onto the lower ones; the sign, which a shift to the right repeats, is cut off."""
    return bits ^ ((bits >> by) & (2 ** (32 - by) - 1))
