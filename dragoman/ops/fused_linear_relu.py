"""Linear layer followed by ReLU as one operation, with a fused backward pass on GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.verified_kernel_fallback import GuardedKernel

LINEAR_RELU_KERNEL = GuardedKernel("linear layers with ReLU")
COMPARED_ROWS = 256  # in the comparison with the reference
# Groups of rows whose bias gradients are summed apart; a constant, so that torch.compile needs no
# new graph for another number of rows.
ROW_PARTITIONS = 256


def linear_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, cuda_graphs: bool = False
) -> Tensor:
    """Return max(0, x W^T + b) for (..., D) and (F, D): (..., F).

    `cuda_graphs` allows kernels that pay only when a CUDA graph replays their launches.
    """
    if bias is None or not (cuda_graphs and _can_run_fused(x, weight, bias)):
        return linear_relu_reference(x, weight, bias)
    relu_output: Tensor = torch.ops.dragoman.linear_relu(x.flatten(0, -2), weight, bias)
    return relu_output.view(*x.shape[:-1], weight.size(0))


def linear_relu_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `linear_relu` returns, computed by PyTorch's layers."""
    return F.linear(x, weight, bias).relu()


def _can_run_fused(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether the fused form runs: on a GPU, all in the same half precision."""
    return (
        LINEAR_RELU_KERNEL.can_run(x)
        and x.numel() > 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype == bias.dtype
    )


def _forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return matmul, bias and ReLU from one cuBLAS call."""

    def fused() -> tuple[Tensor]:
        return (torch._addmm_activation(bias, x, weight.T, use_gelu=False),)

    def reference() -> tuple[Tensor]:
        return (linear_relu_reference(x, weight, bias),)

    if not LINEAR_RELU_KERNEL.can_run(x):
        return reference()[0]
    return LINEAR_RELU_KERNEL.run(
        ("forward", x.dtype, *weight.shape),
        fused,
        reference,
        comparable=lambda outputs: (outputs[0][-COMPARED_ROWS:],),
    )[0]


def _relu_backward(grad_output: Tensor, relu_output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient (N, F) before ReLU and its sums over groups of rows.

    The sums are (ROW_PARTITIONS, F), in float32 at least; their sum is the bias gradient.
    """

    def fused() -> tuple[Tensor, Tensor]:
        from dragoman.ops.triton import relu_bias_backward_kernel

        found = _empty_relu_grads(grad_output, relu_output)
        relu_bias_backward_kernel.relu_backward(grad_output.contiguous(), relu_output, *found)
        return found

    def reference() -> tuple[Tensor, Tensor]:
        grad_linear = torch.where(relu_output <= 0, 0.0, grad_output)
        bias_grad_partials = _empty_relu_grads(grad_output, relu_output)[1].zero_()
        torch.sum(grad_linear, dim=0, dtype=bias_grad_partials.dtype, out=bias_grad_partials[0])
        return grad_linear, bias_grad_partials

    def comparable(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return outputs[0][-COMPARED_ROWS:], outputs[1].sum(dim=0)

    if not LINEAR_RELU_KERNEL.can_run(grad_output):
        return reference()
    return LINEAR_RELU_KERNEL.run(
        ("backward", grad_output.dtype, grad_output.size(1)),
        fused,
        reference,
        comparable=comparable,
    )


def _empty_relu_grads(grad_output: Tensor, relu_output: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(grad_output.dtype, torch.float32)
    partials = relu_output.new_empty(ROW_PARTITIONS, relu_output.size(1), dtype=wide)
    return torch.empty_like(relu_output), partials


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the matmul's inputs and the output."""
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output)


def _autograd_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, relu_output = ctx.saved_tensors
    grad_linear, bias_grad_partials = torch.ops.dragoman.relu_backward(grad_output, relu_output)
    return (
        grad_linear @ weight,
        grad_linear.T @ x,
        bias_grad_partials.sum(dim=0).to(grad_output.dtype),
    )


_operator = torch.library.custom_op(
    "dragoman::linear_relu",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias) -> Tensor",
)
_operator.register_fake(lambda x, weight, bias: x.new_empty(x.size(0), weight.size(0)))
_operator.register_autograd(_autograd_backward, setup_context=_setup_context)
_relu_backward_operator = torch.library.custom_op(
    "dragoman::relu_backward",
    _relu_backward,
    mutates_args=(),
    schema="(Tensor grad_output, Tensor relu_output) -> (Tensor, Tensor)",
)
_relu_backward_operator.register_fake(_empty_relu_grads)
