"""Triton kernel of `fused_norm.dropout_add_norm`: backward pass of layer norm and dropout in one.

The caller validates shapes and dtypes. Means and sums are float32. No two programs write to the
same address, so results are deterministic.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS_PER_STEP = 4  # one for each warp


def backward(
    grad_output: Tensor,
    residual_sum: Tensor,
    seeds: Tensor,
    weight: Tensor,
    grad: Tensor,
    grad_sublayer: Tensor,
    partial_grads: Tensor,
    *,
    p: float,
    epsilon: float,
) -> None:
    """Write the gradients of sum, sublayer output, and (as partial sums) weight and bias."""
    width, num_programs = residual_sum.size(-1), partial_grads.size(0)
    rows = residual_sum.numel() // width
    with torch.cuda.device_of(grad_output):
        _backward_kernel[num_programs,](
            grad_output,
            residual_sum,
            seeds,
            weight,
            grad,
            grad_sublayer,
            partial_grads,
            rows,
            triton.cdiv(rows, num_programs * ROWS_PER_STEP) * ROWS_PER_STEP,
            round(p * 2**32) - 2**31,
            1 / (1 - p),
            epsilon,
            WIDTH=width,
            ROWS=ROWS_PER_STEP,
            num_warps=4,
        )


@triton.jit
def _xor_shift(bits: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """XOR the upper bits onto the lower ones, with a logical shift."""
    return bits ^ ((bits >> SHIFT) & ((1 << (32 - SHIFT)) - 1))


@triton.jit(
    do_not_specialize=["rows", "rows_per_program", "keep_threshold", "keep_scale", "epsilon"]
)
def _backward_kernel(
    grad_output: tl.tensor,
    residual_sum: tl.tensor,
    seeds: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    grad_sublayer: tl.tensor,
    partial_grads: tl.tensor,
    rows: tl.tensor,
    rows_per_program: tl.tensor,
    keep_threshold: tl.tensor,
    keep_scale: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Compute one group of rows; the hash is that of `dropout.hash_positions`."""
    first = tl.program_id(0) * rows_per_program
    last = tl.minimum(first + rows_per_program, rows)
    columns = tl.arange(0, WIDTH)
    first_seed, second_seed = tl.load(seeds).to(tl.int32), tl.load(seeds + 1).to(tl.int32)
    scale = tl.load(weight + columns).to(tl.float32)[None, :]
    weight_grads = tl.zeros((ROWS, WIDTH), tl.float32)
    bias_grads = tl.zeros((ROWS, WIDTH), tl.float32)
    while first < last:
        row = first + tl.arange(0, ROWS)
        in_rows = (row < last)[:, None]
        offsets = row[:, None] * WIDTH + columns[None, :]
        x = tl.load(residual_sum + offsets, mask=in_rows, other=0.0).to(tl.float32)
        wide_grad = tl.load(grad_output + offsets, mask=in_rows, other=0.0).to(tl.float32)
        x -= (tl.sum(x, 1) / WIDTH)[:, None]
        inv_std = 1 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + epsilon)[:, None]
        x *= inv_std
        scaled_grad = wide_grad * scale
        grad_sum = inv_std * (
            scaled_grad
            - (tl.sum(scaled_grad, 1) / WIDTH)[:, None]
            - x * (tl.sum(scaled_grad * x, 1) / WIDTH)[:, None]
        )
        grad_sum = grad_sum.to(grad.dtype.element_ty)
        tl.store(grad + offsets, grad_sum, mask=in_rows)
        bits = (_xor_shift(offsets ^ first_seed, 16) * 0x7FEB352D) ^ second_seed
        bits = _xor_shift(_xor_shift(bits, 15) * -0x7B935975, 16)  # 0x846CA68B as an int32
        kept = tl.where(bits >= keep_threshold, grad_sum.to(tl.float32) * keep_scale, 0.0)
        tl.store(grad_sublayer + offsets, kept.to(grad_sublayer.dtype.element_ty), mask=in_rows)
        weight_grads += wide_grad * x
        bias_grads += wide_grad
        first += ROWS
    start = partial_grads + tl.program_id(0) * 2 * WIDTH + columns
    tl.store(start, tl.sum(weight_grads, 0))
    tl.store(start + WIDTH, tl.sum(bias_grads, 0))
