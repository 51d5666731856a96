"""Attention kernels for short sentences equal plain attention, and fall back to it on failure.

The kernels run in Triton's interpreter where Triton is installed, in float16 and float32 (it has no
bfloat16), and compiled on a GPU.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor
from torch._subclasses import FakeTensorMode

from dragoman.ops import attend, attend_reference, attention, short_sequence_attention
from dragoman.ops.short_sequence_attention import SHORT_ATTENTION_KERNEL, attend_short, is_supported

SHAPES = [  # queries, keys, head width
    (1, 1, 16), (5, 5, 16), (16, 16, 64), (17, 9, 32), (9, 17, 64), (1, 30, 64),
    (33, 33, 64), (40, 24, 64), (3, 128, 32), (128, 5, 32), (64, 64, 128), (128, 128, 64),
]  # fmt: skip

attend_captured = functools.partial(attend, cuda_graphs=True)  # as under CUDA graphs


@pytest.fixture(autouse=True)
def enabled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the kernel for each test, whatever another left behind."""
    monkeypatch.setattr(SHORT_ATTENTION_KERNEL, "is_enabled", True)


def heads(
    queries: int,
    keys: int,
    width: int,
    dtype: torch.dtype,
    device: str = "cpu",
    rows: int = 2,
    count: int = 3,
) -> list[Tensor]:
    """Split queries, keys and values from packed projections: none of them is contiguous."""
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    asked, told = (
        torch.randn(rows, length, 3 * count * width, generator=generator)
        for length in (queries, keys)
    )
    parts = [
        x.to(device, dtype).view(rows, x.size(1), 3, count, width).permute(0, 2, 3, 1, 4)
        for x in (asked, told)
    ]
    return [
        parts[0][:, 0].requires_grad_(),
        parts[1][:, 1].requires_grad_(),
        parts[1][:, 2].requires_grad_(),
    ]


def key_mask(name: str, keys: int, device: str = "cpu", rows: int = 2) -> Tensor | None:
    """Return a key mask of the given kind."""
    if name == "none":
        return None
    lengths = torch.tensor([keys] + [max(1, keys // 2)] * (rows - 1))
    mask = torch.arange(keys) < lengths.unsqueeze(1)
    if name == "holes":
        mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(keys)) > 0.4
    if name == "nothing":
        mask[-1] = False
    return mask.unsqueeze(1).to(device)


def errors(
    inputs: list[Tensor],
    mask: Tensor | None,
    *,
    causal: bool,
    scale: float | None = None,
    attending: Any = attend_short,
) -> float:
    """Return the largest error of context and gradients against plain attention in float64.

    Errors are relative to a tensor's largest absolute value where that exceeds 1.
    """
    context = attending(*inputs, mask=mask, causal=causal, scale=scale)
    outer = torch.randn(context.shape, generator=torch.Generator().manual_seed(0)).to(context)
    ours = [context, *torch.autograd.grad(context, inputs, outer)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    plain = attend_reference(*exact, mask=mask, causal=causal, scale=scale).context
    theirs = [plain, *torch.autograd.grad(plain, exact, outer.double())]
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.isfinite().all()
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["none", "ends", "holes", "nothing"])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES[:6])
def test_the_operators_equations_are_plain_attention(
    queries: int, keys: int, width: int, name: str, causal: bool
) -> None:
    assert (
        errors(heads(queries, keys, width, torch.float64), key_mask(name, keys), causal=causal)
        < 1e-12
    )


def test_the_operator_rounds_once() -> None:
    """In half precision only the result is rounded, and nothing in between: half an ulp."""
    assert errors(heads(20, 20, 64, torch.bfloat16), key_mask("ends", 20), causal=True) < 2**-8


def test_scale_and_masks_of_four_axes() -> None:
    inputs = heads(6, 6, 16, torch.float64)
    assert errors(inputs, None, causal=True, scale=0.3) < 1e-12
    mask = key_mask("holes", 6)
    assert mask is not None
    assert torch.equal(
        attend_short(*inputs, mask=mask.unsqueeze(1)), attend_short(*inputs, mask=mask)
    )
    shared = mask[:1]  # one row for all sentences
    torch.testing.assert_close(
        attend_short(*inputs, mask=shared), attend_reference(*inputs, mask=shared).context
    )


def test_operator_passes_opcheck() -> None:
    """Shapes and strides without computing, no change to the inputs, gradients registered:
    PyTorch's own checks.
    """
    inputs = heads(5, 7, 16, torch.float32)
    mask = torch.rand(2, 7) > 0.3
    torch.library.opcheck(torch.ops.dragoman.short_attention.default, (*inputs, mask, False, 0.25))
    outer = torch.randn(2, 3, 5, 16)
    torch.library.opcheck(
        torch.ops.dragoman.short_attention_backward.default,
        (outer, *(x.detach() for x in inputs), None, True, 0.25),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
def test_attend_short_compiles_into_one_graph() -> None:
    inputs = heads(5, 7, 16, torch.float64)
    mask = key_mask("ends", 7)
    compiled = torch.compile(attend_short, backend="aot_eager", fullgraph=True)
    assert errors(inputs, mask, causal=True, attending=compiled) < 1e-12


def test_only_inputs_are_saved_for_the_backward_pass() -> None:
    inputs, kept = heads(5, 7, 16, torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.append(x.data_ptr()), x)[1], lambda x: x
    ):
        context = attend_short(*inputs)
    assert set(kept) == {each.data_ptr() for each in inputs}
    assert context.transpose(1, 2).is_contiguous()  # concatenating the heads copies nothing


def test_supported_shapes_and_dtypes() -> None:
    """Checked with fake CUDA tensors."""

    def supports(queries: int = 20, keys: int = 20, width: int = 64, **changed: Any) -> bool:
        dtype, device = changed.pop("dtype", torch.bfloat16), changed.pop("device", "cuda")
        grad = changed.pop("grad", True)
        query, key, value = (
            torch.empty(2, 4, n, width, dtype=dtype, device=device, requires_grad=grad)
            for n in (queries, keys, keys)
        )
        return is_supported(
            query, key, value, **{"mask": None, "dropout": 0.0, "bias": None, **changed}
        )

    with FakeTensorMode():
        assert supports()
        assert supports(dtype=torch.float16)
        assert supports(64, 64)
        assert supports(mask=torch.empty(2, 1, 20, dtype=torch.bool, device="cuda"))
        assert supports(mask=torch.empty(1, 1, 1, 20, dtype=torch.bool, device="cuda"))
        assert not supports(device="cpu")
        assert not supports(dtype=torch.float32)
        assert not supports(65, 20)
        assert not supports(20, 65)
        assert not supports(20, 0)
        assert not supports(width=48)
        assert not supports(100, 100, width=128)  # four tiles would not fit
        assert not supports(grad=False)
        assert not supports(dropout=0.1)
        assert not supports(bias=torch.empty(1, 4, 20, 20, device="cuda"))
        assert not supports(mask=torch.empty(2, 20, 20, dtype=torch.bool, device="cuda"))
        assert not supports(mask=torch.empty(2, 4, 1, 20, dtype=torch.bool, device="cuda"))
        assert not supports(mask=torch.empty(20, 20, dtype=torch.bool, device="cuda"))
        SHORT_ATTENTION_KERNEL.is_enabled = False
        assert not supports()


def test_attend_uses_the_operator_where_it_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(attention, "_can_use_short_kernels", lambda query, cuda_graphs: True)
    monkeypatch.setattr(
        short_sequence_attention, "is_supported", lambda *_, **named: asked.update(named) or True
    )
    inputs, mask = heads(6, 7, 16, torch.float64), key_mask("nothing", 7)
    attend_in_graphs = functools.partial(attend, cuda_graphs=True)
    context = attend_in_graphs(*inputs, mask=mask, causal=True, scale=0.3, dropout=0.0)
    assert asked == {"mask": mask, "dropout": 0.0, "bias": None}
    assert context.grad_fn is not None
    assert "short_attention" in context.grad_fn.name()
    assert errors(inputs, mask, causal=True, scale=0.3, attending=attend_in_graphs) < 1e-12


def test_attend_uses_the_operator_only_on_gpus_under_cuda_graphs() -> None:
    with FakeTensorMode():
        query = torch.empty(2, 4, 5, 64, device="cuda")
    assert attention._can_use_short_kernels(query, True)
    assert not attention._can_use_short_kernels(query, False)
    assert not attention._can_use_short_kernels(torch.empty(2, 4, 5, 64), True)


def test_failing_kernels_are_logged_once_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing package or compiler, an old driver: the result is the same."""
    monkeypatch.setattr(
        SHORT_ATTENTION_KERNEL, "can_run", lambda query: SHORT_ATTENTION_KERNEL.is_enabled
    )
    monkeypatch.setitem(
        sys.modules, "dragoman.ops.triton.short_sequence_attention_kernels", None
    )  # importing it fails
    monkeypatch.delattr("dragoman.ops.triton.short_sequence_attention_kernels", raising=False)
    for _ in range(2):
        assert errors(heads(5, 5, 16, torch.float64), None, causal=True) < 1e-12
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "Error" in told[0]
    assert "short_sequence_attention_kernels" in told[0]  # what was found
    assert "falling back to PyTorch" in told[0]


def test_kernels_that_fail_in_the_backward_pass_are_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = heads(5, 5, 16, torch.float64)
    context = attend_short(*inputs)
    monkeypatch.setattr(
        SHORT_ATTENTION_KERNEL, "can_run", lambda query: SHORT_ATTENTION_KERNEL.is_enabled
    )
    monkeypatch.setitem(sys.modules, "dragoman.ops.triton.short_sequence_attention_kernels", None)
    monkeypatch.delattr("dragoman.ops.triton.short_sequence_attention_kernels", raising=False)
    grads = torch.autograd.grad(context.sum(), inputs)
    plain = torch.autograd.grad(attend_reference(*inputs).context.sum(), inputs)
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one, other)
    assert len(caplog.records) == 1


@needs_triton
def test_kernels_in_the_triton_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["none", "ends", "holes", "nothing"])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_interpreted_kernels_equal_plain_attention(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, width: int, name: str, causal: bool
) -> None:
    monkeypatch.setattr(SHORT_ATTENTION_KERNEL, "can_run", lambda query: True)
    for dtype, bound in [(torch.float32, 1e-5), (torch.float16, 0.002)]:
        assert (
            errors(heads(queries, keys, width, dtype), key_mask(name, keys), causal=causal) < bound
        )
    assert SHORT_ATTENTION_KERNEL.is_enabled, "the kernels must not have failed"


@interpreted
def test_interpreted_kernels_take_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided heads, expanded heads, and an expanded gradient."""
    monkeypatch.setattr(SHORT_ATTENTION_KERNEL, "can_run", lambda query: True)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 16, 5, generator=generator).mT.requires_grad_()
    key, value = (
        torch.randn(2, 1, 7, 16, generator=generator).expand(2, 3, 7, 16).requires_grad_()
        for _ in range(2)
    )
    mask = (torch.rand(2, 1, 14, generator=generator) > 0.3)[..., ::2]
    assert errors([query, key, value], mask, causal=False, scale=0.7) < 1e-5
    grads = torch.autograd.grad(attend_short(query, key, value).sum(), [query, key, value])
    plain = torch.autograd.grad(
        attend_reference(query, key, value).context.sum(), [query, key, value]
    )
    for one, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert SHORT_ATTENTION_KERNEL.is_enabled, "the kernels must not have failed"


@needs_triton
@pytest.mark.parametrize(
    ("name", "rows", "warps"),
    [("_forward", 32, 1), ("_backward", 32, 2), ("_forward", 128, 4), ("_backward", 128, 8)],
)
def test_kernels_compile_for_hopper(name: str, rows: int, warps: int) -> None:
    """The interpreter accepts Python that the compiler does not."""
    from dragoman.ops.triton import short_sequence_attention_kernels

    kernel = getattr(short_sequence_attention_kernels, name)
    constants = {"CAUSAL": True, "MASKED": True, "TILE_T": rows, "TILE_S": rows, "WIDTH": 64}
    types = {"mask": "*u8", "scale": "fp32", "log2_scale": "fp32"}
    types |= dict.fromkeys(
        ("query", "key", "value", "context", "grad_output", "grad_query", "grad_key", "grad_value"),
        "*bf16",
    )
    built = compile_for_hopper(kernel, constants, types, num_warps=warps, num_stages=1)
    assert "mma" in built.asm["ptx"]  # tensor cores
    assert (
        built.metadata.shared <= 99 * 1024
    )  # what the smallest cards of the last years give a program


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["none", "ends", "holes", "nothing"])
@pytest.mark.parametrize(("queries", "keys", "width"), SHAPES)
def test_kernels_on_a_gpu_are_plain_attention(
    queries: int, keys: int, width: int, name: str, causal: bool, dtype: torch.dtype
) -> None:
    inputs = heads(queries, keys, width, dtype, "cuda", rows=3, count=4)
    bound = 0.016 if dtype is torch.bfloat16 else 0.002
    assert (
        errors(
            inputs, key_mask(name, keys, "cuda", rows=3), causal=causal, attending=attend_captured
        )
        < bound
    )
    assert SHORT_ATTENTION_KERNEL.is_enabled, "the kernels must not have failed"


@needs_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kernels_on_a_gpu_compiled_and_captured() -> None:
    """In a compiled graph without a break, and replayed from a CUDA graph with other inputs."""
    inputs = heads(20, 20, 64, torch.bfloat16, "cuda", rows=3)
    assert (
        errors(inputs, None, causal=True, attending=torch.compile(attend_captured, fullgraph=True))
        < 0.016
    )
    query, key, value = (x.detach().clone().requires_grad_() for x in inputs)
    attend_captured(query, key, value).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    query.grad = key.grad = value.grad = None
    with torch.cuda.graph(graph):
        context = attend_captured(query, key, value)
        grads = torch.autograd.grad(context.square().sum(), [query, key, value])
    with torch.no_grad():
        for each in (query, key, value):
            each.copy_(torch.randn_like(each))
    graph.replay()
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    plain = attend_reference(*exact).context
    torch.testing.assert_close(context.double(), plain, atol=0.03, rtol=0.03)
    for one, other in zip(grads, torch.autograd.grad(plain.square().sum(), exact), strict=True):
        assert (one.double() - other).norm() < 0.02 * other.norm()
