"""Attention on packed projections equals plain attention, with packed gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_kit import interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor

from dragoman.attention import CrossAttention, SelfAttention
from dragoman.ops import (
    attend_packed,
    attend_reference,
    attention,
    packed_qkv_short_sequence_attention,
)
from dragoman.ops.packed_qkv_short_sequence_attention import SplitHeads
from dragoman.ops.short_sequence_attention import SHORT_ATTENTION_KERNEL

SHAPES = [
    (5, None, 16),
    (17, None, 64),
    (6, 9, 16),
    (20, 7, 64),
    (1, 33, 32),
]  # queries, keys of another sequence, head width


@pytest.fixture(autouse=True)
def enabled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the kernel for each test, whatever another left behind."""
    monkeypatch.setattr(SHORT_ATTENTION_KERNEL, "is_enabled", True)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the operator on a CPU too, where it computes its equations."""
    monkeypatch.setattr(attention, "_can_use_short_kernels", lambda query, cuda_graphs: True)
    monkeypatch.setattr(
        packed_qkv_short_sequence_attention, "is_supported", lambda *_, dropout, **__: not dropout
    )
    monkeypatch.setattr(
        "dragoman.ops.short_sequence_attention.is_supported", lambda *_, **__: False
    )


def projections(
    queries: int, keys: int | None, width: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(queries)
    sizes = [(queries, 3)] if keys is None else [(queries, 1), (keys, 2)]
    made = [
        torch.randn(3, length, parts * 2 * width, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for length, parts in sizes
    ]
    return made[0], None if keys is None else made[1]


def lengths_mask(keys: int, device: str) -> Tensor:
    return (
        (torch.arange(keys) < torch.tensor([keys, max(1, keys // 2), 1]).unsqueeze(1))
        .unsqueeze(1)
        .to(device)
    )


def error(
    packed_query: Tensor, packed_key_value: Tensor | None, *, masked: bool, causal: bool
) -> float:
    """Return the largest relative error of context and gradients against float64."""
    keys = packed_query.size(1) if packed_key_value is None else packed_key_value.size(1)
    mask = lengths_mask(keys, packed_query.device.type) if masked else None
    context = attend_packed(
        packed_query, packed_key_value, heads=2, mask=mask, causal=causal, cuda_graphs=True
    )
    assert "packed_attention" in context.grad_fn.name()
    assert context.is_contiguous()
    given = [packed_query] if packed_key_value is None else [packed_query, packed_key_value]
    outer = torch.randn(context.shape, generator=torch.Generator().manual_seed(0)).to(context)
    ours = [context, *torch.autograd.grad(context, given, outer)]
    exact = [each.detach().double().requires_grad_() for each in given]
    parts = SplitHeads.split(exact[0], None if packed_key_value is None else exact[1], 2)
    plain = attend_reference(*parts, mask=mask, causal=causal).context.transpose(1, 2).flatten(2)
    theirs = [plain, *torch.autograd.grad(plain, exact, outer.double())]
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_reference_equals_plain_attention(
    anywhere: None, queries: int, keys: int | None, width: int, masked: bool
) -> None:
    given = projections(queries, keys, width, torch.float64)
    assert error(*given, masked=masked, causal=keys is None) < 1e-12


def test_operators_pass_opcheck() -> None:
    """PyTorch's own checks: fake shapes and strides, no mutation, registered gradients."""
    for keys in (None, 7):
        packed_query, packed_key_value = projections(5, keys, 16, torch.float32)
        torch.library.opcheck(
            torch.ops.dragoman.packed_attention.default,
            (packed_query, packed_key_value, None, 2, False, 0.25),
        )
        outer = torch.randn(3, 5, 32)
        mask = torch.rand(3, 5 if keys is None else 7) > 0.3
        given = (
            outer,
            packed_query.detach(),
            None if packed_key_value is None else packed_key_value.detach(),
            mask,
            2,
            False,
            0.25,
        )
        torch.library.opcheck(torch.ops.dragoman.packed_attention_backward.default, given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
def test_layers_use_the_operator_with_equal_results(
    anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, memory = torch.randn(3, 6, 32), torch.randn(3, 9, 32)
    own, other = SelfAttention(32, 2), CrossAttention(32, 2)
    mask = lengths_mask(9, "cpu")

    def outputs() -> list[Tensor]:
        found = [own(x, causal=True), other(x, memory, mask=mask)]
        return [
            *found,
            *torch.autograd.grad(
                sum(each.square().sum() for each in found), [*own.parameters(), *other.parameters()]
            ),
        ]

    packed = outputs()
    torch._dynamo.reset()  # another test may have made it skip the layer
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)(x, causal=True)
    torch.testing.assert_close(compiled, packed[0])
    monkeypatch.setattr(attention, "_can_use_short_kernels", lambda query, cuda_graphs: False)
    for one, two in zip(packed, outputs(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 1}, {"talking_heads": True}, {"dropout": 0.5}, {"window": 3}]
)
def test_other_forms_of_attention_do_not_use_the_operator(
    anywhere: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(
        torch.ops.dragoman,
        "packed_attention",
        lambda *_: pytest.fail("not for these kernels"),
        raising=False,
    )
    assert SelfAttention(32, 2, **changes).train()(torch.randn(2, 5, 32)).shape == (2, 5, 32)


@pytest.mark.parametrize("keys", [None, 7])
def test_the_operator_is_not_used_on_a_cpu(keys: int | None) -> None:
    packed_query, packed_key_value = projections(5, keys, 16, torch.float64)
    context = attend_packed(packed_query, packed_key_value, heads=2, cuda_graphs=True)
    assert "packed_attention" not in context.grad_fn.name()
    plain = attend_reference(*SplitHeads.split(packed_query, packed_key_value, 2)).context
    torch.testing.assert_close(context, plain.transpose(1, 2).flatten(2))


@needs_triton
def test_kernels_in_the_triton_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_interpreted_kernels_equal_plain_attention(
    anywhere: None, monkeypatch: pytest.MonkeyPatch, queries: int, keys: int | None, width: int
) -> None:
    monkeypatch.setattr(SHORT_ATTENTION_KERNEL, "can_run", lambda query: True)
    for dtype, bound in [(torch.float32, 1e-5), (torch.float16, 0.002)]:
        assert (
            error(*projections(queries, keys, width, dtype), masked=True, causal=keys is None)
            < bound
        )
    assert SHORT_ATTENTION_KERNEL.is_enabled, "the kernels must not have failed"


@needs_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_kernels_on_a_gpu_equal_plain_attention(
    queries: int, keys: int | None, width: int, masked: bool
) -> None:
    assert (
        error(
            *projections(queries, keys, width, torch.bfloat16, "cuda"),
            masked=masked,
            causal=keys is None,
        )
        < 0.016
    )
    assert SHORT_ATTENTION_KERNEL.is_enabled, "the kernels must not have failed"
