"""Triton kernel of `cross_entropy.py`: the loss of each row of logits, and its gradient in place.

A row of up to 8,192 tokens stays in registers and is loaded once; a longer one is loaded again,
mostly from the cache. In PyTorch the same takes a dozen float32 passes over the logits, the largest
tensor of a training step: more time than the matmuls around it. The caller validates shapes and
dtypes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)  # GPUs compute powers of two
# Tokens per block, 32 for each thread of eight warps. On an H200, 22,900 rows of 32,768 tokens take
# 981 us; 1,018 with blocks of 4,096; 1,103 and 1,131 with the whole row in 32 and 16 warps, as one
# row then occupies a multiprocessor alone.
MAX_BLOCK = 8192


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
