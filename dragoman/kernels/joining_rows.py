"""The Triton kernel behind `joining.py`: a program holds one vector of the stream. Nothing here is checked: the caller sees to shapes."""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def join(
    x: Tensor, change: Tensor | None, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, epsilon: float, centred: bool, after: bool
) -> tuple[Tensor, Tensor]:
    """Give the stream (..., D) after a change and what the next product reads of it."""
    width = x.size(-1)
    tile = max(32, 1 << (width - 1).bit_length())
    entering = torch.empty(x.shape, dtype=dtype, device=x.device)
    stream = x if change is None and not after else torch.empty_like(x)
    with torch.cuda.device_of(x):
        _join[(x.numel() // width,)](
            x, x if change is None else change, weight, weight if bias is None else bias, stream, entering, epsilon,
            ADDS=change is not None, CENTRED=centred, SHIFTS=bias is not None, AFTER=after, WIDTH=width, TILE=tile,
            num_warps=max(1, min(8, tile // 512)),
        )  # fmt: skip
    return stream, entering


@triton.jit(do_not_specialize=["epsilon"])
def _join(
    x: tl.tensor, change: tl.tensor, weight: tl.tensor, bias: tl.tensor, stream: tl.tensor, entering: tl.tensor, epsilon: tl.tensor,
    ADDS: tl.constexpr, CENTRED: tl.constexpr, SHIFTS: tl.constexpr, AFTER: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    """Do one vector."""
    first = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, TILE)
    there = at < WIDTH
    y = tl.load(x + first + at, mask=there, other=0.0)
    if ADDS:
        y += tl.load(change + first + at, mask=there, other=0.0).to(tl.float32)
    normal = y
    if CENTRED:
        normal = tl.where(there, y - tl.sum(y, 0) / WIDTH, 0.0)
    spread = tl.sum(normal * normal, 0) / WIDTH
    normal = normal * (1.0 / tl.sqrt(spread + epsilon))
    if CENTRED:
        normal += spread - spread  # a variance that overflowed makes NaN, as torch's norm does, not zero
    normal *= tl.load(weight + at, mask=there, other=0.0)
    if SHIFTS:
        normal += tl.load(bias + at, mask=there, other=0.0)
    if AFTER:
        tl.store(stream + first + at, normal, mask=there)
    elif ADDS:
        tl.store(stream + first + at, y, mask=there)
    tl.store(entering + first + at, normal.to(entering.dtype.element_ty), mask=there)
