"""The cross-entropy kernel equals the reference, and falls back to it on failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor

from dragoman.ops import IGNORE_INDEX, linear_cross_entropy, linear_cross_entropy_reference
from dragoman.ops import fused_linear_cross_entropy as loss_module
from dragoman.ops.fused_linear_cross_entropy import (
    CROSS_ENTROPY_KERNEL,
    LOGITS_MEMORY_DIVISOR,
    rows_per_chunk,
)

SIZES = [(1, 5), (6, 16), (5, 40), (7, 1000), (3, 9000)]  # rows, vocab_size


@pytest.fixture(autouse=True)
def enabled_kernel() -> Iterator[None]:
    """Enable the kernel for each test, whatever another left behind."""
    CROSS_ENTROPY_KERNEL.is_enabled = True
    yield
    CROSS_ENTROPY_KERNEL.is_enabled = True


def run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the kernel without a GPU, until it fails."""
    monkeypatch.setattr(
        CROSS_ENTROPY_KERNEL, "can_run", lambda hidden: CROSS_ENTROPY_KERNEL.is_enabled
    )


def inputs(
    rows: int, vocab_size: int, device: str = "cpu", width: int = 24
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states, a weight and targets; the second target is ignored."""
    generator = torch.Generator().manual_seed(rows * vocab_size)
    hidden, weight = (
        torch.randn(count, width, generator=generator) for count in (rows, vocab_size)
    )
    targets = torch.randint(0, vocab_size, (rows,), generator=generator)
    if rows > 1:
        targets[1] = IGNORE_INDEX
    return (
        hidden.to(device).requires_grad_(),
        weight.to(device).requires_grad_(),
        targets.to(device),
    )


def differences(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    smoothing: float,
    *,
    dtype: torch.dtype | None = None,
    bias: bool = False,
) -> list[float]:
    """Return relative errors of loss, nll and gradients against float64."""
    given = [hidden, weight]
    if bias:
        # Small, as biases are: bfloat16 rounds logits of 20, bias added, by up to 1/16.
        given.append(weight.detach().mean(dim=1).requires_grad_())
    with torch.autocast(hidden.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        ours = linear_cross_entropy(*_with_bias(given), targets, smoothing=smoothing, chunk=4)
    grads = torch.autograd.grad(ours.loss, given)
    exact = [each.detach().double().requires_grad_() for each in given]
    plain = linear_cross_entropy_reference(*_with_bias(exact), targets, smoothing=smoothing)
    expected = [plain.loss, plain.nll, *torch.autograd.grad(plain.loss, exact)]
    found = [ours.loss, ours.nll, *grads]
    return [
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=0.1)).item()
        for one, other in zip(found, expected, strict=True)
    ]


def _with_bias(given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, weight, and bias or None."""
    return given[0], given[1], given[2] if len(given) > 2 else None


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "vocab_size"), SIZES)
def test_the_interpreted_kernel_is_the_definition(
    monkeypatch: pytest.MonkeyPatch, rows: int, vocab_size: int, smoothing: float, bias: bool
) -> None:
    run_on_cpu(monkeypatch)
    given = inputs(rows, vocab_size)
    assert max(differences(*given, smoothing, bias=bias)) < 1e-5
    assert max(differences(*given, smoothing, dtype=torch.float16, bias=bias)) < 5e-3
    assert CROSS_ENTROPY_KERNEL.is_enabled, "the kernel must not have failed"


@interpreted
@pytest.mark.parametrize("vocab_size", [512, 513, 1000])
def test_the_interpreted_kernel_reads_a_row_twice_that_it_cannot_hold(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    from dragoman.ops.triton import cross_entropy_kernels

    run_on_cpu(monkeypatch)
    monkeypatch.setattr(cross_entropy_kernels, "MAX_BLOCK", 128)
    assert max(differences(*inputs(5, vocab_size), 0.1)) < 1e-5
    assert CROSS_ENTROPY_KERNEL.is_enabled, "the kernel must not have failed"


@interpreted
def test_the_interpreted_kernel_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs(6, 50)
    with torch.no_grad():
        plain = linear_cross_entropy(hidden, weight, None, targets, smoothing=0.1)
        run_on_cpu(monkeypatch)
        ours = linear_cross_entropy(hidden, weight, None, targets, smoothing=0.1)
    torch.testing.assert_close(ours, plain)
    assert CROSS_ENTROPY_KERNEL.is_enabled, "the kernel must not have failed"


@needs_triton
@pytest.mark.parametrize(("vocab_size", "block", "warps"), [(8192, 8192, 8), (65_536, 8192, 8)])
def test_kernel_compiles_for_hopper(vocab_size: int, block: int, warps: int) -> None:
    """Loads and stores must be 16 bytes wide, which decides the speed; a row is read once."""
    from dragoman.ops.triton import cross_entropy_kernels

    kernel = cross_entropy_kernels._cross_entropy_kernel
    constants = {"COMPUTE_GRADIENT": True, "VOCAB_SIZE": vocab_size, "BLOCK": block}
    types = {
        "logits": "*bf16",
        "targets": "*i64",
        "loss": "*fp32",
        "nll": "*fp32",
        "off_target_prob": "fp32",
        "target_extra_prob": "fp32",
    }
    built = compile_for_hopper(
        kernel, constants, types, aligned=("logits", "stride", "targets"), num_warps=warps
    )
    assert "ld.global.v4" in built.asm["ptx"]
    assert "st.global.v4" in built.asm["ptx"]
    if vocab_size == block:
        assert built.asm["ptx"].count("ld.global.v4") * 8 * 32 * warps == vocab_size
        assert built.asm["ptx"].count("ex2.") <= vocab_size // (32 * warps)


def test_a_failing_kernel_is_logged_once_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_on_cpu(monkeypatch)
    monkeypatch.setitem(
        sys.modules, "dragoman.ops.triton.cross_entropy_kernels", None
    )  # importing it fails
    monkeypatch.delattr("dragoman.ops.triton.cross_entropy_kernels", raising=False)
    for _ in range(2):
        assert max(differences(*inputs(9, 40), 0.1)) < 1e-5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "cross_entropy_kernels" in messages[0]  # what was found
    assert "falling back to PyTorch" in messages[0]


def test_the_kernel_is_not_used_on_a_cpu() -> None:
    assert not CROSS_ENTROPY_KERNEL.can_run(torch.ones(2, 3))
    assert max(differences(*inputs(4, 10), 0.1, bias=True)) < 1e-5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocab_size", [16, 33, 47])
def test_a_kernel_gets_aligned_rows_for_any_vocabulary_size(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, bias: bool
) -> None:
    """The kernel is replaced by PyTorch on a CPU; what surrounds it is that of a GPU."""
    strides = []

    def launch(
        logits: Tensor, targets: Tensor, differentiate: bool, *, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        strides.append(logits.stride(0))
        logits_in = logits.detach().clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(
            logits_in, targets, reduction="none", ignore_index=IGNORE_INDEX
        )
        with torch.enable_grad():
            again = torch.nn.functional.cross_entropy(
                logits_in, targets, reduction="sum", ignore_index=IGNORE_INDEX
            )
        logits.copy_(torch.autograd.grad(again, logits_in)[0])
        return loss.detach(), loss.detach()

    monkeypatch.setattr(type(CROSS_ENTROPY_KERNEL), "can_run", lambda kernel, x: True)
    monkeypatch.setattr(loss_module, "_launch_cross_entropy", launch)
    assert max(differences(*inputs(7, vocab_size), 0.0, bias=bias)) < 1e-5
    assert strides
    assert all(stride % 16 == 0 for stride in strides)
    assert CROSS_ENTROPY_KERNEL.is_enabled, "the replacement must not have failed"


@needs_gpu
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "vocab_size"), [*SIZES, (100, 32_768), (9, 50_001)])
def test_kernel_on_a_gpu_equals_float64(rows: int, vocab_size: int, smoothing: float) -> None:
    torch.set_float32_matmul_precision("highest")
    given = inputs(rows, vocab_size, "cuda")
    for bias in (False, True):
        assert max(differences(*given, smoothing, bias=bias)) < 1e-4
        assert max(differences(*given, smoothing, dtype=torch.bfloat16, bias=bias)) < 0.03
    assert CROSS_ENTROPY_KERNEL.is_enabled, "the kernel must not have failed"


@pytest.mark.parametrize(
    ("gib", "vocabulary", "rows"), [(16, 32_768, 8192), (128, 32_768, 65_536), (8, 10**6, 512)]
)
def test_logit_chunks_scale_with_gpu_memory(
    gib: int, vocabulary: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=gib * 2**30),
    )
    assert rows_per_chunk(torch.device("cuda"), vocabulary) == rows
    assert rows == 512 or 2 * rows * vocabulary <= gib * 2**30 / LOGITS_MEMORY_DIVISOR
    assert rows_per_chunk(torch.device("cpu"), vocabulary) == 512
