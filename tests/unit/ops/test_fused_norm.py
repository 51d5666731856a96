"""Fused backward pass of dropout, residual sum and norm: equals autograd, falls back on failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor
from torch.nn import functional as F

from dragoman.layers.norms_and_residuals import LayerNorm, PostNorm, RMSNorm
from dragoman.ops import fused_norm as module
from dragoman.ops.dropout import apply_hashed_dropout
from dragoman.ops.verified_kernel_fallback import GuardedKernel

RATE, EPSILON = 0.3, 1e-5


@pytest.fixture(autouse=True)
def enabled_kernel() -> Iterator[None]:
    """Enable the kernel for each test, with nothing verified."""
    module.DROPOUT_ADD_NORM_KERNEL.is_enabled = True
    module.DROPOUT_ADD_NORM_KERNEL._verified.clear()
    yield
    module.DROPOUT_ADD_NORM_KERNEL.is_enabled = True


def inputs(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Draw a gradient, a residual sum, seeds and a norm weight."""
    generator = torch.Generator().manual_seed(rows)
    outer, total = (
        torch.randn(rows, 3, width, generator=generator).to(device, dtype) for _ in range(2)
    )
    weight = (1 + 0.2 * torch.randn(width, generator=generator)).to(device, dtype)
    seeds = torch.randint(-(2**31), 2**31 - 1, (2,), generator=generator).to(device)
    return [outer, total * 2 + 1, seeds, weight]


def error(given: list[Tensor]) -> float:
    """Return the largest relative error of the gradients against autograd in float64."""
    outer, total, seeds, weight = given
    grad, thinned, sums = torch.ops.dragoman.dropout_add_norm_backward(*given, RATE, EPSILON)
    exact = [
        total.double().requires_grad_(),
        weight.double().requires_grad_(),
        torch.zeros_like(weight).double().requires_grad_(),
    ]
    normed = F.layer_norm(exact[0], weight.shape, exact[1], exact[2], EPSILON)
    theirs = torch.autograd.grad(normed, exact, outer.double())
    torch.testing.assert_close(thinned, apply_hashed_dropout(grad, seeds, RATE), rtol=1e-3, atol=0)
    assert torch.equal(thinned == 0, apply_hashed_dropout(grad, seeds, RATE) == 0)
    ours = [grad, *sums.sum(dim=0).unbind()]
    return max(
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("width", [128, 48])
def test_reference_equals_autograd(width: int) -> None:
    assert error(inputs(5, width, torch.float64)) < 1e-12
    assert error(inputs(5, width, torch.bfloat16)) < 0.01


def test_operator_passes_opcheck() -> None:
    torch.library.opcheck(
        torch.ops.dragoman.dropout_add_norm_backward.default,
        (*inputs(2, 16, torch.float32), RATE, EPSILON),
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
def test_compiled_layers_use_the_operator_with_equal_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward pass drop the same elements; one graph serves all lengths."""
    torch.manual_seed(0)
    residual = PostNorm(LayerNorm(16), dropout=RATE)
    residual.cuda_graphs = True
    found: dict[bool, list[Tensor]] = {}
    for packed in (True, False):
        monkeypatch.setattr(module, "_can_run_fused", lambda *_, packed=packed: packed)
        torch._dynamo.reset()
        add_output = torch.compile(
            residual.add_output, backend="aot_eager", dynamic=True, fullgraph=True
        )
        found[packed] = []
        for length in (4, 7):
            torch.manual_seed(length)
            x, change, outer = (torch.randn(3, length, 16, requires_grad=True) for _ in range(3))
            torch.manual_seed(1)
            normed = add_output(x, change)
            found[packed] += [
                normed,
                *torch.autograd.grad(normed, [x, change, *residual.parameters()], outer),
            ]
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert (found[True][2] == 0).double().mean() == pytest.approx(RATE, abs=0.1), (
        "the change's gradient is dropped as it was"
    )


@pytest.mark.parametrize(
    "residual",
    [
        PostNorm(RMSNorm(16), dropout=RATE),
        PostNorm(LayerNorm(16), dropout=RATE).eval(),
        PostNorm(LayerNorm(16)),
    ],
)
def test_other_residuals_do_not_use_the_operator(
    residual: PostNorm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_can_run_fused", lambda *_: True)
    monkeypatch.setattr(module._DropoutAddNorm, "apply", lambda *_: pytest.fail("not for this"))
    residual.cuda_graphs = True
    x = torch.ones(2, 3, 16)
    assert residual.add_output(x, x).shape == x.shape


def test_the_kernel_runs_only_compiled_in_half_precision_under_cuda_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def can_run(x: Tensor) -> bool:
        weight = x[0]
        return module._can_run_fused(x, x, weight, weight)

    x = torch.ones(2, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    assert not can_run(x), "not compiled"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert can_run(x)
    assert not can_run(x.float())
    assert not can_run(x[:, :100])
    assert not module._can_run_fused(x, x, x[0].float(), x[0])
    monkeypatch.setattr(module, "_can_run_fused", lambda *_: pytest.fail("no CUDA graph"))
    residual = PostNorm(LayerNorm(16), dropout=RATE)
    assert residual.add_output(torch.ones(2, 3, 16), torch.ones(2, 3, 16)).shape == (2, 3, 16)


def test_a_failing_kernel_is_logged_once_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    monkeypatch.setitem(
        sys.modules, "dragoman.ops.triton.dropout_add_norm_backward_kernel", None
    )  # importing it fails
    monkeypatch.delattr("dragoman.ops.triton.dropout_add_norm_backward_kernel", raising=False)
    for _ in range(2):
        assert error(inputs(3, 128, torch.float32)) < 1e-5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "dropout_add_norm_backward_kernel" in messages[0]  # what was found
    assert "falling back to PyTorch" in messages[0]


@needs_triton
def test_kernel_in_the_triton_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (7, 128), (15, 512)])
def test_interpreted_kernel_equals_autograd(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    monkeypatch.setattr(module, "ROW_PARTITIONS", 4)
    assert error(inputs(rows, width, torch.float32)) < 1e-5
    assert error(inputs(rows, width, torch.float16)) < 0.003
    assert module.DROPOUT_ADD_NORM_KERNEL.is_enabled
    assert len(module.DROPOUT_ADD_NORM_KERNEL._verified) == 2, "two dtypes"


@needs_triton
@pytest.mark.parametrize("width", module.SUPPORTED_WIDTHS)
def test_kernel_compiles_for_hopper(width: int) -> None:
    """Loads and stores are vectorized, which decides the speed, and no registers spill."""
    from dragoman.ops.triton import dropout_add_norm_backward_kernel

    kernel = dropout_add_norm_backward_kernel._backward_kernel
    constants = {"WIDTH": width, "ROWS": dropout_add_norm_backward_kernel.ROWS_PER_STEP}
    types = dict.fromkeys(
        ("grad_output", "residual_sum", "weight", "grad", "grad_sublayer"), "*bf16"
    ) | {
        "partial_grads": "*fp32",
        "seeds": "*i64",
    }
    types |= {"keep_scale": "fp32", "epsilon": "fp32"}
    aligned = [name for name, kind in types.items() if kind.startswith("*")]
    built = compile_for_hopper(kernel, constants, types, aligned=aligned, num_warps=4)
    assert "st.global.v4" in built.asm["ptx"] or width < 256
    assert "st.global.v2" in built.asm["ptx"] or width >= 256


@needs_gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (700, 512), (9000, 512), (50, 1024)])
def test_the_kernel_on_a_gpu_is_autograds(rows: int, width: int) -> None:
    assert error(inputs(rows, width, torch.bfloat16, "cuda")) < 0.02
    assert module.DROPOUT_ADD_NORM_KERNEL.is_enabled, "the kernel must not have failed"
