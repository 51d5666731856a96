"""The Triton kernel behind `loss.py`: a row of logits is read, its loss found, and its gradient written in its place.

A row of up to 8,192 pieces is held meanwhile, so that nothing is read twice; of a longer one the second reading mostly finds it near.

Step by step in PyTorch the same takes a dozen passes over the logits, in float32, which are the largest tensor of a training step:
more time than the products on either side. Nothing here is checked: the caller sees to shapes and types.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)  # a GPU has powers of two
# Pieces at a time, 32 for each thread of eight warps, and a longer row is read twice. On an H200, 22,900 rows of 32,768 pieces, us: 981 so,
# 1,018 with 4,096; 1,103 with the whole row in 32 warps and 1,131 in 16, for then one row has a processor to itself and waits for itself.
LARGEST_BLOCK = 8192


def smooth_rows(logits: Tensor, targets: Tensor, *, smoothing: float, no_target: int, differentiate: bool) -> tuple[Tensor, Tensor]:
    """Give the loss and the nll (n,) of logits (n, V), whose rows lie in one piece; they become their gradients if that is asked for."""
    rows, pieces = logits.shape
    loss, nll = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    block = min(LARGEST_BLOCK, max(16, 1 << (pieces - 1).bit_length()))
    others = smoothing / (pieces - 1)
    with torch.cuda.device_of(logits):
        _smooth[(rows,)](
            logits, targets, loss, nll, logits.stride(0), targets.stride(0), others, 1 - smoothing - others, no_target,
            GRADIENT=differentiate, PIECES=pieces, BLOCK=block, num_warps=max(1, block // 1024),
        )  # fmt: skip
    return loss, nll


@triton.jit(do_not_specialize=["others", "gap", "no_target"])
def _smooth(
    logits: tl.tensor, targets: tl.tensor, loss: tl.tensor, nll: tl.tensor, stride: tl.tensor, target_stride: tl.tensor,
    others: tl.tensor, gap: tl.tensor, no_target: tl.tensor,
    GRADIENT: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Do one row; `others` is what each piece is wanted with, and `gap` what the target is wanted with beyond that."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row * target_stride)
    counted = target != no_target
    gold = tl.load(start + tl.where(counted, target, 0)).to(tl.float32)
    places = tl.arange(0, BLOCK)
    there = places < PIECES
    held = tl.load(start + places, mask=there, other=float("-inf"))
    x = held.to(tl.float32)
    highest = tl.max(x, 0)
    norms = tl.exp2((x - highest) * LOG2_E)  # each thread sums for itself; the sums meet once
    sums = tl.where(there, x, 0.0)
    for first in range(BLOCK, PIECES, BLOCK):
        there = first + places < PIECES
        x = tl.load(start + first + places, mask=there, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        norms = norms * tl.exp2((highest - higher) * LOG2_E) + tl.exp2((x - higher) * LOG2_E)
        sums += tl.where(there, x, 0.0)
        highest = higher
    norm = tl.sum(norms, 0)
    level = highest + tl.log2(norm) / LOG2_E
    missed = level - gold
    spread = others * (PIECES * level - tl.sum(sums, 0))
    tl.store(nll + row, tl.where(counted, missed, 0.0))
    tl.store(loss + row, tl.where(counted, gap * missed + spread, 0.0))
    if GRADIENT:
        share = tl.where(counted, 1.0 / norm, 0.0)
        rest = tl.where(counted, others, 0.0)
        extra = tl.where(counted, gap, 0.0)
        for first in range(0, PIECES, BLOCK):
            there = first + places < PIECES
            if PIECES > BLOCK:
                held = tl.load(start + first + places, mask=there, other=float("-inf"))
            grad = tl.exp2((held.to(tl.float32) - highest) * LOG2_E) * share - rest
            grad = tl.where(first + places == target, grad - extra, grad)
            tl.store(start + first + places, grad.to(logits.dtype.element_ty), mask=there)
