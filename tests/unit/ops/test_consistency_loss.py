"""R-Drop's and SimCut's loss against their formulas, differentiated by autograd."""

from __future__ import annotations

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops import (
    IGNORE_INDEX,
    ConsistencyWeights,
    linear_consistency_loss,
    linear_cross_entropy_reference,
)
from dragoman.ops.fused_linear_cross_entropy import CONSISTENCY_KERNEL

WEIGHTS = {
    "r_drop": ConsistencyWeights.r_drop(3.0),
    "simcut": ConsistencyWeights.simcut(3.0),
    "all": ConsistencyWeights(0.7, 0.2, 1.5, 0.4),
}
SIZES = [(1, 5), (6, 16), (5, 40), (7, 1000), (3, 9000)]  # rows, vocab_size


def make_inputs(
    rows: int = 11, vocab_size: int = 9, *, bias: bool = False, width: int = 6, device: str = "cpu"
) -> tuple[list[Tensor], Tensor]:
    """Draw hidden states of two passes, a weight, perhaps a bias, and targets in float64."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(2, rows, width), (vocab_size, width), *([(vocab_size,)] if bias else [])]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device).requires_grad_()
        for shape in shapes
    ]
    targets = torch.randint(0, vocab_size, (rows,), generator=generator)
    targets[2::5] = IGNORE_INDEX
    return inputs, targets.to(device)


def written_out(
    inputs: list[Tensor], targets: Tensor, smoothing: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Return loss and nll as the papers write them, in PyTorch's own functions."""
    hidden, weight, *rest = inputs
    bias = rest[0] if rest else None
    first, second = (
        linear_cross_entropy_reference(each, weight, bias, targets, smoothing=smoothing)
        for each in hidden
    )
    kept = targets != IGNORE_INDEX
    log_p, log_q = (F.linear(each, weight, bias).log_softmax(dim=-1)[kept] for each in hidden)
    forth = F.kl_div(log_q, log_p, log_target=True, reduction="sum")  # KL(p || q)
    back = F.kl_div(log_p, log_q, log_target=True, reduction="sum")
    if kind == "r_drop":  # half of equation 4: the loss stays as large as a plain one
        loss = (first.loss + second.loss + 3.0 * (forth + back) / 2) / 2
        return loss, (first.nll + second.nll) / 2
    if kind == "simcut":
        return first.loss + 3.0 * forth, first.nll
    loss = 0.7 * first.loss + 0.2 * second.loss + 1.5 * forth + 0.4 * back
    return loss, 0.7 * first.nll + 0.2 * second.nll


def errors(
    inputs: list[Tensor],
    targets: Tensor,
    kind: str,
    smoothing: float = 0.1,
    *,
    dtype: torch.dtype = torch.float32,
    chunk: int | None = 4,
) -> list[float]:
    """Return relative errors of loss, nll and gradients in a dtype against float64."""
    expected = written_out(inputs, targets, smoothing, kind)
    expected = (*expected, *torch.autograd.grad(expected[0] * 2.5, inputs))
    narrow = [each.detach().float().requires_grad_() for each in inputs]
    hidden, weight, *rest = narrow
    with torch.autocast(hidden.device.type, dtype, enabled=dtype != torch.float32):
        found = linear_consistency_loss(
            hidden,
            weight,
            rest[0] if rest else None,
            targets,
            weights=WEIGHTS[kind],
            smoothing=smoothing,
            chunk=chunk,
        )
    assert found.loss.dtype == torch.float32
    grads = torch.autograd.grad(found.loss * 2.5, narrow)
    return [
        ((one.double() - other).abs().max() / other.abs().max().clamp(min=0.1)).item()
        for one, other in zip((*found, *grads), expected, strict=True)
    ]


@pytest.mark.parametrize("kind", list(WEIGHTS))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 3])
def test_loss_and_gradients_are_those_of_the_formula(
    kind: str, bias: bool, smoothing: float, chunk: int | None
) -> None:
    inputs, targets = make_inputs(bias=bias)
    expected, expected_nll = written_out(inputs, targets, smoothing, kind)
    expected_grads = torch.autograd.grad(expected * 2.5, inputs)
    hidden, weight, *rest = inputs
    found = linear_consistency_loss(
        hidden,
        weight,
        rest[0] if rest else None,
        targets,
        weights=WEIGHTS[kind],
        smoothing=smoothing,
        chunk=chunk,
    )
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.nll, expected_nll)
    for grad, wanted in zip(
        torch.autograd.grad(found.loss * 2.5, inputs), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, wanted)


def test_half_precision_agrees_with_double() -> None:
    assert max(errors(*make_inputs(), "r_drop", dtype=torch.bfloat16)[:2]) < 0.02


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.parametrize(("kind", "bias"), [*((kind, False) for kind in WEIGHTS), ("all", True)])
@pytest.mark.parametrize(("rows", "vocab_size"), SIZES)
def test_the_interpreted_kernel_is_the_definition(
    monkeypatch: pytest.MonkeyPatch, rows: int, vocab_size: int, kind: str, bias: bool
) -> None:
    monkeypatch.setattr(CONSISTENCY_KERNEL, "can_run", lambda hidden: True)
    case = make_inputs(rows, vocab_size, bias=bias)
    assert max(errors(*case, kind)) < 1e-5
    assert max(errors(*case, kind, dtype=torch.float16)) < 0.01
    assert CONSISTENCY_KERNEL.is_enabled, "the kernel must not have failed"


@interpreted
@pytest.mark.parametrize("vocab_size", [512, 513, 1000])
def test_the_interpreted_kernel_reads_rows_twice_that_it_cannot_hold(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int
) -> None:
    from dragoman.ops.triton import cross_entropy_kernels

    monkeypatch.setattr(CONSISTENCY_KERNEL, "can_run", lambda hidden: True)
    monkeypatch.setattr(cross_entropy_kernels, "MAX_BLOCK", 128)
    monkeypatch.setattr(cross_entropy_kernels, "PAIR_BLOCK", 64)
    assert max(errors(*make_inputs(6, vocab_size), "all")) < 1e-5
    assert CONSISTENCY_KERNEL.is_enabled, "the kernel must not have failed"


@needs_triton
@pytest.mark.parametrize(("vocab_size", "block", "warps"), [(8192, 8192, 16), (65_536, 2048, 4)])
def test_kernel_compiles_for_hopper(vocab_size: int, block: int, warps: int) -> None:
    """Loads and stores must be 16 bytes wide, which decides the speed; a row is read once."""
    from dragoman.ops.triton import cross_entropy_kernels

    constants = {"COMPUTE_GRADIENT": True, "VOCAB_SIZE": vocab_size, "BLOCK": block}
    floats = ("off_target_prob", "target_extra_prob", "ce_weight", "other_ce_weight")
    types = {
        "logits": "*bf16",
        "targets": "*i64",
        "loss": "*fp32",
        "nll": "*fp32",
        **dict.fromkeys((*floats, "kl_weight", "reverse_kl_weight"), "fp32"),
    }
    built = compile_for_hopper(
        cross_entropy_kernels._consistency_kernel,
        constants,
        types,
        aligned=("logits", "stride", "targets"),
        num_warps=warps,
    )
    ptx = built.asm["ptx"]
    assert "st.global.v4" in ptx
    if vocab_size == block:
        assert ptx.count("ld.global.v4") * 8 * 32 * warps == 2 * vocab_size


@needs_gpu
@pytest.mark.parametrize("kind", list(WEIGHTS))
@pytest.mark.parametrize(("rows", "vocab_size"), [*SIZES, (100, 32_768), (9, 50_001)])
def test_kernel_on_a_gpu_equals_float64(rows: int, vocab_size: int, kind: str) -> None:
    torch.set_float32_matmul_precision("highest")
    case = make_inputs(rows, vocab_size, device="cuda")
    assert max(errors(*case, kind)) < 1e-4
    # Logits here reach 10, which bfloat16 rounds by up to 1/32; float64 differs by 0.04 on a CPU.
    assert max(errors(*case, kind, dtype=torch.bfloat16)) < 0.08
    assert CONSISTENCY_KERNEL.is_enabled, "the kernel must not have failed"
