"""Triton kernels of `ops/sru.py`: one program per row and tile of units, a loop over positions."""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # units per program: rows times tiles fill a GPU


def sru_forward(candidate: Tensor, forget: Tensor, recurrent: Tensor, initial: Tensor) -> Tensor:
    """Return the cells (B, T, D); all arguments are contiguous and float32."""
    rows, length, width = candidate.shape
    cells = torch.empty_like(candidate)
    with torch.cuda.device_of(candidate):
        _forward_kernel[(rows, triton.cdiv(width, _TILE))](
            candidate, forget, recurrent, initial, cells, length, width, TILE=_TILE, num_warps=4
        )
    return cells


def linear_scan_backward(grad: Tensor, through: Tensor) -> Tensor:
    """Return g_t + p_{t+1} g_{t+1}, from the last position to the first: (B, T, D) each."""
    rows, length, width = grad.shape
    total = torch.empty_like(grad)
    with torch.cuda.device_of(grad):
        _backward_kernel[(rows, triton.cdiv(width, _TILE))](
            grad, through, total, length, width, TILE=_TILE, num_warps=4
        )
    return total


@triton.jit(do_not_specialize=["length"])
def _forward_kernel(
    candidate: tl.tensor,
    forget: tl.tensor,
    recurrent: tl.tensor,
    initial: tl.tensor,
    cells: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Run the recurrence of one tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = unit < width
    weight = tl.load(recurrent + unit, mask=inside, other=0.0)
    cell = tl.load(initial + row * width + unit, mask=inside, other=0.0)
    at = row * length * width + unit
    for _ in range(length):
        new = tl.load(candidate + at, mask=inside, other=0.0)
        gate = tl.sigmoid(tl.load(forget + at, mask=inside, other=0.0) + weight * cell)
        cell = new + gate * (cell - new)
        tl.store(cells + at, cell, mask=inside)
        at += width


@triton.jit(do_not_specialize=["length"])
def _backward_kernel(
    grad: tl.tensor,
    through: tl.tensor,
    total: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """Run the reversed linear recurrence of one tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = unit < width
    at = (row * length + length - 1) * width + unit
    carried = tl.zeros([TILE], tl.float32)
    for _ in range(length):
        sum_of_both = tl.load(grad + at, mask=inside, other=0.0) + carried
        tl.store(total + at, sum_of_both, mask=inside)
        carried = sum_of_both * tl.load(through + at, mask=inside, other=0.0)
        at -= width
