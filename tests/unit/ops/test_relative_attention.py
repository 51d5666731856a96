"""Attention with scores by distance equals plain attention with shifted scores, dropout included.

The kernels run in Triton's interpreter where Triton is installed, in float16 and float32 (it has no
bfloat16), and compiled on a GPU.
"""

from __future__ import annotations

import sys

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dragoman.ops import attend, attend_reference, relative_attention, shift_causal
from dragoman.ops.dropout import hash_positions
from dragoman.ops.relative_attention import (
    RELATIVE_ATTENTION_KERNEL,
    attend_by_distance,
    is_supported,
)

SHAPES = [  # queries, keys, head width
    (1, 1, 16), (5, 5, 16), (16, 16, 40), (17, 33, 32), (64, 64, 64), (64, 128, 40),
    (65, 130, 16), (57, 185, 40), (128, 256, 40), (70, 300, 128),
]  # fmt: skip


@pytest.fixture(autouse=True)
def enabled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the kernel for each test, and forget what it was verified for."""
    monkeypatch.setattr(RELATIVE_ATTENTION_KERNEL, "is_enabled", True)
    monkeypatch.setattr(RELATIVE_ATTENTION_KERNEL, "_verified", set())


def draw(
    queries: int, keys: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """Draw queries, keys, values and scores by distance; only the last are contiguous."""
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    rows, count = 2, 3
    heads = [
        torch.randn(rows, length, count, width, generator=generator)
        .to(device, dtype)
        .transpose(1, 2)
        .requires_grad_()
        for length in (queries, keys, keys)
    ]
    scores = torch.randn(rows, count, queries, keys, generator=generator)
    return [*heads, scores.to(device, dtype).requires_grad_()]


def plain_attention(inputs: list[Tensor], keep: Tensor | None, dropout: float) -> Tensor:
    """Attend in float64 by the definition, with the weights that dropout keeps."""
    query, key, value, scores = inputs
    weights = attend_reference(query, key, value, bias=shift_causal(scores)).weights
    if keep is not None:
        weights = torch.where(keep, weights / (1 - dropout), 0.0)
    return weights @ value


def errors(inputs: list[Tensor], dropout: float = 0.0) -> float:
    """Return the largest error of context and gradients against plain attention in float64.

    Errors are relative to a tensor's largest absolute value where that exceeds 1.
    """
    torch.manual_seed(1)
    context = attend_by_distance(*inputs, dropout=dropout)
    outer = torch.randn(context.shape, generator=torch.Generator().manual_seed(0)).to(context)
    ours = [context, *torch.autograd.grad(context, inputs, outer)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    torch.manual_seed(1)
    keep = None
    if dropout:
        seeds = relative_attention.draw_seeds(context.device)
        keep = hash_positions(inputs[3].shape, seeds) >= round(dropout * 2**32) - 2**31
    plain = plain_attention(exact, keep, dropout)
    theirs = [plain, *torch.autograd.grad(plain, exact, outer.double())]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.isfinite().all()
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES[:6])
def test_the_operators_equations_are_plain_attention(
    queries: int, keys: int, width: int, dropout: float
) -> None:
    assert errors(draw(queries, keys, width, torch.float64), dropout) < 1e-12


def test_dropout_drops_its_fraction_of_the_weights() -> None:
    query, key, _, scores = draw(64, 128, 16, torch.float64)
    value = torch.eye(128, dtype=torch.float64).expand(2, 3, 128, 128)  # the context is the weights
    visible = torch.ones(64, 128, dtype=torch.bool).tril(64)
    dropped = relative_attention._drop(
        attend_reference(query, key, value, bias=shift_causal(scores)).weights,
        relative_attention.draw_seeds(query.device),
        0.3,
    )
    assert (dropped[..., visible] == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)


def test_operator_passes_opcheck() -> None:
    """Shapes and strides without computing, no change to the inputs, gradients registered."""
    inputs = draw(5, 7, 16, torch.float32)
    seeds = torch.tensor([3, -4])
    operators = torch.ops.dragoman
    torch.library.opcheck(operators.relative_attention.default, (*inputs, seeds, 0.1, 0.25))
    constants = [each.detach() for each in inputs]
    context, log_sums = operators.relative_attention(*constants, None, 0.0, 0.25)
    torch.library.opcheck(
        operators.relative_attention_backward.default,
        (torch.randn_like(context), *constants, None, context, log_sums, 0.0, 0.25),
    )


def test_supported_shapes_and_dtypes() -> None:
    """Checked with fake CUDA tensors."""

    def supports(
        queries: int = 128,
        keys: int = 256,
        width: int = 40,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        distances: int = 0,
    ) -> bool:
        heads = [
            torch.empty(2, 4, n, width, dtype=dtype, device=device) for n in (queries, keys, keys)
        ]
        scores = torch.empty(2, 4, queries, distances or keys, dtype=dtype, device=device)
        return is_supported(*heads, scores)

    with FakeTensorMode():
        assert supports()
        assert supports(dtype=torch.float16)
        assert supports(256, 256, 128)
        assert not supports(device="cpu")
        assert not supports(dtype=torch.float32)
        assert not supports(1)  # decoding
        assert not supports(300)
        assert not supports(width=256)
        assert not supports(distances=300)
        RELATIVE_ATTENTION_KERNEL.is_enabled = False
        assert not supports()


def test_attend_takes_scores_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operator, or with a mask by PyTorch's attention."""
    query, key, value, scores = draw(6, 9, 16, torch.float64)
    expected = plain_attention([query, key, value, scores], None, 0.0)
    found = attend(query, key, value, causal=True, distance_scores=scores)
    torch.testing.assert_close(found, expected)
    monkeypatch.setattr(relative_attention, "is_supported", lambda *_: True)
    found = attend(query, key, value, causal=True, distance_scores=scores)
    assert found.grad_fn is not None
    assert "relative_attention" in found.grad_fn.name()
    torch.testing.assert_close(found, expected)
    mask = torch.ones(2, 1, 9, dtype=torch.bool)
    mask[0, 0, :2] = False
    found = attend(query, key, value, mask=mask, causal=True, distance_scores=scores)
    hidden = attend_reference(query, key, value, mask=mask, bias=shift_causal(scores)).context
    torch.testing.assert_close(found, hidden)


def test_failing_kernels_are_logged_once_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, module = RELATIVE_ATTENTION_KERNEL, "dragoman.ops.triton.relative_attention_kernels"
    monkeypatch.setattr(kernel, "can_run", lambda query: kernel.is_enabled)
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    monkeypatch.delattr(module, raising=False)
    for _ in range(2):
        assert errors(draw(5, 9, 16, torch.float64)) < 1e-12
    (message,) = [record.getMessage() for record in caplog.records]
    assert "relative positions" in message
    assert "falling back to PyTorch" in message


@needs_triton
def test_kernels_in_the_triton_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_interpreted_kernels_equal_plain_attention(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, width: int, dropout: float
) -> None:
    monkeypatch.setattr(RELATIVE_ATTENTION_KERNEL, "can_run", lambda query: True)
    for dtype, bound in [(torch.float32, 1e-5), (torch.float16, 0.004)]:
        assert errors(draw(queries, keys, width, dtype), dropout) < bound
    assert RELATIVE_ATTENTION_KERNEL.is_enabled, "the kernels must not have failed"


@needs_triton
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("name", ["_forward", "_backward_keys", "_backward_queries"])
def test_kernels_compile_for_hopper(name: str, width: int, dropout: bool) -> None:
    """The interpreter accepts Python that the compiler does not."""
    from dragoman.ops.triton import relative_attention_kernels as kernels

    options = kernels.launch_options(width, dropout)
    if name == "_backward_queries":
        options["COLUMNS"] = kernels.NARROW_TILE
    tensors = ("query", "key", "value", "context", "by_distance", "grad_output", "grad_query")
    types = dict.fromkeys((*tensors, "grad_key", "grad_value", "grad_scores"), "*bf16")
    types |= {"log_sums": "*fp32", "delta": "*fp32", "seeds": "*i64"}
    kernel = getattr(kernels, name)
    built = compile_for_hopper(
        kernel,
        {key: value for key, value in options.items() if key.isupper()},
        types | dict.fromkeys(("scale", "log2_scale", "keep_scale"), "fp32"),
        aligned=set(types) & set(kernel.arg_names),
        num_warps=options["num_warps"],
        num_stages=2 if name == "_forward" else 1,
    )
    assert "mma" in built.asm["ptx"]  # tensor cores
    assert "ld.global.v4" in built.asm["ptx"] or "cp.async" in built.asm["ptx"]  # 16 bytes
    assert built.metadata.shared <= 99 * 1024  # what the smallest cards give a program


@needs_gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "keys", "width"), [*SHAPES[2:], (512, 1024, 64)])
def test_kernels_on_a_gpu_are_plain_attention(
    queries: int, keys: int, width: int, dropout: float, dtype: torch.dtype
) -> None:
    inputs = draw(queries, keys, width, dtype, "cuda")
    assert errors(inputs, dropout) < (0.03 if dtype is torch.bfloat16 else 0.004)
    assert RELATIVE_ATTENTION_KERNEL.is_enabled, "the kernels must not have failed"


@needs_gpu
def test_kernels_on_a_gpu_are_captured() -> None:
    """Replayed from a CUDA graph: other inputs, and another dropout mask each time."""
    inputs = draw(64, 128, 40, torch.bfloat16, "cuda")

    def run(dropout: float) -> list[Tensor]:
        context = attend_by_distance(*inputs, dropout=dropout)
        return [context, *torch.autograd.grad(context.square().sum(), inputs)]

    run(0.0)
    run(0.3)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, dropped = run(0.0), run(0.3)
    with torch.no_grad():
        for each in inputs:
            each.copy_(torch.randn_like(each))
    graph.replay()
    exact = [each.detach().double().requires_grad_() for each in inputs]
    plain = plain_attention(exact, None, 0.0)
    expected = [plain, *torch.autograd.grad(plain.square().sum(), exact)]
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() < 0.02 * other.norm()
    first = dropped[0].clone()
    graph.replay()
    assert not torch.equal(first, dropped[0])
