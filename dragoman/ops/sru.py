"""The sequential part of SRU: a gated recurrence of elementwise operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dragoman.ops.verified_kernel_fallback import GuardedKernel

_kernel = GuardedKernel("the SRU recurrence")


def sru_scan(candidate: Tensor, forget: Tensor, recurrent: Tensor, initial: Tensor) -> Tensor:
    r"""Return the cells (B, T, D) of Lei et al. (2018), equations 1 and 2.

    .. math:: f_t = \sigma(a_t + v \odot c_{t-1}), \quad
        c_t = f_t \odot c_{t-1} + (1 - f_t) \odot u_t

    `candidate` u and `forget` a are (B, T, D), `recurrent` v is (D,), `initial` (B, D). Half
    precision is computed in float32.
    """
    dtype = torch.promote_types(candidate.dtype, torch.float32)
    arguments = (each.to(dtype) for each in (candidate, forget, recurrent, initial))
    cells: Tensor = _SRUScan.apply(*arguments)  # type: ignore[no-untyped-call]
    return cells


class _SRUScan(torch.autograd.Function):
    """The recurrence and its gradient, a loop over positions each; one kernel each on a GPU."""

    @staticmethod
    def forward(
        ctx: Any, candidate: Tensor, forget: Tensor, recurrent: Tensor, initial: Tensor
    ) -> Tensor:
        """Return the cells (B, T, D)."""
        arguments = [each.contiguous() for each in (candidate, forget, recurrent, initial)]

        def fused() -> tuple[Tensor]:
            from dragoman.ops.triton.sru_kernel import sru_forward

            return (sru_forward(*arguments),)

        cells = (
            _kernel.run(("forward", candidate.size(2)), fused, lambda: (_forward(*arguments),))[0]
            if _kernel.can_run(candidate) and candidate.dtype == torch.float32
            else _forward(*arguments)
        )
        ctx.save_for_backward(*arguments, cells)
        return cells

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of candidate, forget, recurrent and initial."""
        candidate, forget, recurrent, initial, cells = ctx.saved_tensors
        before = torch.cat([initial.unsqueeze(1), cells[:, :-1]], dim=1)  # (B, T, D)
        gates = torch.sigmoid(forget + recurrent * before)
        # d c_t / d c_{t-1}, and what reaches the forget gate: both without the recurrence.
        to_forget = (before - candidate) * gates * (1 - gates)
        through = gates + to_forget * recurrent
        arguments = (grad.contiguous(), through)

        def fused() -> tuple[Tensor]:
            from dragoman.ops.triton.sru_kernel import linear_scan_backward

            return (linear_scan_backward(*arguments),)

        grad_cells = (
            _kernel.run(("backward", grad.size(2)), fused, lambda: (_backward(*arguments),))[0]
            if _kernel.can_run(grad) and grad.dtype == torch.float32
            else _backward(*arguments)
        )
        grad_forget = grad_cells * to_forget
        return (
            grad_cells * (1 - gates),
            grad_forget,
            (grad_forget * before).sum(dim=(0, 1)),
            grad_cells[:, 0] * through[:, 0],
        )


def _forward(candidate: Tensor, forget: Tensor, recurrent: Tensor, initial: Tensor) -> Tensor:
    """Return the cells, position by position."""
    cells = torch.empty_like(candidate)
    cell = initial
    for position in range(candidate.size(1)):
        gate = torch.sigmoid(torch.addcmul(forget[:, position], recurrent, cell))
        cell = torch.lerp(candidate[:, position], cell, gate)
        cells[:, position] = cell
    return cells


def _backward(grad: Tensor, through: Tensor) -> Tensor:
    r"""Return the whole gradient of each cell: g_t + p_{t+1} g_{t+1}, backwards over (B, T, D)."""
    total = grad.clone()
    for position in range(grad.size(1) - 2, -1, -1):
        total[:, position].addcmul_(through[:, position + 1], total[:, position + 1])
    return total
