"""R-Drop's and SimCut's loss against their formulas, differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops import IGNORE_INDEX, linear_consistency_loss, linear_cross_entropy_reference

ROWS, WIDTH, VOCABULARY = 11, 6, 9
TARGETS = torch.tensor([1, 2, IGNORE_INDEX, 0, 8, 3, 3, IGNORE_INDEX, 5, 6, 7])


def make_inputs(*, bias: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (ROWS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def written_out(
    inputs: list[Tensor], smoothing: float, alpha: float, *, symmetric: bool
) -> tuple[Tensor, Tensor]:
    hidden, other, weight, *rest = inputs
    bias = rest[0] if rest else None
    first, second = (
        linear_cross_entropy_reference(each, weight, bias, TARGETS, smoothing=smoothing)
        for each in (hidden, other)
    )
    kept = TARGETS != IGNORE_INDEX
    log_p, log_q = (
        F.linear(each, weight, bias).log_softmax(dim=-1)[kept] for each in (hidden, other)
    )
    forth = F.kl_div(log_q, log_p, log_target=True, reduction="sum")  # KL(p || q)
    back = F.kl_div(log_p, log_q, log_target=True, reduction="sum")
    if symmetric:
        loss = (first.loss + second.loss) / 2 + alpha / 4 * (forth + back)
        return loss, (first.nll + second.nll) / 2
    return first.loss + alpha * forth, first.nll


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 3])
def test_loss_and_gradients_are_those_of_the_formula(
    symmetric: bool, bias: bool, smoothing: float, chunk: int | None
) -> None:
    inputs = make_inputs(bias=bias)
    expected, expected_nll = written_out(inputs, smoothing, 3.0, symmetric=symmetric)
    expected_grads = torch.autograd.grad(expected * 2.5, inputs)
    hidden, other, weight, *rest = inputs
    found = linear_consistency_loss(
        hidden,
        other,
        weight,
        rest[0] if rest else None,
        TARGETS,
        smoothing=smoothing,
        divergence_weight=3.0,
        symmetric=symmetric,
        chunk=chunk,
    )
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.nll, expected_nll)
    for grad, wanted in zip(
        torch.autograd.grad(found.loss * 2.5, inputs), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, wanted)


def test_half_precision_agrees_with_double() -> None:
    inputs = make_inputs(bias=False)
    expected, _ = written_out(inputs, 0.1, 3.0, symmetric=True)
    hidden, other, weight = (each.detach().float().requires_grad_() for each in inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_consistency_loss(
            hidden, other, weight, None, TARGETS,
            smoothing=0.1, divergence_weight=3.0, symmetric=True,
        )  # fmt: skip
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss.double(), expected, rtol=0.02, atol=0.0)
    found.loss.backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in (hidden, other))
