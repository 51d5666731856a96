"""Transformer-XL's relative shift: against the definition, its gradient, and its kernel."""

from __future__ import annotations

import pytest
import torch

from dragoman.ops import relative_shift, shift_causal


def shift_by_definition(scores):
    """Look up each key's score by its distance."""
    *_, queries, keys = scores.shape
    bias = torch.full_like(scores, relative_shift.masked_value(scores.dtype))
    for query in range(queries):
        for key in range(keys - queries + query + 1):
            distance = keys - queries + query - key
            bias[..., query, key] = scores[..., query, keys - 1 - distance]
    return bias


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (4, 9), (1, 5)])
def test_scores_by_distance_become_scores_by_key(queries, keys):
    torch.manual_seed(0)
    scores = torch.randn(2, 3, queries, keys, dtype=torch.float64)
    assert torch.equal(shift_causal(scores), shift_by_definition(scores))


@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (4, 7)])
def test_the_written_gradient_equals_autograd(queries, keys):
    torch.manual_seed(0)
    scores = torch.randn(2, queries, keys, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, queries, keys, dtype=torch.float64)
    (expected,) = torch.autograd.grad(shift_causal(scores), scores, grad)
    assert torch.equal(relative_shift._reference_backward(grad), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 13), (150, 300), (64, 1030)])
def test_the_kernel_equals_the_reference(queries, keys, dtype):
    torch.manual_seed(0)
    scores = torch.randn(2, 3, queries, keys, dtype=dtype, device="cuda", requires_grad=True)
    grad = torch.randn(2, 3, queries, keys, dtype=dtype, device="cuda")
    found = shift_causal(scores)
    assert found.stride(-2) % relative_shift.ALIGNMENT == 0
    assert torch.equal(found, relative_shift._reference(scores))
    (scores_grad,) = torch.autograd.grad(found, scores, grad)
    assert torch.equal(scores_grad, relative_shift._reference_backward(grad))
    assert relative_shift.RELATIVE_SHIFT_KERNEL.is_enabled
