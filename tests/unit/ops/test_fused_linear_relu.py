"""Fused linear layer with ReLU: equals PyTorch's layers, and falls back to them on failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor, nn

from dragoman.layers.feed_forward import GELU, FeedForward
from dragoman.ops import fused_linear_relu, linear_relu, linear_relu_reference
from dragoman.ops.fused_linear_relu import LINEAR_RELU_KERNEL, ROW_PARTITIONS
from dragoman.ops.verified_kernel_fallback import GuardedKernel

SIZES = [
    (1, 3, 8, 16),
    (2, 5, 16, 40),
    (3, 7, 24, 300),
    (1, 700, 8, 33),
]  # batch, positions, width, FFN width


@pytest.fixture(autouse=True)
def enabled_kernel() -> Iterator[None]:
    """Enable the kernel for each test, with nothing verified."""
    LINEAR_RELU_KERNEL.is_enabled = True
    LINEAR_RELU_KERNEL._verified.clear()
    yield
    LINEAR_RELU_KERNEL.is_enabled = True


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the operator on a CPU too, in any dtype."""
    monkeypatch.setattr(
        fused_linear_relu, "_can_run_fused", lambda x, weight, bias: LINEAR_RELU_KERNEL.is_enabled
    )


def inputs(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    rows, length, width, inner = sizes
    generator = torch.Generator().manual_seed(inner)
    shapes = [(rows, length, width), (inner, width), (inner,)]
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def is_fused(output: Tensor) -> bool:
    """Whether an output comes from our operator (behind a view)."""
    before = output.grad_fn.next_functions[0][0]
    return "linear_relu" in before.name()


def error(given: list[Tensor]) -> float:
    """Return the largest relative error of output and gradients against float64."""
    found = linear_relu(*given, cuda_graphs=True)
    assert is_fused(found)
    outer = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).to(found)
    ours = [found, *torch.autograd.grad(found, given, outer)]
    exact = [each.detach().double().requires_grad_() for each in given]
    plain = linear_relu_reference(exact[0], exact[1], exact[2])
    # Where rounding alone decides whether anything comes through, both are right.
    theirs = [
        plain,
        *torch.autograd.grad(plain, exact, outer.double().where((found > 0) == (plain > 0), 0.0)),
    ]
    assert ((found > 0) == (plain > 0)).double().mean() > 0.99
    assert all(one.dtype == given[0].dtype for one in ours)
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("sizes", SIZES)
def test_reference_equals_float64(sizes: tuple[int, int, int, int]) -> None:
    assert error(inputs(sizes, torch.float64)) < 1e-12
    plain = linear_relu_reference(*inputs(sizes, torch.float64))
    linear = nn.Linear(sizes[2], sizes[3], dtype=torch.float64)
    x, weight, bias = inputs(sizes, torch.float64)
    linear.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    assert torch.equal(plain, nn.ReLU()(linear(x)))


def test_operators_pass_opcheck() -> None:
    """PyTorch's own checks: fake shapes and strides, no mutation, registered gradients."""
    x, weight, bias = inputs((1, 6, 8, 12), torch.float32)
    given = (x.detach()[0].requires_grad_(), weight, bias)
    torch.library.opcheck(torch.ops.dragoman.linear_relu.default, given)
    outer, came = torch.randn(6, 12), torch.randn(6, 12).relu()
    torch.library.opcheck(torch.ops.dragoman.relu_backward.default, (outer, came))
    stopped, sums = torch.ops.dragoman.relu_backward(outer, came)
    assert sums.shape == (ROW_PARTITIONS, 12)
    assert torch.equal(stopped == 0, came == 0)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
def test_the_layer_uses_the_operator_with_equal_results(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = FeedForward(16, 48), torch.randn(3, 5, 16)
    layer.cuda_graphs = True
    called: list[int] = []

    def counted(outer: Tensor, came: Tensor) -> tuple[Tensor, Tensor]:
        called.append(1)
        return stopped(outer, came)

    stopped = torch.ops.dragoman.relu_backward
    monkeypatch.setattr(torch.ops.dragoman, "relu_backward", counted, raising=False)

    def outputs() -> list[Tensor]:
        found = layer(x)
        return [found, *torch.autograd.grad(found.square().sum(), list(layer.parameters()))]

    ours = outputs()
    assert called
    monkeypatch.undo()
    on_cpu = linear_relu(x, layer.inner.weight, layer.inner.bias, cuda_graphs=True)
    assert not is_fused(on_cpu)
    for one, other in zip(ours, outputs(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_sees_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> object:
        nonlocal graphs
        graphs += 1
        return graph.forward

    layer = FeedForward(16, 48)
    layer.cuda_graphs = True
    compiled = torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)
    for length in (5, 6, 9, 12):
        x = torch.randn(3, length, 16)
        torch.testing.assert_close(compiled(x), layer(x))
    assert graphs == 1


@pytest.mark.parametrize(
    "layer",
    [
        FeedForward(8, 16, bias=False),
        FeedForward(8, 16, activation=GELU()),
        FeedForward(8, 16).eval(),
    ],
)
def test_other_layers_do_not_use_the_operator(
    layer: FeedForward, anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.ops.dragoman, "linear_relu", lambda *_: pytest.fail("not for this"), raising=False
    )
    layer.cuda_graphs = True
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)


@pytest.mark.usefixtures("anywhere")
def test_a_failing_kernel_is_logged_once_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    monkeypatch.setitem(
        sys.modules, "dragoman.ops.triton.relu_bias_backward_kernel", None
    )  # importing it fails
    monkeypatch.delattr("dragoman.ops.triton.relu_bias_backward_kernel", raising=False)
    assert error(inputs(SIZES[1], torch.float32)) < 1e-5
    assert not is_fused(linear_relu(*inputs(SIZES[1], torch.float32), cuda_graphs=True))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "relu_bias_backward_kernel" in messages[0]  # what was found
    assert "falling back to PyTorch" in messages[0]


def test_the_kernel_runs_only_in_half_precision_under_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    x, weight, bias = (each.detach() for each in inputs((1, 2, 8, 16), torch.bfloat16))
    assert fused_linear_relu._can_run_fused(x, weight, bias)
    assert not fused_linear_relu._can_run_fused(x.float(), weight.float(), bias.float())
    assert not fused_linear_relu._can_run_fused(x, weight.float(), bias)
    assert not fused_linear_relu._can_run_fused(x[:0], weight, bias)
    monkeypatch.setattr(
        torch.ops.dragoman, "linear_relu", lambda *_: pytest.fail("no CUDA graph"), raising=False
    )
    assert linear_relu(x, weight, bias).shape == (1, 2, 16)


@needs_triton
def test_kernel_in_the_triton_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("sizes", SIZES)
def test_interpreted_kernel_equals_float64(
    sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    monkeypatch.setattr(fused_linear_relu, "ROW_PARTITIONS", 8)
    for dtype, bound in [(torch.float32, 1e-5), (torch.float16, 0.003)]:
        assert error(inputs(sizes, dtype)) < bound
    assert LINEAR_RELU_KERNEL.is_enabled
    assert len(LINEAR_RELU_KERNEL._verified) == 4, "two dtypes, forward and backward"


@needs_triton
def test_kernel_compiles_for_hopper() -> None:
    """Loads and stores must be 16 bytes wide, which decides the speed."""
    from dragoman.ops.triton import relu_bias_backward_kernel

    kernel = relu_bias_backward_kernel._relu_backward_kernel
    constants = {
        "STEP": relu_bias_backward_kernel.ROWS_PER_STEP,
        "COLUMNS": relu_bias_backward_kernel.COLUMNS_PER_PROGRAM,
    }
    types = dict.fromkeys(("grad_output", "relu_output", "grad_linear"), "*bf16") | {
        "bias_grad_partials": "*fp32"
    }
    built = compile_for_hopper(
        kernel,
        constants,
        types,
        aligned=("grad_output", "relu_output", "grad_linear", "bias_grad_partials", "width"),
        num_warps=4,
    )
    assert built.asm["ptx"].count("ld.global.v4") == 2 * built.asm["ptx"].count("st.global.v4")
    assert "st.global.v4" in built.asm["ptx"]


@needs_gpu
@pytest.mark.parametrize("sizes", [*SIZES, (40, 25, 512, 2048)])
def test_kernels_on_a_gpu_equal_float64(sizes: tuple[int, int, int, int]) -> None:
    assert error(inputs(sizes, torch.bfloat16, "cuda")) < 0.02
    assert LINEAR_RELU_KERNEL.is_enabled, "the kernels must not have failed"
