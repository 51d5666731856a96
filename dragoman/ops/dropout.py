"""Dropout with cheap random bits: 16 per element on CPUs, hashed positions when compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_ELEMENTS = 2**31 - 1  # the hash counts elements in int32


def dropout(x: Tensor, p: float, *, training: bool = True) -> Tensor:
    """Zero elements with probability `p` and scale the others by 1 / (1 - p), in training.

    On a CPU, drawing random numbers is most of the cost: 64 random bits decide about four elements,
    and `p` is rounded to 1 / 65,536. Under torch.compile it is `hashed_dropout`. Everything else is
    PyTorch's, and so are probabilities that round to 0 or 1.
    """
    if not training or not p:
        return x
    if not 0 <= p <= 1:
        raise ValueError(f"a dropout probability must be from 0 to 1; found {p}")
    if torch.compiler.is_compiling() and 0 < p < 1 and x.numel() <= MAX_ELEMENTS:
        return hashed_dropout(x, p)
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    drop_threshold = round(p * 65_536)
    if not 0 < drop_threshold < 65_536:  # past the ends of int16 the comparison would wrap around
        return F.dropout(x, p)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep_mask = bits.view(torch.int16)[: x.numel()] >= drop_threshold - 32_768
    return x * keep_mask.to(x.dtype).mul_(65_536 / (65_536 - drop_threshold)).view(x.shape)


def locked_dropout(x: Tensor, p: float, *, training: bool = True) -> Tensor:
    """Apply one dropout mask (B, 1, D) to all positions of (B, T, D), in training.

    Variational dropout, Gal and Ghahramani (2016).
    """
    if not training or not p:
        return x
    return x * dropout(torch.ones_like(x[:, :1]), p)


def hashed_dropout(x: Tensor, p: float) -> Tensor:
    """Return dropout decided by a hash of each position and two random seeds; p to 1 / 2**32.

    torch.compile fuses the hash into the kernels around it, and again into the backward pass, so
    only the seeds are saved. PyTorch's dropout saves a byte per element, and its generator takes
    ten rounds of multiplication instead of two.
    """
    dropped: Tensor = _HashedDropout.apply(x, draw_seeds(x.device), p)  # type: ignore[no-untyped-call]
    return dropped


class _HashedDropout(torch.autograd.Function):
    """Recomputes the mask from the seeds in the backward pass.

    The seeds are saved inverted. Otherwise torch.compile would find that forward and backward pass
    compute the same mask and save it, which it does in a graph of several layers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seeds: Tensor, p: float) -> Tensor:
        """Save the seeds and apply the mask."""
        ctx.save_for_backward(~seeds)
        ctx.p = p
        return apply_hashed_dropout(x, seeds, p)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Apply the same mask to the gradient."""
        (inverted_seeds,) = ctx.saved_tensors
        return apply_hashed_dropout(grad_output, ~inverted_seeds, ctx.p), None, None


def draw_seeds(device: torch.device) -> Tensor:
    """Draw two seeds in the range of int32: (2,)."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), device=device)


def apply_hashed_dropout(x: Tensor, seeds: Tensor, p: float) -> Tensor:
    """Keep elements whose hash reaches the threshold, scaled by 1 / (1 - p); zero the others."""
    drop_threshold = round(p * 2**32)
    if drop_threshold >= 2**32:  # past the end of int32 the comparison would wrap around
        return torch.zeros_like(x)
    keep_mask = hash_positions(x.shape, seeds) >= drop_threshold - 2**31
    return torch.where(keep_mask, x * (1 / (1 - p)), 0.0)


def hash_positions(shape: torch.Size, seeds: Tensor) -> Tensor:
    """Return a pseudo-random int32 for each position of a tensor, from two seeds (2,).

    The hash is `lowbias32` of Wellons (2018): two multiplications between three shifts. One seed is
    mixed in with the position and one halfway: with the first alone, two calls could get the same
    bits in another order.
    """
    first_seed, second_seed = seeds.to(torch.int32).unbind()
    bits = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device) ^ first_seed
    bits = (_xor_shift(bits, 16) * 0x7FEB352D) ^ second_seed
    bits = _xor_shift(_xor_shift(bits, 15) * (0x846CA68B - 2**32), 16)
    return bits.view(shape)


def _xor_shift(bits: Tensor, shift: int) -> Tensor:
    """XOR the upper bits onto the lower ones, with a logical shift (without the sign bit)."""
    return bits ^ ((bits >> shift) & (2 ** (32 - shift) - 1))
