"""Attention straight from a layer's products: plain attention, with gradients where the products want them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_kit import interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor

from dragoman.attention import CrossAttention, SelfAttention
from dragoman.ops import (
    attend_packed,
    attend_reference,
    enable_short_attention,
    packed_attention,
    short_attention,
)
from dragoman.ops.packed_attention import SplitHeads

SHAPES = [
    (5, None, 16),
    (17, None, 64),
    (6, 9, 16),
    (20, 7, 64),
    (1, 33, 32),
]  # queries, keys of another sequence, head width


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    """Switch the kernels on for each test, whatever another left behind."""
    enable_short_attention(True)
    yield
    enable_short_attention(False)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this way on a CPU too, by its equations."""
    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda asking: True)
    monkeypatch.setattr(packed_attention, "can_attend_short", lambda *_, dropout, **__: not dropout)


def products(
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


def error(asking: Tensor, told: Tensor | None, *, masked: bool, causal: bool) -> float:
    """Give the largest difference to plain attention in float64, of context and gradients, each against its largest number if past 1."""
    keys = asking.size(1) if told is None else told.size(1)
    mask = lengths_mask(keys, asking.device.type) if masked else None
    context = attend_packed(asking, told, heads=2, mask=mask, causal=causal, dropout=0.0)
    assert context is not None
    assert context.is_contiguous()
    given = [asking] if told is None else [asking, told]
    outer = torch.randn(context.shape, generator=torch.Generator().manual_seed(0)).to(context)
    ours = [context, *torch.autograd.grad(context, given, outer)]
    exact = [each.detach().double().requires_grad_() for each in given]
    parts = SplitHeads.split(exact[0], None if told is None else exact[1], 2)
    plain = attend_reference(*parts, mask=mask, causal=causal).context.transpose(1, 2).flatten(2)
    theirs = [plain, *torch.autograd.grad(plain, exact, outer.double())]
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_its_equations_are_plain_attention(
    anywhere: None, queries: int, keys: int | None, width: int, masked: bool
) -> None:
    given = products(queries, keys, width, torch.float64)
    assert error(*given, masked=masked, causal=keys is None) < 1e-12


def test_the_operators_keep_their_promises_to_the_compiler() -> None:
    """Shapes and strides without computing, no change to the inputs, gradients registered: PyTorch's own checks."""
    for keys in (None, 7):
        asking, told = products(5, keys, 16, torch.float32)
        torch.library.opcheck(
            torch.ops.dragoman.packed_attention.default, (asking, told, None, 2, False, 0.25)
        )
        outer = torch.randn(3, 5, 32)
        mask = torch.rand(3, 5 if keys is None else 7) > 0.3
        given = (
            outer,
            asking.detach(),
            None if told is None else told.detach(),
            mask,
            2,
            False,
            0.25,
        )
        torch.library.opcheck(torch.ops.dragoman.packed_attention_backward.default, given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
def test_layers_take_this_way_and_give_the_same(
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
    compiled = torch.compile(own, backend="aot_eager", fullgraph=True)(x, causal=True)
    torch.testing.assert_close(compiled, packed[0])
    monkeypatch.setattr(packed_attention, "_is_on_gpu", lambda asking: False)
    for one, two in zip(packed, outputs(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"kv_heads": 1}, {"talking_heads": True}, {"dropout": 0.5}, {"window": 3}]
)
def test_what_is_done_to_heads_one_by_one_goes_another_way(
    anywhere: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(
        torch.ops.dragoman,
        "packed_attention",
        lambda *_: pytest.fail("not for these kernels"),
        raising=False,
    )
    assert SelfAttention(32, 2, **changes).train()(torch.randn(2, 5, 32)).shape == (2, 5, 32)


def test_a_cpu_never_comes_here() -> None:
    asking, _ = products(5, None, 16, torch.bfloat16)
    assert attend_packed(asking, None, heads=2, mask=None, causal=False, dropout=0.0) is None


@needs_triton
def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_interpreted_kernels_are_plain_attention(
    anywhere: None, monkeypatch: pytest.MonkeyPatch, queries: int, keys: int | None, width: int
) -> None:
    monkeypatch.setattr(short_attention, "_can_run_triton", lambda query: True)
    for dtype, bound in [(torch.float32, 1e-5), (torch.float16, 0.002)]:
        assert (
            error(*products(queries, keys, width, dtype), masked=True, causal=keys is None) < bound
        )
    assert short_attention._enabled, "the kernels must not have failed"


@needs_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_kernels_on_a_gpu_are_plain_attention(
    queries: int, keys: int | None, width: int, masked: bool
) -> None:
    assert (
        error(
            *products(queries, keys, width, torch.bfloat16, "cuda"),
            masked=masked,
            causal=keys is None,
        )
        < 0.016
    )
    assert short_attention._enabled, "the kernels must not have failed"
