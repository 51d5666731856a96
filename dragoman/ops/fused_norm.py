"""Residual addition and normalization in one pass: add_norm for inference, dropout_add_norm for training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.dropout import MAX_ELEMENTS, apply_hashed_dropout, draw_seeds
from dragoman.ops.guarded_kernel import GuardedKernel
from dragoman.ops.short_attention import uses_cuda_graphs

MAX_WIDTH = 4096  # a vector is held whole

ADD_NORM_KERNEL = GuardedKernel("the sum with its norm")


class NormParameters(NamedTuple):
    """A layer norm, or where nothing is shifted the root mean square's."""

    weight: Tensor  # (D,)
    bias: Tensor | None  # (D,)
    epsilon: float
    centered: bool  # whether the mean is taken away


class AddNormOutput(NamedTuple):
    """The stream after a change, and what the next product reads of it."""

    residual: Tensor  # (..., D) in float32
    layer_input: Tensor  # (..., D) in the products' format


def add_norm(
    x: Tensor,
    sublayer_output: Tensor | None,
    scale: NormParameters,
    dtype: torch.dtype,
    *,
    post_norm: bool,
) -> AddNormOutput:
    """Add a change to a stream (..., D) in float32 and normalise what the next product reads; `after`, the stream goes on normalised."""

    def reference() -> AddNormOutput:
        return add_norm_reference(x, sublayer_output, scale, dtype, post_norm=post_norm)

    is_supported = (
        x.size(-1) <= MAX_WIDTH and x.is_contiguous() and x.dtype == torch.float32 and x.numel() > 0
    )
    if not (
        is_supported
        and (sublayer_output is None or sublayer_output.is_contiguous())
        and ADD_NORM_KERNEL.can_run(x)
    ):
        return reference()

    def fused() -> AddNormOutput:
        from dragoman.ops.triton import add_norm_kernel

        return AddNormOutput(
            *add_norm_kernel.add_norm(
                x,
                sublayer_output,
                scale.weight,
                scale.bias,
                dtype,
                epsilon=scale.epsilon,
                centered=scale.centered,
                post_norm=post_norm,
            )
        )

    return ADD_NORM_KERNEL.run(
        (dtype, x.size(-1), sublayer_output is None, scale.centered, scale.bias is None, post_norm),
        fused,
        reference,
    )


def add_norm_reference(
    x: Tensor,
    sublayer_output: Tensor | None,
    scale: NormParameters,
    dtype: torch.dtype,
    *,
    post_norm: bool,
) -> AddNormOutput:
    """Do what `join` does with PyTorch's kernels."""
    x = x if sublayer_output is None else x + sublayer_output
    width = (x.size(-1),)
    if scale.centered:
        normalized = F.layer_norm(x, width, scale.weight, scale.bias, scale.epsilon)
    else:
        normalized = F.rms_norm(x, width, scale.weight, scale.epsilon)
    return AddNormOutput(normalized if post_norm else x, normalized.to(dtype))


DROPOUT_ADD_NORM_KERNEL = GuardedKernel("the kernel for gradients of norms")
SUPPORTED_WIDTHS = (128, 256, 512, 1024)  # a row lies in one warp's registers
ROW_PARTITIONS = 512  # of rows, summed apart: four programs for each processor of an H200, nearly all of which run at once
COMPARED_ROWS = 256  # rows, the first time


def dropout_add_norm(
    x: Tensor, sublayer_output: Tensor, rate: float, weight: Tensor, bias: Tensor, epsilon: float
) -> Tensor | None:
    """Give the layer norm of (B, T, D) plus a change of which `rate` is dropped; None where that is better left to PyTorch's layers."""
    if (
        not _is_supported(x)
        or not 0 < rate < 1
        or x.numel() > MAX_ELEMENTS
        or not x.dtype == sublayer_output.dtype == weight.dtype == bias.dtype
    ):
        return None
    normed: Tensor = _DropoutAddNorm.apply(
        x, sublayer_output, draw_seeds(x.device), weight, bias, rate, epsilon
    )  # type: ignore[no-untyped-call]
    return normed


def _is_supported(x: Tensor) -> bool:
    """Ask for a compiler, for a GPU that replays its launches, and for half precision."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return (
        torch.compiler.is_compiling()
        and DROPOUT_ADD_NORM_KERNEL.can_run(x)
        and uses_cuda_graphs()
        and half
        and x.size(-1) in SUPPORTED_WIDTHS
    )


class _DropoutAddNorm(torch.autograd.Function):
    """The sum is kept, and the seeds inverted, as `dropout.py` keeps them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sublayer_output: Tensor,
        seeds: Tensor,
        weight: Tensor,
        bias: Tensor,
        rate: float,
        epsilon: float,
    ) -> Tensor:
        """Drop, add, normalise."""
        residual_sum = (x + apply_hashed_dropout(sublayer_output, seeds, rate)).contiguous()
        ctx.save_for_backward(residual_sum, ~seeds, weight)
        ctx.rate, ctx.epsilon = rate, epsilon
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(residual_sum, weight.shape, weight, bias, epsilon)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of both summands, and those of scale and shift."""
        residual_sum, inverted_seeds, weight = ctx.saved_tensors
        operator = torch.ops.dragoman.dropout_add_norm_backward
        grad, grad_sublayer, partial_grads = operator(
            grad_output.contiguous(), residual_sum, ~inverted_seeds, weight, ctx.rate, ctx.epsilon
        )
        scale, shift = partial_grads.sum(dim=0).to(weight.dtype).unbind()
        return grad, grad_sublayer, None, scale, shift, None, None


def _backward(
    grad_output: Tensor,
    residual_sum: Tensor,
    seeds: Tensor,
    weight: Tensor,
    rate: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradient of the sum, what of it the change gets, and the gradients of scale and shift by runs of rows: (RUNS, 2, D)."""

    def fused() -> tuple[Tensor, Tensor, Tensor]:
        from dragoman.ops.triton import dropout_add_norm_kernel

        found = _empty_grads(grad_output, residual_sum)
        dropout_add_norm_kernel.backward(
            grad_output, residual_sum, seeds, weight, *found, rate=rate, epsilon=epsilon
        )
        return found

    def reference() -> tuple[Tensor, Tensor, Tensor]:
        return _backward_reference(grad_output, residual_sum, seeds, weight, rate, epsilon)

    def comparable(outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        return (
            outputs[0].flatten(0, -2)[-COMPARED_ROWS:],
            outputs[1].flatten(0, -2)[-COMPARED_ROWS:],
            *outputs[2].sum(dim=0).unbind(),
        )

    if not DROPOUT_ADD_NORM_KERNEL.can_run(grad_output):
        return reference()
    return DROPOUT_ADD_NORM_KERNEL.run(
        (grad_output.dtype, grad_output.size(-1)), fused, reference, comparable=comparable
    )


def _backward_reference(
    grad_output: Tensor,
    residual_sum: Tensor,
    seeds: Tensor,
    weight: Tensor,
    rate: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same step by step, in float32 at least."""
    _, grad_sublayer, partial_grads = _empty_grads(grad_output, residual_sum)
    wide, wide_grad = residual_sum.to(partial_grads.dtype), grad_output.to(partial_grads.dtype)
    centered = wide - wide.mean(dim=-1, keepdim=True)
    inv_std = (centered.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()
    normalized, scaled_grad = centered * inv_std, wide_grad * weight
    grad = inv_std * (
        scaled_grad
        - scaled_grad.mean(dim=-1, keepdim=True)
        - normalized * (scaled_grad * normalized).mean(dim=-1, keepdim=True)
    )
    grad = grad.to(residual_sum.dtype)
    grad_sublayer.copy_(apply_hashed_dropout(grad, seeds, rate))
    partial_grads.zero_()
    partial_grads[0, 0], partial_grads[0, 1] = (
        (wide_grad * normalized).flatten(0, -2).sum(dim=0),
        wide_grad.flatten(0, -2).sum(dim=0),
    )
    return grad, grad_sublayer, partial_grads


def _empty_grads(
    grad_output: Tensor, residual_sum: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(grad_output.dtype, torch.float32)
    return (
        torch.empty_like(residual_sum),
        torch.empty_like(residual_sum),
        residual_sum.new_empty(ROW_PARTITIONS, 2, residual_sum.size(-1), dtype=wide),
    )


_operator = torch.library.custom_op(
    "dragoman::dropout_add_norm_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor outer, Tensor total, Tensor seeds, Tensor weight, float rate, float epsilon) -> (Tensor, Tensor, Tensor)",
)
_operator.register_fake(_empty_grads)
