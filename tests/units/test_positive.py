"""A product cut off at nought: PyTorch's layers with their gradients, by a kernel of our own, and done without where that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor, nn

from dragoman.kernels import enable_short_attention, positive, positive_linear, positive_linear_reference
from dragoman.kernels.guarding import Guarded
from dragoman.kernels.positive import POSITIVE, RUNS
from dragoman.layers.feedforward import GELU, FeedForward

SIZES = [(1, 3, 8, 16), (2, 5, 16, 40), (3, 7, 24, 300), (1, 700, 8, 33)]  # rows, positions, width, inner width


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    """Switch the kernels on for each test, and forget what was compared before."""
    enable_short_attention(True)
    POSITIVE.works = True
    POSITIVE._agreed.clear()
    yield
    enable_short_attention(False)
    POSITIVE.works = True


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this way on a CPU too, in any precision."""
    monkeypatch.setattr(positive, "_may", lambda x: POSITIVE.works)


def inputs(sizes: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    rows, length, width, inner = sizes
    generator = torch.Generator().manual_seed(inner)
    shapes = [(rows, length, width), (inner, width), (inner,)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def error(given: list[Tensor]) -> float:
    """Give the largest difference to the definition in float64, of result and gradients, each against its largest number if past 1."""
    found = positive_linear(*given)
    assert found is not None
    outer = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)).to(found)
    ours = [found, *torch.autograd.grad(found, given, outer)]
    exact = [each.detach().double().requires_grad_() for each in given]
    plain = positive_linear_reference(exact[0], exact[1], exact[2])
    # Where rounding alone decides whether anything comes through, both are right.
    theirs = [plain, *torch.autograd.grad(plain, exact, outer.double().where((found > 0) == (plain > 0), 0.0))]
    assert ((found > 0) == (plain > 0)).double().mean() > 0.99
    assert all(one.dtype == given[0].dtype for one in ours)
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item() for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("sizes", SIZES)
def test_its_plain_form_is_the_definition(sizes: tuple[int, int, int, int]) -> None:
    assert error(inputs(sizes, torch.float64)) < 1e-12
    plain = positive_linear_reference(*inputs(sizes, torch.float64))
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
    torch.library.opcheck(torch.ops.dragoman.stopped.default, (outer, came))
    stopped, sums = torch.ops.dragoman.stopped(outer, came)
    assert sums.shape == (RUNS, 12)
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

    stopped = torch.ops.dragoman.stopped
    monkeypatch.setattr(torch.ops.dragoman, "stopped", counted, raising=False)

    def outputs() -> list[Tensor]:
        found = layer(x)
        return [found, *torch.autograd.grad(found.square().sum(), list(layer.parameters()))]

    ours = outputs()
    assert called
    monkeypatch.undo()
    assert positive_linear(x, layer.inner.weight, layer.inner.bias) is None, "a CPU never comes here"
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


@pytest.mark.parametrize("layer", [FeedForward(8, 16, bias=False), FeedForward(8, 16, activation=GELU()), FeedForward(8, 16).eval()])
def test_other_layers_go_the_plain_way(layer: FeedForward, anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.dragoman, "positive_linear", lambda *_: pytest.fail("not for this"), raising=False)
    assert layer(torch.randn(2, 5, 8)).shape == (2, 5, 8)


@pytest.mark.usefixtures("anywhere")
def test_what_does_not_run_is_told_of_once_and_done_without(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Guarded, "tries", lambda self, x: self.works)
    monkeypatch.setitem(sys.modules, "dragoman.kernels.positive_rows", None)  # importing it fails
    monkeypatch.delattr("dragoman.kernels.positive_rows", raising=False)
    assert error(inputs(SIZES[1], torch.float32)) < 1e-5
    assert positive_linear(*inputs(SIZES[1], torch.float32)) is None
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "positive_rows" in told[0]  # what was found
    assert "PyTorch's are used" in told[0]


def test_without_replaying_or_in_float32_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guarded, "tries", lambda self, x: self.works)
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert positive._may(x)
    assert not positive._may(x.float())
    assert not positive._may(x[:0])
    enable_short_attention(False)
    assert not positive._may(x)


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("sizes", SIZES)
def test_the_interpreted_kernel_is_the_definition(sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guarded, "tries", lambda self, x: self.works)
    monkeypatch.setattr(positive, "RUNS", 8)
    for dtype, bound in [(torch.float32, 1e-5), (torch.float16, 0.003)]:
        assert error(inputs(sizes, dtype)) < bound
    assert POSITIVE.works
    assert len(POSITIVE._agreed) == 4, "both ways were taken, forward and back"


@needs_triton
def test_the_kernel_can_be_compiled_for_a_gpu_that_is_not_there() -> None:
    """Numbers are read and written sixteen bytes at a time, which decides how fast it is."""
    from dragoman.kernels import positive_rows

    kernel = positive_rows._stop
    constants = {"STEP": positive_rows.STEP, "COLUMNS": positive_rows.COLUMNS}
    types = dict.fromkeys(("outer", "positive", "stopped"), "*bf16") | {"sums": "*fp32"}
    built = compile_for_hopper(kernel, constants, types, aligned=("outer", "positive", "stopped", "sums", "width"), num_warps=4)
    assert built.asm["ptx"].count("ld.global.v4") == 2 * built.asm["ptx"].count("st.global.v4")
    assert "st.global.v4" in built.asm["ptx"]


@needs_gpu
@pytest.mark.parametrize("sizes", [*SIZES, (40, 25, 512, 2048)])
def test_the_kernels_on_a_gpu_are_the_definition(sizes: tuple[int, int, int, int]) -> None:
    assert error(inputs(sizes, torch.bfloat16, "cuda")) < 0.02
    assert POSITIVE.works, "the kernels must not have failed"
