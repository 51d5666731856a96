"""The Triton kernel behind `normed_sum.py`: a gradient goes back through a layer norm and through dropout in one pass.

Nothing here is checked: the caller sees to shapes and types. Means and sums are float32, and no two programs write to one place.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4  # at a time, one for each warp


def differentiate(
    outer: Tensor, total: Tensor, seeds: Tensor, weight: Tensor, grad: Tensor, thinned: Tensor, sums: Tensor, *, rate: float, epsilon: float
) -> None:
    """Fill the gradient of a sum (..., D), its thinned form, and for each run of rows the gradients of scale and shift, (runs, 2, D)."""
    width, runs = total.size(-1), sums.size(0)
    rows = total.numel() // width
    with torch.cuda.device_of(outer):
        _differentiate[runs,](
            outer, total, seeds, weight, grad, thinned, sums, rows, triton.cdiv(rows, runs * ROWS) * ROWS,
            round(rate * 2**32) - 2**31, 1 / (1 - rate), epsilon, WIDTH=width, ROWS=ROWS, num_warps=4,
        )  # fmt: skip


@triton.jit
def _fold(bits: tl.tensor, BY: tl.constexpr) -> tl.tensor:  # noqa: N803
    """Put the upper bits onto the lower ones, without the sign."""
    return bits ^ ((bits >> BY) & ((1 << (32 - BY)) - 1))


@triton.jit(do_not_specialize=["rows", "run", "least", "larger", "epsilon"])
def _differentiate(
    outer: tl.tensor, total: tl.tensor, seeds: tl.tensor, weight: tl.tensor, grad: tl.tensor, thinned: tl.tensor, sums: tl.tensor,
    rows: tl.tensor, run: tl.tensor, least: tl.tensor, larger: tl.tensor, epsilon: tl.tensor,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Do one run of rows; the hash is that of `dropout.hash_places`, and `least` the lowest that is kept."""
    first = tl.program_id(0) * run
    last = tl.minimum(first + run, rows)
    columns = tl.arange(0, WIDTH)
    one, two = tl.load(seeds).to(tl.int32), tl.load(seeds + 1).to(tl.int32)
    scale = tl.load(weight + columns).to(tl.float32)[None, :]
    scales = tl.zeros((ROWS, WIDTH), tl.float32)
    shifts = tl.zeros((ROWS, WIDTH), tl.float32)
    while first < last:
        row = first + tl.arange(0, ROWS)
        there = (row < last)[:, None]
        places = row[:, None] * WIDTH + columns[None, :]
        x = tl.load(total + places, mask=there, other=0.0).to(tl.float32)
        along = tl.load(outer + places, mask=there, other=0.0).to(tl.float32)
        x -= (tl.sum(x, 1) / WIDTH)[:, None]
        inverse = 1 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + epsilon)[:, None]
        x *= inverse
        scaled = along * scale
        back = inverse * (scaled - (tl.sum(scaled, 1) / WIDTH)[:, None] - x * (tl.sum(scaled * x, 1) / WIDTH)[:, None])
        back = back.to(grad.dtype.element_ty)
        tl.store(grad + places, back, mask=there)
        bits = (_fold(places ^ one, 16) * 0x7FEB352D) ^ two
        bits = _fold(_fold(bits, 15) * -0x7B935975, 16)  # 0x846CA68B as an int32
        kept = tl.where(bits >= least, back.to(tl.float32) * larger, 0.0)
        tl.store(thinned + places, kept.to(thinned.dtype.element_ty), mask=there)
        scales += along * x
        shifts += along
        first += ROWS
    start = sums + tl.program_id(0) * 2 * WIDTH + columns
    tl.store(start, tl.sum(scales, 0))
    tl.store(start + WIDTH, tl.sum(shifts, 0))
