"""A stream plus a layer's change, some of it dropped, under a layer norm: in compiled training on a GPU.

The way forward is left to the compiler, which makes one kernel of it. On the way back it makes six: the norm's gradient, its dropped
form, and for scale and shift a sum each, by PyTorch's own kernel, and a rounding. Here all that is one pass of Triton's
(`normed_rows.py`) and a sum of what the runs of rows add up to. For a compiler it is one operator, `dragoman::normed_sum_backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.kernels.dropout import PLACES, draw_seeds, thin
from dragoman.kernels.guarding import Guarded
from dragoman.kernels.short_attention import replays

NORMED = Guarded("the kernel for gradients of norms")
WIDTHS = (128, 256, 512, 1024)  # a row lies in one warp's registers
RUNS = 512  # of rows, summed apart: four programs for each processor of an H200, nearly all of which run at once
COMPARED = 256  # rows, the first time


def normed_sum(x: Tensor, change: Tensor, rate: float, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor | None:
    """Give the layer norm of (B, T, D) plus a change of which `rate` is dropped; None where that is better left to PyTorch's layers."""
    if not _may(x) or not 0 < rate < 1 or x.numel() > PLACES or not x.dtype == change.dtype == weight.dtype == bias.dtype:
        return None
    normed: Tensor = _NormedSum.apply(x, change, draw_seeds(x.device), weight, bias, rate, epsilon)  # type: ignore[no-untyped-call]
    return normed


def _may(x: Tensor) -> bool:
    """Ask for a compiler, for a GPU that replays its launches, and for half precision."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.compiler.is_compiling() and NORMED.tries(x) and replays() and half and x.size(-1) in WIDTHS


class _NormedSum(torch.autograd.Function):
    """The sum is kept, and the seeds inverted, as `dropout.py` keeps them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Tensor, seeds: Tensor, weight: Tensor, bias: Tensor, rate: float, epsilon: float) -> Tensor:
        """Drop, add, normalise."""
        total = (x + thin(change, seeds, rate)).contiguous()
        ctx.save_for_backward(total, ~seeds, weight)
        ctx.rate, ctx.epsilon = rate, epsilon
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(total, weight.shape, weight, bias, epsilon)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of both summands, and those of scale and shift."""
        total, inverted, weight = ctx.saved_tensors
        operator = torch.ops.dragoman.normed_sum_backward
        grad, thinned, sums = operator(outer.contiguous(), total, ~inverted, weight, ctx.rate, ctx.epsilon)
        scale, shift = sums.sum(dim=0).to(weight.dtype).unbind()
        return grad, thinned, None, scale, shift, None, None


def _backward(outer: Tensor, total: Tensor, seeds: Tensor, weight: Tensor, rate: float, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradient of the sum, what of it the change gets, and the gradients of scale and shift by runs of rows: (RUNS, 2, D)."""

    def fast() -> tuple[Tensor, Tensor, Tensor]:
        from dragoman.kernels import normed_rows

        found = _like(outer, total)
        normed_rows.differentiate(outer, total, seeds, weight, *found, rate=rate, epsilon=epsilon)
        return found

    def plain() -> tuple[Tensor, Tensor, Tensor]:
        return _by_equations(outer, total, seeds, weight, rate, epsilon)

    def seen_as(made: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        return made[0].flatten(0, -2)[-COMPARED:], made[1].flatten(0, -2)[-COMPARED:], *made[2].sum(dim=0).unbind()

    if not NORMED.tries(outer):
        return plain()
    return NORMED.run((outer.dtype, outer.size(-1)), fast, plain, seen_as=seen_as)


def _by_equations(
    outer: Tensor, total: Tensor, seeds: Tensor, weight: Tensor, rate: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same step by step, in float32 at least."""
    _, thinned, sums = _like(outer, total)
    wide, along = total.to(sums.dtype), outer.to(sums.dtype)
    centred = wide - wide.mean(dim=-1, keepdim=True)
    inverse = (centred.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    normal, scaled = centred * inverse, along * weight
    grad = inverse * (scaled - scaled.mean(dim=-1, keepdim=True) - normal * (scaled * normal).mean(dim=-1, keepdim=True))
    grad = grad.to(total.dtype)
    thinned.copy_(thin(grad, seeds, rate))
    sums.zero_()
    sums[0, 0], sums[0, 1] = (along * normal).flatten(0, -2).sum(dim=0), along.flatten(0, -2).sum(dim=0)
    return grad, thinned, sums


def _like(outer: Tensor, total: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(outer.dtype, torch.float32)
    return torch.empty_like(total), torch.empty_like(total), total.new_empty(RUNS, 2, total.size(-1), dtype=wide)


_operator = torch.library.custom_op(
    "dragoman::normed_sum_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor outer, Tensor total, Tensor seeds, Tensor weight, float rate, float epsilon) -> (Tensor, Tensor, Tensor)",
)
_operator.register_fake(_like)
