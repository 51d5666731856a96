"""Triton kernels of `fused_linear_cross_entropy.py`: the loss of each row of logits, and its
gradient in place.

A row of up to 8,192 tokens stays in registers and is loaded once; a longer one is loaded again,
mostly from the cache. The loss of two passes is computed from a row of each. In PyTorch the same
takes a dozen float32 passes over the logits, the largest tensor of a training step: more time than
the matmuls around it. The caller validates shapes and dtypes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dragoman.ops.fused_linear_cross_entropy import ConsistencyWeights

LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs compute powers of two
# Tokens per block, 32 for each thread of eight warps. On an H200, 22,900 rows of 32,768 tokens take
# 981 us; 1,018 with blocks of 4,096; 1,103 and 1,131 with the whole row in 32 and 16 warps, as one
# row then occupies a multiprocessor alone.
MAX_BLOCK = 8192
# Tokens per block where a pair of rows is longer than MAX_BLOCK: with five sums for each token, a
# multiprocessor's registers hold three pairs of rows at a time.
PAIR_BLOCK = 2048


def cross_entropy_rows(
    logits: Tensor, targets: Tensor, *, smoothing: float, ignore_index: int, differentiate: bool
) -> tuple[Tensor, Tensor]:
    """Return loss and nll (n,) of logits (n, V), and overwrite the logits by their gradient."""
    rows, vocab_size = logits.shape
    loss, nll = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    block = min(MAX_BLOCK, max(16, 1 << (vocab_size - 1).bit_length()))
    off_target_prob = smoothing / (vocab_size - 1)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(rows,)](
            logits,
            targets,
            loss,
            nll,
            logits.stride(0),
            targets.stride(0),
            off_target_prob,
            1 - smoothing - off_target_prob,
            ignore_index,
            COMPUTE_GRADIENT=differentiate,
            VOCAB_SIZE=vocab_size,
            BLOCK=block,
            num_warps=max(1, block // 1024),
        )
    return loss, nll


def consistency_rows(
    logits: Tensor,
    targets: Tensor,
    *,
    weights: ConsistencyWeights,
    smoothing: float,
    ignore_index: int,
    differentiate: bool,
) -> tuple[Tensor, Tensor]:
    """Return loss and nll (n,) of two passes (2 n, V); overwrite the logits by their gradient.

    Row n + i is the second pass over target i.
    """
    rows, vocab_size = len(targets), logits.size(1)
    loss, nll = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    block = max(16, 1 << (vocab_size - 1).bit_length())
    if block > MAX_BLOCK:
        block = PAIR_BLOCK
    off_target_prob = smoothing / (vocab_size - 1)
    with torch.cuda.device_of(logits):
        _consistency_kernel[(rows,)](
            logits,
            targets,
            loss,
            nll,
            rows,
            logits.stride(0),
            targets.stride(0),
            off_target_prob,
            1 - smoothing - off_target_prob,
            *weights,
            ignore_index,
            COMPUTE_GRADIENT=differentiate,
            VOCAB_SIZE=vocab_size,
            BLOCK=block,
            num_warps=max(1, block // 512),
        )
    return loss, nll


@triton.jit(do_not_specialize=["off_target_prob", "target_extra_prob", "ignore_index"])
def _cross_entropy_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    loss: tl.tensor,
    nll: tl.tensor,
    stride: tl.tensor,
    target_stride: tl.tensor,
    off_target_prob: tl.tensor,
    target_extra_prob: tl.tensor,
    ignore_index: tl.tensor,
    COMPUTE_GRADIENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one row; the target's probability is off_target_prob + target_extra_prob."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row * target_stride)
    has_target = target != ignore_index
    target_logit = tl.load(start + tl.where(has_target, target, 0)).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    in_row = columns < VOCAB_SIZE
    cached_logits = tl.load(start + columns, mask=in_row, other=float("-inf"))
    x = cached_logits.to(tl.float32)
    max_logit = tl.max(x, 0)
    norms = tl.exp2((x - max_logit) * LOG2_E)  # per-thread sums, reduced once
    sums = tl.where(in_row, x, 0.0)
    for first in range(BLOCK, VOCAB_SIZE, BLOCK):
        in_row = first + columns < VOCAB_SIZE
        x = tl.load(start + first + columns, mask=in_row, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(max_logit, tl.max(x, 0))
        norms = norms * tl.exp2((max_logit - new_max) * LOG2_E) + tl.exp2((x - new_max) * LOG2_E)
        sums += tl.where(in_row, x, 0.0)
        max_logit = new_max
    norm = tl.sum(norms, 0)
    log_sum_exp = max_logit + tl.log2(norm) / LOG2_E
    row_nll = log_sum_exp - target_logit
    smoothing_loss = off_target_prob * (VOCAB_SIZE * log_sum_exp - tl.sum(sums, 0))
    tl.store(nll + row, tl.where(has_target, row_nll, 0.0))
    tl.store(loss + row, tl.where(has_target, target_extra_prob * row_nll + smoothing_loss, 0.0))
    if COMPUTE_GRADIENT:
        inverse_norm = tl.where(has_target, 1.0 / norm, 0.0)
        off_target_grad = tl.where(has_target, off_target_prob, 0.0)
        target_grad = tl.where(has_target, target_extra_prob, 0.0)
        for first in range(0, VOCAB_SIZE, BLOCK):
            in_row = first + columns < VOCAB_SIZE
            if VOCAB_SIZE > BLOCK:
                cached_logits = tl.load(start + first + columns, mask=in_row, other=float("-inf"))
            grad = (
                tl.exp2((cached_logits.to(tl.float32) - max_logit) * LOG2_E) * inverse_norm
                - off_target_grad
            )
            grad = tl.where(first + columns == target, grad - target_grad, grad)
            tl.store(start + first + columns, grad.to(logits.dtype.element_ty), mask=in_row)


@triton.jit(
    do_not_specialize=[
        "rows",
        "off_target_prob",
        "target_extra_prob",
        "ce_weight",
        "other_ce_weight",
        "kl_weight",
        "reverse_kl_weight",
        "ignore_index",
    ]
)
def _consistency_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    loss: tl.tensor,
    nll: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    target_stride: tl.tensor,
    off_target_prob: tl.tensor,
    target_extra_prob: tl.tensor,
    ce_weight: tl.tensor,
    other_ce_weight: tl.tensor,
    kl_weight: tl.tensor,
    reverse_kl_weight: tl.tensor,
    ignore_index: tl.tensor,
    COMPUTE_GRADIENT: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one row x of the first pass and the same row y of the second.

    With gap = x - y, the divergence KL(p || q) is the mean of gap under p, less the difference of
    the log-sum-exps; so one pass over the tokens is enough for both losses.
    """
    row = tl.program_id(0).to(tl.int64)
    x_start = logits + row * stride
    y_start = logits + (row + rows) * stride
    target = tl.load(targets + row * target_stride)
    has_target = target != ignore_index
    target_or_zero = tl.where(has_target, target, 0)
    x_target = tl.load(x_start + target_or_zero).to(tl.float32)
    y_target = tl.load(y_start + target_or_zero).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    in_row = columns < VOCAB_SIZE
    cached_x = tl.load(x_start + columns, mask=in_row, other=float("-inf"))
    cached_y = tl.load(y_start + columns, mask=in_row, other=float("-inf"))
    x = cached_x.to(tl.float32)
    y = cached_y.to(tl.float32)
    x_max = tl.max(x, 0)
    y_max = tl.max(y, 0)
    # Beyond the row minus infinity has no difference.
    gap = tl.where(in_row, x, 0.0) - tl.where(in_row, y, 0.0)
    x_norms = tl.exp2((x - x_max) * LOG2_E)  # per-thread sums, reduced once
    y_norms = tl.exp2((y - y_max) * LOG2_E)
    x_gaps = x_norms * gap
    y_gaps = y_norms * gap
    # Label smoothing needs the weighted sum of both rows only.
    sums = ce_weight * tl.where(in_row, x, 0.0) + other_ce_weight * tl.where(in_row, y, 0.0)
    for first in range(BLOCK, VOCAB_SIZE, BLOCK):
        in_row = first + columns < VOCAB_SIZE
        x = tl.load(x_start + first + columns, mask=in_row, other=float("-inf")).to(tl.float32)
        y = tl.load(y_start + first + columns, mask=in_row, other=float("-inf")).to(tl.float32)
        gap = tl.where(in_row, x, 0.0) - tl.where(in_row, y, 0.0)
        new_x_max = tl.maximum(x_max, tl.max(x, 0))
        new_y_max = tl.maximum(y_max, tl.max(y, 0))
        x_scale = tl.exp2((x_max - new_x_max) * LOG2_E)
        y_scale = tl.exp2((y_max - new_y_max) * LOG2_E)
        x_exp = tl.exp2((x - new_x_max) * LOG2_E)
        y_exp = tl.exp2((y - new_y_max) * LOG2_E)
        x_norms = x_norms * x_scale + x_exp
        y_norms = y_norms * y_scale + y_exp
        x_gaps = x_gaps * x_scale + x_exp * gap
        y_gaps = y_gaps * y_scale + y_exp * gap
        sums += ce_weight * tl.where(in_row, x, 0.0) + other_ce_weight * tl.where(in_row, y, 0.0)
        x_max = new_x_max
        y_max = new_y_max
    x_norm = tl.sum(x_norms, 0)
    y_norm = tl.sum(y_norms, 0)
    x_gap = tl.sum(x_gaps, 0) / x_norm  # mean of gap under p
    y_gap = tl.sum(y_gaps, 0) / y_norm  # and under q
    x_lse = x_max + tl.log2(x_norm) / LOG2_E
    y_lse = y_max + tl.log2(y_norm) / LOG2_E
    lse = ce_weight * x_lse + other_ce_weight * y_lse
    row_nll = lse - ce_weight * x_target - other_ce_weight * y_target
    row_loss = target_extra_prob * row_nll
    row_loss += off_target_prob * (VOCAB_SIZE * lse - tl.sum(sums, 0))
    row_loss += kl_weight * (x_gap - x_lse + y_lse)
    row_loss += reverse_kl_weight * (x_lse - y_lse - y_gap)
    tl.store(nll + row, tl.where(has_target, row_nll, 0.0))
    tl.store(loss + row, tl.where(has_target, row_loss, 0.0))
    if COMPUTE_GRADIENT:
        inverse_x_norm = 1.0 / x_norm
        inverse_y_norm = 1.0 / y_norm
        # A row without a target has no gradient: all of its weights are zero.
        x_weight = tl.where(has_target, ce_weight, 0.0)
        y_weight = tl.where(has_target, other_ce_weight, 0.0)
        forward = tl.where(has_target, kl_weight, 0.0)
        reverse = tl.where(has_target, reverse_kl_weight, 0.0)
        for first in range(0, VOCAB_SIZE, BLOCK):
            in_row = first + columns < VOCAB_SIZE
            if VOCAB_SIZE > BLOCK:
                cached_x = tl.load(x_start + first + columns, mask=in_row, other=float("-inf"))
                cached_y = tl.load(y_start + first + columns, mask=in_row, other=float("-inf"))
            x = cached_x.to(tl.float32)
            y = cached_y.to(tl.float32)
            gap = tl.where(in_row, x, 0.0) - tl.where(in_row, y, 0.0)
            p = tl.exp2((x - x_max) * LOG2_E) * inverse_x_norm
            q = tl.exp2((y - y_max) * LOG2_E) * inverse_y_norm
            wanted = tl.where(first + columns == target, target_extra_prob, 0.0) + off_target_prob
            x_grad = x_weight * (p - wanted) + forward * p * (gap - x_gap) + reverse * (p - q)
            y_grad = y_weight * (q - wanted) + forward * (q - p) + reverse * q * (y_gap - gap)
            tl.store(x_start + first + columns, x_grad.to(logits.dtype.element_ty), mask=in_row)
            tl.store(y_start + first + columns, y_grad.to(logits.dtype.element_ty), mask=in_row)
