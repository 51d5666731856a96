"""Dropout, from random numbers that cost little: on a CPU many bits at a time, in compiled code a hash of each number's place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_ELEMENTS = 2**31 - 1  # what an int32 counts


def dropout(x: Tensor, rate: float) -> Tensor:
    """Set a share of the numbers to nought and enlarge the others to make up for it.

    A CPU's random numbers are most of the cost: there 64 bits decide about four numbers, the rate rounded to 1 / 65,536. Compiled
    code goes by `hashed_dropout`; on other devices the rest is PyTorch's, and so are rates that round to 0 or 1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"a dropout probability must be from 0 to 1; found {rate}")
    if torch.compiler.is_compiling() and 0 < rate < 1 and x.numel() <= MAX_ELEMENTS:
        return hashed_dropout(x, rate)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    drop_threshold = round(rate * 65_536)
    if not 0 < drop_threshold < 65_536:  # past the ends of an int16 a comparison wraps around
        return F.dropout(x, rate)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep_mask = bits.view(torch.int16)[: x.numel()] >= drop_threshold - 32_768
    return x * keep_mask.to(x.dtype).mul_(65_536 / (65_536 - drop_threshold)).view(x.shape)


def hashed_dropout(x: Tensor, rate: float) -> Tensor:
    """Do the same by a hash of each number's place and of two seeds, which are drawn; the rate is rounded to 1 / 2**32.

    A compiler puts all this into the kernels before and behind it, and on the way back once more: nothing is kept but the seeds.
    What PyTorch draws is kept, a byte for each number, and drawing takes ten rounds of multiplying where this takes two.
    """
    drop_threshold: Tensor = _HashedDropout.apply(x, draw_seeds(x.device), rate)  # type: ignore[no-untyped-call]
    return drop_threshold


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
        return apply_hashed_dropout(x, seeds, rate)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Thin the gradient out alike."""
        (inverted_seeds,) = ctx.saved_tensors
        return apply_hashed_dropout(grad_output, ~inverted_seeds, ctx.rate), None, None


def draw_seeds(device: torch.device) -> Tensor:
    """Draw two numbers between the ends of an int32."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), device=device)


def apply_hashed_dropout(x: Tensor, seeds: Tensor, rate: float) -> Tensor:
    """Keep of the numbers those whose hash is high enough, enlarged to make up for the others."""
    drop_threshold = round(rate * 2**32)
    if drop_threshold >= 2**32:  # past the end of an int32 a comparison wraps around
        return torch.zeros_like(x)
    keep_mask = hash_positions(x.shape, seeds) >= drop_threshold - 2**31
    return torch.where(keep_mask, x * (1 / (1 - rate)), 0.0)


def hash_positions(shape: torch.Size, seeds: Tensor) -> Tensor:
    """Give each place of a tensor an int32 that looks random, by two seeds (2,) between the ends of an int32.

    The mixer is `lowbias32` of Wellons (2018), two multiplications between three shifts. One seed goes in with the place and one
    halfway: with the first alone, two calls could get the same numbers in another order.
    """
    first_seed, second_seed = seeds.to(torch.int32).unbind()
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device) ^ first_seed
    bits = (_xor_shift(bits, 16) * 0x7FEB352D) ^ second_seed
    bits = _xor_shift(_xor_shift(bits, 15) * (0x846CA68B - 2**32), 16)
    return bits.view(shape)


def _xor_shift(bits: Tensor, shift: int) -> Tensor:
    """Put the upper bits onto the lower ones; the sign, which a shift to the right repeats, is cut off."""
    return bits ^ ((bits >> shift) & (2 ** (32 - shift) - 1))
