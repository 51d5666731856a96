"""A product cut off at nought: PyTorch's layers with their gradients, by a kernel of our own, and done without where that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor, nn

from dragoman.layers.feed_forward import GELU, FeedForward
from dragoman.ops import enable_short_attention, fused_linear, linear_relu, linear_relu_reference
from dragoman.ops.fused_linear import LINEAR_RELU_KERNEL, ROW_PARTITIONS
from dragoman.ops.guarded_kernel import GuardedKernel

SIZES = [
    (1, 3, 8, 16),
    (2, 5, 16, 40),
    (3, 7, 24, 300),
    (1, 700, 8, 33),
]  # rows, positions, width, inner width


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    """Switch the kernels on for each test, and forget what was compared before."""
    enable_short_attention(True)
    LINEAR_RELU_KERNEL.is_enabled = True
    LINEAR_RELU_KERNEL._verified.clear()
    yield
    enable_short_attention(False)
    LINEAR_RELU_KERNEL.is_enabled = True


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this way on a CPU too, in any precision."""
    monkeypatch.setattr(fused_linear, "_is_supported", lambda x: LINEAR_RELU_KERNEL.is_enabled)


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


def error(given: list[Tensor]) -> float:
    """Give the largest difference to the definition in float64, of result and gradients, each against its largest number if past 1."""
    found = linear_relu(*given)
    assert found is not None
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
def test_its_plain_form_is_the_definition(sizes: tuple[int, int, int, int]) -> None:
    assert error(inputs(sizes, torch.float64)) < 1e-12
    plain = linear_relu_reference(*inputs(sizes, torch.float64))
    linear = nn.Linear(sizes[2], sizes[3], dtype=torch.float64)
    x, weight, bias = inputs(sizes, torch.float64)
    linear.load_state_dict({"weight": weight.detach(), "bias": bias.detach()})
    assert torch.equal(plain, nn.ReLU()(linear(x)))


def test_the_operators_keep_their_promises_to_the_compiler() -> None:
    """Shapes and strides without computing, no change to the inputs, gradients registered: PyTorch's own checks."""
    x, weight, bias = inputs((1, 6, 8, 12), torch.float32)
    given = (x.detach()[0].requires_grad_(), weight, bias)
    torch.library.opcheck(torch.ops.dragoman.positive_linear.default, given)
    outer, came = torch.randn(6, 12), torch.randn(6, 12).relu()
    torch.library.opcheck(torch.ops.dragoman.relu_backward.default, (outer, came))
    stopped, sums = torch.ops.dragoman.relu_backward(outer, came)
    assert sums.shape == (ROW_PARTITIONS, 12)
    assert torch.equal(stopped == 0, came == 0)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
def test_the_layer_takes_this_way_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = FeedForward(16, 48), torch.randn(3, 5, 16)
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
    assert linear_relu(x, layer.inner.weight, layer.inner.bias) is None, "a CPU never comes here"
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
def test_other_layers_go_the_plain_way(
    layer: FeedForward, anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.ops.dragoman, "linear_relu", lambda *_: pytest.fail("not for this"), raising=False
    )
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)


@pytest.mark.usefixtures("anywhere")
def test_what_does_not_run_is_told_of_once_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    monkeypatch.setitem(
        sys.modules, "dragoman.ops.triton.linear_relu_kernel", None
    )  # importing it fails
    monkeypatch.delattr("dragoman.ops.triton.linear_relu_kernel", raising=False)
    assert error(inputs(SIZES[1], torch.float32)) < 1e-5
    assert linear_relu(*inputs(SIZES[1], torch.float32)) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "linear_relu_kernel" in told[0]  # what was found
    assert "PyTorch's are used" in told[0]


def test_without_replaying_or_in_float32_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert fused_linear._is_supported(x)
    assert not fused_linear._is_supported(x.float())
    assert not fused_linear._is_supported(x[:0])
    enable_short_attention(False)
    assert not fused_linear._is_supported(x)


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("sizes", SIZES)
def test_the_interpreted_kernel_is_the_definition(
    sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    monkeypatch.setattr(fused_linear, "ROW_PARTITIONS", 8)
    for dtype, bound in [(torch.float32, 1e-5), (torch.float16, 0.003)]:
        assert error(inputs(sizes, dtype)) < bound
    assert LINEAR_RELU_KERNEL.is_enabled
    assert len(LINEAR_RELU_KERNEL._verified) == 4, "both ways were taken, forward and back"


@needs_triton
def test_the_kernel_can_be_compiled_for_a_gpu_that_is_not_there() -> None:
    """Numbers are read and written sixteen bytes at a time, which decides how fast it is."""
    from dragoman.ops.triton import linear_relu_kernel

    kernel = linear_relu_kernel._relu_backward_kernel
    constants = {
        "STEP": linear_relu_kernel.ROWS_PER_STEP,
        "COLUMNS": linear_relu_kernel.COLUMNS_PER_PROGRAM,
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
def test_the_kernels_on_a_gpu_are_the_definition(sizes: tuple[int, int, int, int]) -> None:
    assert error(inputs(sizes, torch.bfloat16, "cuda")) < 0.02
    assert LINEAR_RELU_KERNEL.is_enabled, "the kernels must not have failed"
