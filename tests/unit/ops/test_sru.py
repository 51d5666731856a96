"""The SRU recurrence: the paper's loop, its gradient, and the Triton kernels under the
interpreter.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from kernel_kit import TRITON, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor

from dragoman.ops.sru import _backward, _forward, sru_scan


def minor(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


# A loop to a kernel's argument: Triton 3.6's interpreter turns an array of one number into its end.
interpreter_can_loop = pytest.mark.skipif(
    TRITON and minor("triton") < (3, 7) and minor("numpy") >= (2, 4),
    reason="Triton's interpreter before 3.7 needs NumPy before 2.4",
)


def arguments(rows: int, length: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (rows, length, width), (rows, length, width), (width,), (rows, width)
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)


def test_it_is_the_papers_recurrence() -> None:
    candidate, forget, recurrent, initial = arguments(2, 5, 3, torch.float64)
    found = sru_scan(candidate, forget, recurrent, initial)
    for row in range(2):
        cell = initial[row]
        for position in range(5):
            gate = 1 / (1 + torch.exp(-(forget[row, position] + recurrent * cell)))
            cell = gate * cell + (1 - gate) * candidate[row, position]
            torch.testing.assert_close(found[row, position], cell)


@pytest.mark.parametrize("length", [1, 4])
def test_gradient_equals_finite_differences(length: int) -> None:
    assert torch.autograd.gradcheck(sru_scan, arguments(2, length, 3, torch.float64))


def test_half_precision_is_computed_in_float32() -> None:
    rounded = [each.detach().bfloat16() for each in arguments(2, 60, 3, torch.float32)]
    found = sru_scan(*rounded)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, sru_scan(*(each.float() for each in rounded)))


@interpreted
@pytest.mark.parametrize(("rows", "length", "width"), [(2, 5, 7), (1, 1, 130), (3, 4, 256)])
def test_interpreted_kernels_are_the_loops(rows: int, length: int, width: int) -> None:
    from dragoman.ops.triton.sru_kernel import linear_scan_backward, sru_forward

    inputs = [each.detach() for each in arguments(rows, length, width, torch.float32)]
    torch.testing.assert_close(sru_forward(*inputs), _forward(*inputs))
    torch.testing.assert_close(linear_scan_backward(*inputs[:2]), _backward(*inputs[:2]))


@needs_triton
@interpreter_can_loop
def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@needs_gpu
@needs_triton
def test_the_kernels_on_a_gpu_have_the_loops_values_and_gradients() -> None:
    on_cpu = arguments(3, 9, 200, torch.float32)
    on_gpu = [each.detach().cuda().requires_grad_() for each in on_cpu]
    found, expected = sru_scan(*on_gpu), sru_scan(*on_cpu)
    torch.testing.assert_close(found.cpu(), expected)
    grads = torch.autograd.grad(found.square().sum(), on_gpu)
    for grad, other in zip(
        grads, torch.autograd.grad(expected.square().sum(), on_cpu), strict=True
    ):
        torch.testing.assert_close(grad.cpu(), other)
