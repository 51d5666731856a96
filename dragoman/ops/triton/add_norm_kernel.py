"""Triton kernel of `fused_norm.add_norm`: one program per vector. The caller validates shapes."""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_norm(
    x: Tensor,
    sublayer_output: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    epsilon: float,
    centered: bool,
    post_norm: bool,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream (..., D) and the normalized input of the next linear layer."""
    width = x.size(-1)
    tile = max(32, 1 << (width - 1).bit_length())
    layer_input = torch.empty(x.shape, dtype=dtype, device=x.device)
    residual = x if sublayer_output is None and not post_norm else torch.empty_like(x)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(x.numel() // width,)](
            x,
            x if sublayer_output is None else sublayer_output,
            weight,
            weight if bias is None else bias,
            residual,
            layer_input,
            epsilon,
            ADD_RESIDUAL=sublayer_output is not None,
            CENTERED=centered,
            HAS_BIAS=bias is not None,
            POST_NORM=post_norm,
            WIDTH=width,
            TILE=tile,
            num_warps=max(1, min(8, tile // 512)),
        )
    return residual, layer_input


@triton.jit(do_not_specialize=["epsilon"])
def _add_norm_kernel(
    x: tl.tensor,
    sublayer_output: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    layer_input: tl.tensor,
    epsilon: tl.tensor,
    ADD_RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    POST_NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Add and normalize one vector."""
    first = tl.program_id(0).to(tl.int64) * WIDTH
    at = tl.arange(0, TILE)
    in_row = at < WIDTH
    y = tl.load(x + first + at, mask=in_row, other=0.0)
    if ADD_RESIDUAL:
        y += tl.load(sublayer_output + first + at, mask=in_row, other=0.0).to(tl.float32)
    normalized = y
    if CENTERED:
        normalized = tl.where(in_row, y - tl.sum(y, 0) / WIDTH, 0.0)
    variance = tl.sum(normalized * normalized, 0) / WIDTH
    normalized = normalized * (1.0 / tl.sqrt(variance + epsilon))
    if CENTERED:
        # A variance that overflowed gives NaN, as in torch's norm, not zero.
        normalized += variance - variance
    normalized *= tl.load(weight + at, mask=in_row, other=0.0)
    if HAS_BIAS:
        normalized += tl.load(bias + at, mask=in_row, other=0.0)
    if POST_NORM:
        tl.store(residual + first + at, normalized, mask=in_row)
    elif ADD_RESIDUAL:
        tl.store(residual + first + at, y, mask=in_row)
    tl.store(layer_input + first + at, normalized.to(layer_input.dtype.element_ty), mask=in_row)
