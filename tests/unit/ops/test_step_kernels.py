"""Fused kernels of a beam search step against their references, in Triton's interpreter and on a
GPU, and the fallback where they fail.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from torch import Tensor

from dragoman.ops import beam_search_step_attention, fused_norm, topk
from dragoman.ops.attention import attend_reference
from dragoman.ops.beam_search_step_attention import (
    CROSS_ATTENTION_KERNEL,
    SELF_ATTENTION_KERNEL,
    attend_kv_cache,
    attend_kv_cache_reference,
    attend_memory,
    attend_memory_reference,
)
from dragoman.ops.fused_norm import (
    ADD_NORM_KERNEL,
    AddNormOutput,
    NormParameters,
    add_norm,
    add_norm_reference,
)
from dragoman.ops.topk import (
    TOPK_KERNEL,
    ForbiddenTokens,
    TopKLogProbs,
    topk_log_probs,
    topk_log_probs_reference,
)
from dragoman.ops.verified_kernel_fallback import GuardedKernel

KERNELS = (SELF_ATTENTION_KERNEL, CROSS_ATTENTION_KERNEL, ADD_NORM_KERNEL, TOPK_KERNEL)
NEVER, END = (0, 1, 3), 2


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    """Switch the kernels on for each test, and forget what was compared before."""
    for each in KERNELS:
        each.is_enabled = True
        each._verified.clear()
    yield
    for each in KERNELS:
        each.is_enabled = True


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try the kernels on a CPU too."""
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)


def past(
    count: int, heads: int, fan: int, width: int, step: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    """Draw what beams see at a step: of each earlier one the slot of one beam, of the newest their
    own.
    """
    generator = torch.Generator().manual_seed(step * 100 + fan)
    steps = step + 3
    made = torch.randn(count, fan, 3, heads, width, generator=generator).to(dtype)
    kv_cache = torch.randn(count, 2, 2, heads, steps * fan, width, generator=generator).to(dtype)
    ancestors = torch.randint(0, fan, (count, fan, step + 1), generator=generator)
    ancestors[:, :, step] = torch.arange(fan)
    history_bias = torch.full((count, fan, steps, fan), -torch.inf, dtype=dtype)
    history_bias[:, :, : step + 1].scatter_(3, ancestors.unsqueeze(3), 0.0)
    drawn = {
        "query": made.to(device)[:, :, 0].transpose(1, 2),
        "key_value": made.to(device)[:, :, 1:].permute(0, 2, 3, 1, 4),
        "kv_cache": kv_cache.to(device)[:, 1],
        "history_bias": history_bias.flatten(2).unsqueeze(1).to(device),
        "step": torch.tensor(step, device=device),
        "slots": torch.arange(fan, device=device) + step * fan,
    }
    return drawn


def compare_past(given: dict[str, Tensor]) -> float:
    """Return the largest error against the equations in float32; the KV cache must be equal."""
    kept, expected = given["kv_cache"].clone(), given["kv_cache"].clone()
    found = attend_kv_cache(**{**given, "kv_cache": kept})
    expected.index_copy_(3, given["slots"], given["key_value"])
    assert torch.equal(kept, expected)
    visible = given["history_bias"] == 0
    plain = attend_reference(
        given["query"].float(), expected[:, 0].float(), expected[:, 1].float(), mask=visible
    ).context
    return (found.float() - plain.transpose(1, 2).flatten(2)).abs().max().item()


def compare_sentence(
    count: int,
    heads: int,
    fan: int,
    width: int,
    source: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> float:
    """Attend to sentences of different lengths; return the largest difference to the equations in
    float32.
    """
    generator = torch.Generator().manual_seed(source)
    query = (
        torch.randn(count, fan, heads, width, generator=generator).to(device, dtype).transpose(1, 2)
    )
    memory = torch.randn(count, 3, 2, heads, source, width, generator=generator).to(device, dtype)[
        :, 1
    ]
    lengths = (torch.arange(count) * 7) % source + 1
    visible = (torch.arange(source) < lengths.unsqueeze(1)).view(count, 1, 1, source).to(device)
    padding_bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(
        ~visible, -torch.inf
    )
    found = attend_memory(query, memory, padding_bias)
    plain = attend_reference(
        query.float(), memory[:, 0].float(), memory[:, 1].float(), mask=visible
    ).context
    return (found.float() - plain.transpose(1, 2).flatten(2)).abs().max().item()


def logits_of(kind: str, rows: int, vocab_size: int, device: str = "cpu") -> Tensor:
    """Draw logits, some with many ties or with forbidden tokens far above the others."""
    generator = torch.Generator().manual_seed(vocab_size)
    x = torch.randn(rows, vocab_size, generator=generator) * 3
    if kind == "equal":
        x = torch.randint(-2, 2, (rows, vocab_size), generator=generator).float()
    if kind == "certain":
        x[0, END] += 60
        x[-1, 0] += 150
    return (x.half() if kind == "half" else x).to(device)


def forbidden_tokens(min_length: int, device: str = "cpu") -> ForbiddenTokens:
    return ForbiddenTokens(
        NEVER, END, torch.tensor(1, device=device), torch.tensor(min_length, device=device)
    )


def compare_ranks(x: Tensor, count: int, min_length: int, *, with_bias: bool = False) -> None:
    """Compare with PyTorch's stable order of log-probabilities in float64 of what may come."""
    bias = (torch.arange(x.size(1), device=x.device) % 5).float() if with_bias else None
    found = topk_log_probs(x, count, forbidden_tokens(min_length, str(x.device)), bias=bias)
    assert found is not None
    scores = (x if bias is None else x.float() + bias).double().log_softmax(dim=-1)
    scores[:, list(NEVER)] = -torch.inf
    if min_length > 1:
        scores[:, END] = -torch.inf
    expected = torch.sort(scores, dim=-1, descending=True, stable=True)
    torch.testing.assert_close(
        found.log_probs.double(), expected.values[:, :count], atol=5e-5, rtol=1e-6
    )
    assert torch.equal(found.ids, expected.indices[:, :count])


def compare_joined(
    width: int,
    kind: str,
    dtype: torch.dtype,
    change: torch.dtype | None,
    post_norm: bool,
    device: str = "cpu",
) -> None:
    """Compare with torch.nn's norms in float64."""
    generator = torch.Generator().manual_seed(width)
    x = (torch.randn(2, 3, width, generator=generator) * 3 + 5).to(device)
    added = (
        None if change is None else torch.randn(2, 3, width, generator=generator).to(device, change)
    )
    norm = torch.nn.LayerNorm(width) if kind == "layer" else torch.nn.RMSNorm(width, eps=1e-5)
    with torch.no_grad():
        for each in norm.parameters():
            each.copy_(torch.randn(width, generator=generator))
    norm = norm.to(device).requires_grad_(False)
    bias = norm.bias if isinstance(norm, torch.nn.LayerNorm) else None
    found = add_norm(
        x,
        added,
        NormParameters(norm.weight, bias, 1e-5, kind == "layer"),
        dtype,
        post_norm=post_norm,
    )
    residual = x.double() + (0.0 if added is None else added.double())
    normal = norm.double()(residual)
    assert (found.residual.dtype, found.layer_input.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(
        found.residual.double(), normal if post_norm else residual, atol=2e-5, rtol=1e-5
    )
    rounding = 2e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(found.layer_input.double(), normal, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_attention_over_beams_is_the_equations(dtype: torch.dtype) -> None:
    assert compare_past(past(3, 2, 4, 16, 9, dtype)) < (5e-3 if dtype == torch.float16 else 1e-5)
    assert compare_sentence(3, 2, 4, 16, 9, dtype) < (5e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("post_norm", [False, True])
def test_the_plain_sum_with_its_norm_is_torchs(kind: str, post_norm: bool) -> None:
    compare_joined(24, kind, torch.float16, torch.float16, post_norm)
    compare_joined(24, kind, torch.float32, None, post_norm)


def test_plain_ranks_are_those_of_the_definition() -> None:
    found = topk_log_probs_reference(logits_of("equal", 5, 60), 4, forbidden_tokens(0))
    again = torch.sort(
        topk_log_probs_reference(logits_of("equal", 5, 60), 60, forbidden_tokens(0)).log_probs,
        dim=-1,
        descending=True,
    ).values[:, :4]
    assert torch.equal(found.log_probs, again)
    ties = found.log_probs[:, 1:] == found.log_probs[:, :-1]
    assert ties.any()
    assert (found.ids[:, 1:] > found.ids[:, :-1])[ties].all(), "of equal ones the lower comes first"
    assert not torch.isin(found.ids, torch.tensor(NEVER)).any()
    assert topk_log_probs(logits_of("plain", 2, 60), 4, forbidden_tokens(0)) is None, (
        "a CPU has no kernel"
    )


@needs_triton
def test_the_kernels_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


@interpreted
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("heads", "fan", "width", "step"),
    [(2, 4, 16, 0), (1, 4, 64, 1), (2, 4, 16, 19), (1, 1, 32, 40), (1, 5, 16, 7), (1, 32, 16, 2)],
)
def test_interpreted_attention_to_the_past(heads: int, fan: int, width: int, step: int) -> None:
    assert compare_past(past(2, heads, fan, width, step, torch.float16)) < 3e-3
    assert SELF_ATTENTION_KERNEL.is_enabled
    assert SELF_ATTENTION_KERNEL._verified, "both ways were taken"


@interpreted
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(("fan", "source"), [(4, 1), (4, 16), (1, 17), (5, 70)])
def test_interpreted_attention_to_the_sentence(fan: int, source: int) -> None:
    assert compare_sentence(2, 2, fan, 16, source, torch.float16) < 3e-3
    assert CROSS_ATTENTION_KERNEL.is_enabled


@interpreted
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("kind", ["plain", "half", "equal", "certain"])
@pytest.mark.parametrize(("vocab_size", "count"), [(5, 4), (40, 1), (129, 5), (3000, 4)])
def test_interpreted_ranks(kind: str, vocab_size: int, count: int) -> None:
    for min_length in (0, 3):
        compare_ranks(logits_of(kind, 3, vocab_size), count, min_length)
    compare_ranks(logits_of(kind, 3, vocab_size), count, 0, with_bias=True)
    assert TOPK_KERNEL.is_enabled


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are none
@pytest.mark.parametrize("bad", ["nan", "-nan", "inf"])
def test_interpreted_topk_of_nan_is_none(bad: str) -> None:
    from dragoman.ops.triton import topk_kernel

    x = logits_of("plain", 2, 300)
    x[1, 77] = float(bad)
    log_probs, ids = topk_kernel.topk_log_probs(x, None, 4, NEVER, END, *forbidden_tokens(0)[2:])
    assert log_probs[0].isfinite().all()
    assert log_probs[1].isnan().all()
    assert ((ids >= 0) & (ids < 300)).all()


@interpreted
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [8, 48, 512, 1000])
def test_interpreted_sums_with_their_norm(width: int, kind: str) -> None:
    for change in (None, torch.float16, torch.float32):
        for post_norm in (False, True):
            compare_joined(width, kind, torch.float16, change, post_norm)
    compare_joined(width, kind, torch.float32, torch.float32, False)
    assert ADD_NORM_KERNEL.is_enabled


def compiled(
    module: str, name: str, constants: dict[str, Any], types: dict[str, str], warps: int
) -> Any:
    """Compile a kernel whose tensors, strides and counts are all multiples of sixteen."""
    kernel = getattr(importlib.import_module(f"dragoman.ops.triton.{module}"), name)
    aligned = [
        each for each in kernel.arg_names if each not in constants and types.get(each) != "fp32"
    ]
    return compile_for_hopper(
        kernel, constants, types, aligned=aligned, num_warps=warps, num_stages=1
    )


HALVES = dict.fromkeys(
    ("query", "new", "kv_cache", "history_bias", "memory", "padding_bias", "context"), "*fp16"
) | {
    "step": "*i64",
    "scale": "fp32",
}
HEADS = {"BEAMS": 4, "ROWS": 16, "WIDTH": 64, "HEADS": 8, "BLOCK": 32}
LOGITS = {
    "logits": "*fp32",
    "bias": "*fp32",
    "log_probs": "*fp32",
    "ids": "*i64",
    "step": "*i64",
    "min_length": "*i64",
}
TOPK = {
    "HAS_BIAS": False,
    "FORBIDDEN_BITS": 11,
    "EOS_ID": 2,
    "TOPK": 4,
    "PADDED_COUNT": 4,
    "VOCAB_SIZE": 32_768,
    "BLOCKS": 16,
    "NUM_TILES": 16,
    "TILES_PADDED": 16,
    "WIDTH": 128,
}
STREAM = dict.fromkeys(("x", "weight", "bias", "residual"), "*fp32") | {
    "sublayer_output": "*fp16",
    "layer_input": "*fp16",
    "epsilon": "fp32",
}
SUM = {
    "ADD_RESIDUAL": True,
    "CENTERED": True,
    "HAS_BIAS": True,
    "POST_NORM": False,
    "WIDTH": 512,
    "TILE": 512,
}


@needs_triton
@pytest.mark.parametrize(
    ("module", "name", "constants", "types", "warps"),
    [
        ("beam_attention_kernels", "_self_attention_kernel", HEADS, HALVES, 1),
        ("beam_attention_kernels", "_cross_attention_kernel", HEADS, HALVES, 1),
        ("topk_kernel", "_topk_kernel", TOPK, LOGITS, 4),
        ("add_norm_kernel", "_add_norm_kernel", SUM, STREAM, 1),
    ],
    ids=["past", "sentence", "topk_log_probs", "join"],
)
def test_kernels_compile_for_hopper(
    module: str, name: str, constants: dict[str, Any], types: dict[str, str], warps: int
) -> None:
    """Numbers are read sixteen bytes at a time, which decides how fast they are, and attention
    multiplies by tensor cores.
    """
    built = compiled(module, name, constants, types, warps)
    assert "ld.global.v4" in built.asm["ptx"]
    assert ("mma" in built.asm["ptx"]) == (module == "beam_attention_kernels")
    assert built.metadata.shared <= 48 * 1024


def missing(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Patch the import of the kernels to fail."""
    monkeypatch.setitem(sys.modules, f"dragoman.ops.triton.{module}", None)
    monkeypatch.delattr(f"dragoman.ops.triton.{module}", raising=False)


CALLS: dict[str, tuple[str, GuardedKernel, Callable[[], object]]] = {
    "past": (
        "beam_attention_kernels",
        SELF_ATTENTION_KERNEL,
        lambda: compare_past(past(2, 2, 4, 16, 3, torch.float16)),
    ),
    "sentence": (
        "beam_attention_kernels",
        CROSS_ATTENTION_KERNEL,
        lambda: compare_sentence(2, 2, 4, 16, 5, torch.float16),
    ),
    "join": (
        "add_norm_kernel",
        ADD_NORM_KERNEL,
        lambda: compare_joined(24, "layer", torch.float16, torch.float16, False),
    ),
    "topk_log_probs": (
        "topk_kernel",
        TOPK_KERNEL,
        lambda: topk_log_probs(logits_of("plain", 3, 50), 4, forbidden_tokens(0)),
    ),
}


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_does_not_run_is_reported_once_and_falls_back(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, kernel, call = CALLS[name]
    missing(monkeypatch, module)
    for _ in range(2):
        call()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith(f"the fused kernel for {kernel.name} failed")
    assert module in messages[0]  # what was found
    assert not kernel.is_enabled
    assert all(each.is_enabled for each in KERNELS if each is not kernel)


@pytest.mark.usefixtures("anywhere")
def test_unsupported_inputs_use_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("beam_attention_kernels", "add_norm_kernel", "topk_kernel"):
        missing(monkeypatch, module)
    assert compare_past(past(2, 2, 4, 16, 3, torch.float32)) < 1e-5
    assert compare_past(past(2, 2, 4, 8, 3, torch.float16)) < 5e-3
    assert compare_sentence(2, 2, 4, 24, 5, torch.float16) < 5e-3
    assert topk_log_probs(logits_of("plain", 3, 5), 6, forbidden_tokens(0)) is None
    assert topk_log_probs(logits_of("plain", 3, 50), topk.MAX_TOPK + 1, forbidden_tokens(0)) is None
    assert (
        topk_log_probs(logits_of("plain", 3, 50), 4, forbidden_tokens(0)._replace(ids=(0, 40)))
        is None
    )
    wide = torch.zeros(1, fused_norm.MAX_WIDTH + 1)
    scale = NormParameters(torch.ones(wide.size(1)), None, 1e-5, True)
    assert isinstance(add_norm(wide, None, scale, torch.float16, post_norm=False), AddNormOutput)
    assert all(each.is_enabled for each in KERNELS), "nothing was tried"
    assert beam_search_step_attention.HEAD_WIDTHS == (16, 32, 64, 128)
    assert topk.MAX_FORBIDDEN_ID == 31


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_logits_use_the_reference_row_by_row(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's result is used then: one row per beam, with NaN as the marker."""
    kernel = ModuleType("dragoman.ops.triton.topk_kernel")
    monkeypatch.setattr(
        kernel,
        "topk_log_probs",
        lambda logits, bias, count, *_: topk_log_probs_reference(
            logits, count, forbidden_tokens(0)
        ),
        raising=False,
    )
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    monkeypatch.setattr("dragoman.ops.triton.topk_kernel", kernel, raising=False)
    logits = logits_of("plain", 6, 50)
    logits[1, 20] = bad
    found = topk_log_probs(logits, 4, forbidden_tokens(0))
    assert found is not None
    assert found.log_probs.isnan().any(dim=1).tolist() == [False, True, False, False, False, False]
    assert found.ids.view(2, -1).shape == (2, 12)
    assert TOPK_KERNEL.is_enabled


@needs_gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_on_a_gpu_a_first_position_whose_score_is_not_finite_is_noticed(bad: float) -> None:
    drawn = past(2, 2, 4, 32, 0, torch.float16, "cuda")
    attend_kv_cache(**drawn)  # compared with the definition, and not again
    drawn["key_value"][1, 0, 0, 2, 5] = bad  # a key of one head and beam, at the first step
    found = attend_kv_cache(**drawn).isnan().view(2, 4, 2, 32).all(dim=3)
    assert found.nonzero().tolist() == [[1, 2, 0]]


@needs_gpu
def test_on_a_gpu_a_variance_that_overflows_is_noticed() -> None:
    scale = NormParameters(
        torch.ones(64, device="cuda"), torch.zeros(64, device="cuda"), 1e-5, True
    )
    residual = torch.linspace(-1.0, 1.0, 64, device="cuda").repeat(3, 1)
    change = torch.zeros_like(residual, dtype=torch.float16)
    add_norm(
        residual, change, scale, torch.float16, post_norm=False
    )  # compared with the definition, and not again
    residual[1] *= 1e25
    joined = add_norm(residual, change, scale, torch.float16, post_norm=False)
    assert joined.layer_input.isnan().all(dim=1).tolist() == [False, True, False]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("fan", "width"), [(4, 64), (1, 64), (5, 32), (32, 16), (4, 128)])
def test_attention_on_a_gpu_is_the_equations(fan: int, width: int, dtype: torch.dtype) -> None:
    bound = 0.003 if dtype == torch.float16 else 0.03
    for step in (0, 1, 7, 40):
        assert compare_past(past(33, 8, fan, width, step, dtype, "cuda")) < bound
    for source in (1, 16, 45, 200):
        assert compare_sentence(33, 8, fan, width, source, dtype, "cuda") < bound
    assert SELF_ATTENTION_KERNEL.is_enabled
    assert CROSS_ATTENTION_KERNEL.is_enabled


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "half", "equal", "certain"])
@pytest.mark.parametrize(("vocab_size", "count"), [(40, 4), (32_768, 4), (32_768, 8), (50_001, 5)])
def test_ranks_on_a_gpu_are_those_of_the_definition(kind: str, vocab_size: int, count: int) -> None:
    for min_length in (0, 3):
        compare_ranks(logits_of(kind, 70, vocab_size, "cuda"), count, min_length)
    compare_ranks(logits_of(kind, 70, vocab_size, "cuda"), count, 0, with_bias=True)
    assert TOPK_KERNEL.is_enabled


@needs_gpu
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [48, 512, 1024, 4096])
def test_sums_with_their_norm_on_a_gpu_are_torchs(width: int, kind: str) -> None:
    for change in (None, torch.float16):
        for post_norm in (False, True):
            compare_joined(width, kind, torch.float16, change, post_norm, "cuda")
    assert ADD_NORM_KERNEL.is_enabled


@needs_gpu
def test_on_a_gpu_references_agree_with_kernels_that_are_captured() -> None:
    """Replayed with another step and other numbers, which only the device knows."""
    given = past(20, 8, 4, 64, 20, torch.float16, "cuda")
    attend_kv_cache(**given)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        context = attend_kv_cache(**given)
    other = past(20, 8, 4, 64, 20, torch.float16, "cuda")
    given["query"].copy_(other["query"] * 0.5)
    graph.replay()
    expected = attend_kv_cache_reference(
        **{name: value for name, value in given.items() if name != "step"}
    )
    torch.testing.assert_close(context, expected, atol=3e-3, rtol=3e-3)
    memory, padding_bias = (
        torch.randn(20, 2, 8, 16, 64, device="cuda").half(),
        torch.zeros(20, 1, 1, 16, device="cuda").half(),
    )
    found = attend_memory(given["query"], memory, padding_bias)
    torch.testing.assert_close(
        found, attend_memory_reference(given["query"], memory, padding_bias), atol=3e-3, rtol=3e-3
    )
    x, scale = (
        torch.randn(9, 64, device="cuda"),
        NormParameters(torch.ones(64, device="cuda"), None, 1e-5, True),
    )
    torch.testing.assert_close(
        add_norm(x, x, scale, torch.float32, post_norm=True),
        add_norm_reference(x, x, scale, torch.float32, post_norm=True),
    )
    assert isinstance(
        topk_log_probs(logits_of("plain", 3, 500, "cuda"), 4, forbidden_tokens(0, "cuda")),
        TopKLogProbs,
    )
