"""Fused attention and losses against reference implementations, and both against golden values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernel_kit import needs_gpu
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops import (
    IGNORE_INDEX,
    attend,
    attend_reference,
    build_attention_mask,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    masked_softmax,
)

MASKS = {
    "none": None,
    "keys": torch.tensor([[[True] * 5], [[True, True, True, False, False]]]),  # (B, 1, S)
    "pairs": torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(1)) > 0.3,
    "heads": torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(2)) > 0.3,
    "nothing": torch.tensor([[[True] * 5], [[False] * 5]]),
}


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_attention_equals_the_plain_one_in_outputs_and_gradients(
    name: str, causal: bool, has_bias: bool
) -> None:
    """Fast attention and inspectable attention are one function (pytorch/pytorch#88810)."""
    query, key, value, bias = tensors((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6), (3, 4, 5))
    options = {"mask": MASKS[name], "causal": causal, "bias": bias if has_bias else None}
    inputs = [query, key, value, *([bias] if has_bias else [])]
    fast = attend(query, key, value, **options)
    fast_grads = torch.autograd.grad((fast**2).sum(), inputs)
    plain = attend_reference(query, key, value, **options)
    plain_grads = torch.autograd.grad((plain.context**2).sum(), inputs)
    torch.testing.assert_close(fast, plain.context)
    for one, other in zip(fast_grads, plain_grads, strict=True):
        torch.testing.assert_close(one, other)
        assert one.isfinite().all()


def test_a_query_that_may_see_nothing_gets_zeros_from_both_forms() -> None:
    query, key, value = tensors((2, 3, 4, 6), (2, 3, 5, 6), (2, 3, 5, 6))
    plain = attend_reference(query, key, value, mask=MASKS["nothing"])
    assert not attend(query, key, value, mask=MASKS["nothing"])[1].any()
    assert not plain.context[1].any()
    assert not plain.weights[1].any()
    torch.testing.assert_close(plain.weights[0].sum(-1), torch.ones(3, 4, dtype=torch.float64))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 37])
def test_a_query_that_may_see_nothing_gets_zeros_from_a_gpus_kernels_too(
    size: int, dtype: torch.dtype
) -> None:
    query, key, value = (
        torch.randn(2, 4, size, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    mask = torch.ones(2, 1, size, dtype=torch.bool, device="cuda")
    mask[1] = False
    context = attend(query, key, value, mask=mask)
    assert not context[1].any()
    assert all(
        grad.isfinite().all() for grad in torch.autograd.grad(context.sum(), [query, key, value])
    )


def test_causal_queries_are_the_last_positions() -> None:
    query, key, value = tensors((1, 1, 5, 4), (1, 1, 5, 4), (1, 1, 5, 4))
    whole = attend(query, key, value, causal=True)
    torch.testing.assert_close(attend(query[:, :, 3:], key, value, causal=True), whole[:, :, 3:])
    torch.testing.assert_close(attend(query[:, :, 4:], key, value, causal=True), whole[:, :, 4:])


def test_visibility_is_none_when_everything_is_visible() -> None:
    device = torch.device("cpu")
    assert build_attention_mask(3, 3, None, False, device) is None
    assert build_attention_mask(1, 3, None, True, device) is None
    seen = build_attention_mask(2, 3, torch.tensor([[[True, False, True]]]), True, device)
    assert seen is not None
    assert seen.tolist() == [[[[True, False, False], [True, False, True]]]]


def test_scale_replaces_the_root_of_the_width() -> None:
    query, key, value = tensors((1, 1, 2, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    torch.testing.assert_close(
        attend(query, key, value, scale=1.0), attend_reference(query * 2, key, value).context
    )
    torch.testing.assert_close(
        attend_reference(query, key, value, scale=0.5).context, attend(query, key, value)
    )


def test_dropout_of_weights_keeps_their_mean() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 1, 2000, 4), torch.randn(1, 1, 8, 4), torch.ones(1, 1, 8, 4)
    dropped = attend_reference(query, key, value, dropout=0.5)
    assert dropped.context.mean().item() == pytest.approx(1.0, abs=0.05)
    assert (dropped.weights == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_scores_of_the_worked_example() -> None:
    """112 and 96 divided by 8 are 14 and 12, which become 0.88 and 0.12."""
    weights = masked_softmax(torch.tensor([112.0, 96.0]) / 8, None)
    torch.testing.assert_close(weights, torch.tensor([0.8808, 0.1192]), atol=5e-5, rtol=0)


@needs_gpu
def test_a_trained_bias_on_a_gpu_equals_the_reference() -> None:
    given = tensors((2, 3, 40, 16), (2, 3, 72, 16), (2, 3, 72, 16), (2, 3, 40, 72))
    query, key, value, bias = (each.detach().cuda().requires_grad_() for each in given)
    found = attend(query, key, value, bias=bias)
    expected = attend_reference(query, key, value, bias=bias).context
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sum(), [query, key, value, bias]),
        torch.autograd.grad(expected.sum(), [query, key, value, bias]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunked_loss_equals_the_definition(chunk: int, biased: bool, smoothing: float) -> None:
    hidden, weight, bias = tensors((7, 4), (9, 4), (9,))
    targets = torch.tensor([0, 8, IGNORE_INDEX, 3, 3, IGNORE_INDEX, 1])
    inputs = [hidden, weight, bias] if biased else [hidden, weight]
    fast = linear_cross_entropy(
        hidden, weight, bias if biased else None, targets, smoothing=smoothing, chunk=chunk
    )
    plain = linear_cross_entropy_reference(
        hidden, weight, bias if biased else None, targets, smoothing=smoothing
    )
    torch.testing.assert_close(fast.loss, plain.loss)
    torch.testing.assert_close(fast.nll, plain.nll)
    for one, other in zip(
        torch.autograd.grad(fast.loss * 3, inputs),
        torch.autograd.grad(plain.loss * 3, inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_gradient_of_the_chunked_loss_equals_finite_differences() -> None:
    hidden, weight, bias = tensors((5, 3), (6, 3), (6,))
    targets = torch.tensor([0, 5, IGNORE_INDEX, 3, 3])
    assert torch.autograd.gradcheck(
        lambda *x: linear_cross_entropy(*x, targets, smoothing=0.2, chunk=2).loss,
        (hidden, weight, bias),
    )


def test_loss_without_smoothing_is_pytorchs() -> None:
    hidden, weight = tensors((7, 4), (9, 4))
    targets = torch.tensor([0, 8, IGNORE_INDEX, 3, 3, 2, 1])
    expected = F.cross_entropy(
        hidden @ weight.T, targets, reduction="sum", ignore_index=IGNORE_INDEX
    )
    fast = linear_cross_entropy(hidden, weight, None, targets)
    torch.testing.assert_close(fast.loss, expected)
    torch.testing.assert_close(fast.nll, expected.detach())
    assert not fast.nll.requires_grad


def test_label_smoothing_spreads_the_rest_over_the_vocabulary() -> None:
    """With V = 5 and 0.1: 0.900 for the target, 0.025 for each other, as Tensor2Tensor and fairseq
    have it.
    """
    logits = torch.randn(1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor([0.025, 0.025, 0.9, 0.025, 0.025], dtype=torch.float64)
    loss = linear_cross_entropy(
        logits, torch.eye(5, dtype=torch.float64), None, torch.tensor([2]), smoothing=0.1
    ).loss
    torch.testing.assert_close(loss, -(wanted * logits.log_softmax(-1)).sum())


@pytest.mark.parametrize(("vocabulary", "bound"), [(10_000, 1.2461), (37_000, 1.3769)])
def test_smoothed_loss_has_its_known_lower_bound(vocabulary: int, bound: float) -> None:
    """The best possible model still pays the entropy of the wanted distribution."""
    logits = torch.full((1, vocabulary), math.log(0.1 / (vocabulary - 1)), dtype=torch.float64)
    logits[0, 7] = math.log(0.9)
    weight = logits.T.contiguous()
    loss = linear_cross_entropy(
        torch.ones(1, 1, dtype=torch.float64), weight, None, torch.tensor([7]), smoothing=0.1
    ).loss
    assert loss.item() == pytest.approx(bound, abs=5e-5)


@pytest.mark.parametrize("chunk", [64, 512])  # sums of five parts, and all at once
def test_loss_under_autocast_is_summed_in_float32_and_close(chunk: int) -> None:
    hidden, weight = tensors((300, 16), (50, 16), dtype=torch.float32)
    targets = torch.arange(300) % 50
    exact = linear_cross_entropy_reference(hidden, weight, None, targets, smoothing=0.1)
    exact_grads = torch.autograd.grad(exact.loss, [hidden, weight])
    with torch.autocast("cpu", torch.bfloat16):
        half = linear_cross_entropy(hidden, weight, None, targets, smoothing=0.1, chunk=chunk)
    assert half.loss.dtype is torch.float32
    torch.testing.assert_close(half.loss, exact.loss, rtol=2e-3, atol=0)
    for one, other in zip(
        torch.autograd.grad(half.loss, [hidden, weight]), exact_grads, strict=True
    ):
        assert one.dtype is torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_loss_without_gradients_and_without_rows() -> None:
    hidden, weight = tensors((3, 4), (5, 4))
    with torch.no_grad():
        assert not linear_cross_entropy(
            hidden, weight, None, torch.tensor([1, 2, 3])
        ).loss.requires_grad
    nothing = linear_cross_entropy(hidden[:0], weight, None, torch.tensor([], dtype=torch.long))
    assert nothing.loss.item() == 0
    assert not torch.autograd.grad(nothing.loss, [weight])[0].any()
    (grad,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, None, torch.full((3,), IGNORE_INDEX)).loss, [weight]
    )
    assert not grad.any()


def test_only_wanted_gradients_are_computed() -> None:
    hidden, weight = tensors((3, 4), (5, 4))
    loss = linear_cross_entropy(hidden, weight.detach(), None, torch.tensor([1, 2, 3])).loss
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_training_in_bfloat16_on_a_cpu_gives_the_fused_numbers(
    masked: bool, has_bias: bool
) -> None:
    shapes = ((2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8), (3, 4, 5))
    query, key, value, bias = tensors(*shapes, dtype=torch.bfloat16)
    mask = MASKS["keys"] if masked else None
    options = {"mask": mask, "bias": bias if has_bias else None}
    fused = attend(query.detach(), key.detach(), value.detach(), **options)
    torch.testing.assert_close(attend(query, key, value, **options), fused, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (6, {}),
        (6, {"causal": True}),
        (6, {"mask": torch.ones(1, 1, 6, dtype=torch.bool)}),
        (6, {"bias": torch.zeros(1, 2, 6, 6)}),
        (6, {"window": 2}),
        (250, {"window": 2}),  # in blocks
    ],
)
def test_every_form_of_attention_has_dropout(length: int, options: dict[str, Any]) -> None:
    """Weights sum to one, so that values of one stay ones unless weights are dropped."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4), torch.ones(4)
    value = value.expand_as(key)
    torch.testing.assert_close(attend(query, key, value, **options), value)
    dropped = attend(query, key, value, dropout=0.5, **options)
    assert (dropped - 1).abs().max() > 0.1


def test_training_in_bfloat16_on_a_cpu_takes_scale_and_dropout() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, 2, 6, 16, dtype=torch.bfloat16) for _ in range(2))
    value = torch.eye(6, 16, dtype=torch.bfloat16).expand_as(key)
    query.requires_grad_()
    weights = attend(query, key, value, scale=1.0)[..., :6]
    torch.testing.assert_close(
        weights.float(), (query.float() @ key.float().mT).softmax(-1), atol=0.02, rtol=0.05
    )
    assert (attend(query, key, value, dropout=0.5)[..., :6] == 0).float().mean() > 0.2
