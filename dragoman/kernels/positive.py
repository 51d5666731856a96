"""A product with its bias and the positive part of it, max(0, x W + b), in training on a GPU.

On the way forward cuBLAS adds the bias and cuts off in the product itself, so the wide tensor is written once. On the way back one
kernel of Triton's (`positive_rows.py`) stops the gradient where nothing came through and sums it for the bias while it is at hand. What
came through is kept for the next product anyway, so no mask is. For a compiler these are two operators, `dragoman::positive_linear`
and `dragoman::stopped`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.kernels.guarding import Guarded
from dragoman.kernels.short_attention import replays

POSITIVE = Guarded("the kernel for positive parts")
COMPARED = 256  # rows, the first time
RUNS = 256  # of rows, whose gradients are summed apart: for any number of rows as many, which a compiler likes


def positive_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Give max(0, x W^T + b) of (..., D) and (F, D): (..., F); None where that is better left to PyTorch's layers."""
    if bias is None or not _may(x) or not x.dtype == weight.dtype == bias.dtype:
        return None
    positive: Tensor = torch.ops.dragoman.positive_linear(x.flatten(0, -2), weight, bias)
    return positive.view(*x.shape[:-1], weight.size(0))


def positive_linear_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Do what `positive_linear` does by PyTorch's layers."""
    return F.linear(x, weight, bias).relu()


def _may(x: Tensor) -> bool:
    """Ask for a GPU that replays its launches, and for half precision."""
    return POSITIVE.tries(x) and replays() and x.numel() > 0 and x.dtype in (torch.bfloat16, torch.float16)


def _forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Have cuBLAS do all three at once."""

    def fast() -> tuple[Tensor]:
        return (torch._addmm_activation(bias, x, weight.T, use_gelu=False),)

    def plain() -> tuple[Tensor]:
        return (positive_linear_reference(x, weight, bias),)

    if not POSITIVE.tries(x):
        return plain()[0]
    return POSITIVE.run(("forward", x.dtype, *weight.shape), fast, plain, seen_as=lambda made: (made[0][-COMPARED:],))[0]


def _stopped(outer: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Put noughts into a gradient (N, F) where none came through, and sum it over each run of rows: (RUNS, F), in float32 at least."""

    def fast() -> tuple[Tensor, Tensor]:
        from dragoman.kernels import positive_rows

        found = _stopped_like(outer, positive)
        positive_rows.stop(outer.contiguous(), positive, *found)
        return found

    def plain() -> tuple[Tensor, Tensor]:
        stopped, sums = torch.where(positive <= 0, 0.0, outer), _stopped_like(outer, positive)[1].zero_()
        torch.sum(stopped, dim=0, dtype=sums.dtype, out=sums[0])
        return stopped, sums

    def seen_as(made: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return made[0][-COMPARED:], made[1].sum(dim=0)

    if not POSITIVE.tries(outer):
        return plain()
    return POSITIVE.run(("stopped", outer.dtype, outer.size(1)), fast, plain, seen_as=seen_as)


def _stopped_like(outer: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(outer.dtype, torch.float32)
    return torch.empty_like(positive), positive.new_empty(RUNS, positive.size(1), dtype=wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the products need, and what came through."""
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _differentiate(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, positive = ctx.saved_tensors
    stopped, sums = torch.ops.dragoman.stopped(outer, positive)
    return stopped @ weight, stopped.T @ x, sums.sum(dim=0).to(outer.dtype)


_operator = torch.library.custom_op(
    "dragoman::positive_linear", _forward, mutates_args=(), schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor"
)
_operator.register_fake(lambda x, weight, bias: x.new_empty(x.size(0), weight.size(0)))
_operator.register_autograd(_differentiate, setup_context=_keep)
_stopped_operator = torch.library.custom_op(
    "dragoman::stopped", _stopped, mutates_args=(), schema="(Tensor outer, Tensor positive) -> (Tensor, Tensor)"
)
_stopped_operator.register_fake(_stopped_like)
