"""Norms, and residual addition fused with them: `dropout_add_norm` trains, `add_norm` decodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.dropout import MAX_ELEMENTS, apply_hashed_dropout, draw_seeds, dropout
from dragoman.ops.verified_kernel_fallback import GuardedKernel

MAX_WIDTH = 4096  # one program holds a whole row

ADD_NORM_KERNEL = GuardedKernel("residual addition with a norm")


class NormParameters(NamedTuple):
    """The parameters of a layer norm, or of an RMS norm if it is not centered."""

    weight: Tensor  # (D,)
    bias: Tensor | None  # (D,)
    epsilon: float
    centered: bool  # whether the mean is subtracted


class AddNormOutput(NamedTuple):
    """The residual stream and the input of the next linear layer."""

    residual: Tensor  # (..., D) in float32
    layer_input: Tensor  # (..., D) in the dtype of the matmuls


def add_norm(
    x: Tensor,
    sublayer_output: Tensor | None,
    scale: NormParameters,
    dtype: torch.dtype,
    *,
    post_norm: bool,
) -> AddNormOutput:
    """Add a sublayer's output to the residual stream (..., D) in float32 and normalize the sum.

    With `post_norm` the normalized sum is also the new residual stream.
    """

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
    """Return what `add_norm` returns, computed by PyTorch's kernels."""
    x = x if sublayer_output is None else x + sublayer_output
    width = (x.size(-1),)
    if scale.centered:
        normalized = F.layer_norm(x, width, scale.weight, scale.bias, scale.epsilon)
    else:
        normalized = F.rms_norm(x, width, scale.weight, scale.epsilon)
    return AddNormOutput(normalized if post_norm else x, normalized.to(dtype))


DROPOUT_ADD_NORM_KERNEL = GuardedKernel("gradients of layer norms")
SUPPORTED_WIDTHS = (128, 256, 512, 1024)  # a row fits into one warp's registers
# Groups of rows summed apart: four programs for each multiprocessor of an H200, nearly all of
# which run at the same time.
ROW_PARTITIONS = 512
COMPARED_ROWS = 256  # in the comparison with the reference


def dropout_add_norm(
    x: Tensor,
    sublayer_output: Tensor,
    p: float,
    weight: Tensor,
    bias: Tensor,
    epsilon: float,
    *,
    training: bool,
    cuda_graphs: bool = False,
) -> Tensor:
    r"""Return the layer norm of a residual sum (B, T, D) whose second term has dropout.

    .. math:: \mathrm{LayerNorm}(x + \mathrm{dropout}_p(y))

    `cuda_graphs` allows kernels that pay only when a CUDA graph replays their launches.
    """
    if training and cuda_graphs and 0 < p < 1 and _can_run_fused(x, sublayer_output, weight, bias):
        normed: Tensor = _DropoutAddNorm.apply(  # type: ignore[no-untyped-call]
            x, sublayer_output, draw_seeds(x.device), weight, bias, p, epsilon
        )
        return normed
    return layer_norm(x + dropout(sublayer_output, p, training=training), weight, bias, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return the layer norm of (..., D), in half precision if input and weights are.

    Autocast would cast to float32 first. The kernels accumulate in float32 anyway, so the casts
    would only cost memory traffic.
    """
    if x.dtype != torch.float32 and x.dtype == weight.dtype:
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float | None) -> Tensor:
    """Return the RMS norm of (..., D), in half precision if input and weights are."""
    if x.dtype != torch.float32 and x.dtype == weight.dtype:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _can_run_fused(x: Tensor, sublayer_output: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the fused form runs: under torch.compile, on a GPU, in half precision."""
    return (
        torch.compiler.is_compiling()
        and DROPOUT_ADD_NORM_KERNEL.can_run(x)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.size(-1) in SUPPORTED_WIDTHS
        and x.numel() <= MAX_ELEMENTS
        and x.dtype == sublayer_output.dtype == weight.dtype == bias.dtype
    )


class _DropoutAddNorm(torch.autograd.Function):
    """Saves the sum, and the seeds inverted (see `dropout.py`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sublayer_output: Tensor,
        seeds: Tensor,
        weight: Tensor,
        bias: Tensor,
        p: float,
        epsilon: float,
    ) -> Tensor:
        """Apply dropout, add, normalize."""
        residual_sum = (x + apply_hashed_dropout(sublayer_output, seeds, p)).contiguous()
        ctx.save_for_backward(residual_sum, ~seeds, weight)
        ctx.p, ctx.epsilon = p, epsilon
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(residual_sum, weight.shape, weight, bias, epsilon)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of both terms, of the weight and of the bias."""
        residual_sum, inverted_seeds, weight = ctx.saved_tensors
        operator = torch.ops.dragoman.dropout_add_norm_backward
        grad, grad_sublayer, partial_grads = operator(
            grad_output.contiguous(), residual_sum, ~inverted_seeds, weight, ctx.p, ctx.epsilon
        )
        grad_weight, grad_bias = partial_grads.sum(dim=0).to(weight.dtype).unbind()
        return grad, grad_sublayer, None, grad_weight, grad_bias, None, None


def _backward(
    grad_output: Tensor,
    residual_sum: Tensor,
    seeds: Tensor,
    weight: Tensor,
    p: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the sum, of the sublayer's output, and of weight and bias.

    The last are partial sums over groups of rows: (ROW_PARTITIONS, 2, D).
    """

    def fused() -> tuple[Tensor, Tensor, Tensor]:
        from dragoman.ops.triton import dropout_add_norm_backward_kernel

        found = _empty_grads(grad_output, residual_sum)
        dropout_add_norm_backward_kernel.backward(
            grad_output, residual_sum, seeds, weight, *found, p=p, epsilon=epsilon
        )
        return found

    def reference() -> tuple[Tensor, Tensor, Tensor]:
        return _backward_reference(grad_output, residual_sum, seeds, weight, p, epsilon)

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
    p: float,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_backward` returns, computed step by step in float32 at least."""
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
    grad_sublayer.copy_(apply_hashed_dropout(grad, seeds, p))
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
    schema=(
        "(Tensor grad_output, Tensor residual_sum, Tensor seeds, Tensor weight, float p,"
        " float epsilon) -> (Tensor, Tensor, Tensor)"
    ),
)
_operator.register_fake(_empty_grads)
