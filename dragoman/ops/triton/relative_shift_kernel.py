"""Triton kernels of `relative_shift.py`: move each row of scores, and mask later positions.

The caller validates shapes and dtypes. A program copies one row, so results are deterministic.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_PER_PROGRAM = 512


def shift(scores: Tensor, bias: Tensor, masked: float) -> None:
    """Write the causal bias of scores by distance: (..., T, S), both with rows a stride apart.

    The columns between the end of a row of `bias` and the next row are set to zero.
    """
    queries, keys = scores.shape[-2:]
    columns = bias.stride(-2)
    with torch.cuda.device_of(scores):
        _shift_kernel[scores.numel() // max(keys, 1), triton.cdiv(columns, COLUMNS_PER_PROGRAM)](
            scores,
            bias,
            queries,
            keys,
            scores.stride(-2),
            columns,
            masked,
            COLUMNS=COLUMNS_PER_PROGRAM,
            num_warps=4,
        )


def shift_back(grad: Tensor, scores_grad: Tensor) -> None:
    """Write the gradient of the scores by distance, (..., T, S), given that of the bias."""
    queries, keys = grad.shape[-2:]
    with torch.cuda.device_of(grad):
        _shift_back_kernel[grad.numel() // max(keys, 1), triton.cdiv(keys, COLUMNS_PER_PROGRAM)](
            grad,
            scores_grad,
            queries,
            keys,
            grad.stride(-2),
            scores_grad.stride(-2),
            COLUMNS=COLUMNS_PER_PROGRAM,
            num_warps=4,
        )


@triton.jit
def _shift_kernel(
    scores: tl.tensor,
    bias: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    scores_stride: tl.tensor,
    bias_stride: tl.tensor,
    masked: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Copy one row, moved left; later positions get the masked value, the columns behind zero."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    back = queries - 1 - (row % queries).to(tl.int32)  # positions after the query
    visible = column < keys - back
    value = tl.load(scores + row * scores_stride + column + back, mask=visible, other=0.0)
    value = tl.where(visible, value, masked.to(value.dtype))
    value = tl.where(column < keys, value, 0.0)
    tl.store(bias + row * bias_stride + column, value, mask=column < bias_stride)


@triton.jit
def _shift_back_kernel(
    grad: tl.tensor,
    scores_grad: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    grad_stride: tl.tensor,
    scores_stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Copy one row, moved right, with zeros in front."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    back = queries - 1 - (row % queries).to(tl.int32)
    inside = (column >= back) & (column < keys)
    value = tl.load(grad + row * grad_stride + column - back, mask=inside, other=0.0)
    tl.store(scores_grad + row * scores_stride + column, value, mask=column < keys)
