"""Transformer-XL's relative shift: against the definition, its gradient, and its kernel."""

from __future__ import annotations

import math

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
    assert torch.equal(relative_shift.shift_back(grad), expected)


def behind_rows(bias):
    """Return the columns between the end of each row and the next."""
    width = bias.stride(-2)
    rows = bias.as_strided((*bias.shape[:-1], width), bias.stride())
    return rows[..., bias.size(-1) :]


@pytest.mark.parametrize(("queries", "keys"), [(3, 8), (4, 9), (122, 250)])
def test_rows_are_aligned_with_zeros_behind_them(queries, keys):
    scores = torch.randn(2, 3, queries, keys)
    found = torch.ops.dragoman.relative_shift(scores)
    assert torch.equal(found, relative_shift._reference(scores))
    assert found.stride(-2) % relative_shift.ALIGNMENT == 0
    assert behind_rows(found).shape[-1] == -keys % relative_shift.ALIGNMENT
    assert not behind_rows(found).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 13), (150, 300), (64, 1025)])
def test_the_kernel_equals_the_reference(queries, keys, dtype):
    torch.manual_seed(0)
    torch.full((2, 3, queries, keys + 7), math.nan, dtype=dtype, device="cuda")  # freed, reused
    scores = torch.randn(2, 3, queries, keys, dtype=dtype, device="cuda", requires_grad=True)
    grad = torch.randn(2, 3, queries, keys, dtype=dtype, device="cuda")
    found = shift_causal(scores)
    assert found.stride(-2) % relative_shift.ALIGNMENT == 0
    assert torch.equal(found, relative_shift._reference(scores))
    assert not behind_rows(found.detach()).any()
    (scores_grad,) = torch.autograd.grad(found, scores, grad)
    assert torch.equal(scores_grad, relative_shift.shift_back(grad))
    assert relative_shift.RELATIVE_SHIFT_KERNEL.is_enabled
