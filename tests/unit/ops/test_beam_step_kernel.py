"""Fused beam search step: equals `BeamState.advance` in Triton's interpreter and on a GPU, and
falls back to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from model_kit import build_perturbed_transformer
from torch import Tensor

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.beam_step import ActiveBeams, BeamState
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.inference import SearchRequest
from dragoman.inference.cuda import beam_step
from dragoman.inference.cuda.beam_step import BEAM_STEP_KERNEL
from dragoman.inference.cuda.cuda_transformer import CudaTransformer, FusedResidual
from dragoman.inference.cuda.graph_beam_search import GraphBeamSearch
from dragoman.layers.norms_and_residuals import (
    LayerNorm,
    NoNorm,
    PostNorm,
    PreNorm,
    Residual,
    ScaledResidual,
    ScaleNorm,
)
from dragoman.ops.beam_search_step_attention import CROSS_ATTENTION_KERNEL, SELF_ATTENTION_KERNEL
from dragoman.ops.fused_norm import ADD_NORM_KERNEL
from dragoman.ops.topk import TOPK_KERNEL
from dragoman.ops.verified_kernel_fallback import GuardedKernel
from dragoman.text.special_tokens import EOS

KERNELS = (
    SELF_ATTENTION_KERNEL,
    CROSS_ATTENTION_KERNEL,
    ADD_NORM_KERNEL,
    TOPK_KERNEL,
    BEAM_STEP_KERNEL,
)
VOCABULARY = 40


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    """Switch the kernels on for each test."""
    for each in KERNELS:
        each.is_enabled = True
    yield
    for each in KERNELS:
        each.is_enabled = True


class BeamCase(NamedTuple):
    """The state of a beam search: buffers, active beams and history bias."""

    beam_state: BeamState
    beams: ActiveBeams
    history_bias: Tensor


def beam_case(
    limits: list[int], size: int, nbest: int, alpha: float, device: str = "cpu"
) -> BeamCase:
    """Return the state of a search, with one empty sentence more than there are limits."""
    rows, steps = len(limits) + 1, max(limits) + 2
    beam_state = BeamState(
        sentences=rows,
        steps=steps,
        size=size,
        nbest=nbest,
        penalty=WuLengthPenalty(alpha),
        device=torch.device(device),
    )
    beams = beam_state.reset(np.array(limits), beams_per_sentence=size, rows=rows)
    return BeamCase(beam_state, beams, torch.zeros(rows, size, steps * size, device=device).half())


def kept(beam_state: BeamState) -> Any:
    from dragoman.ops.triton import beam_step_kernel

    return beam_step_kernel.BeamStateBuffers(*beam_step._state_tensors(beam_state))


def plain_step(at: BeamCase, log_probs: Tensor, ids: Tensor) -> BeamCase:
    new, parents = at.beam_state.advance(at.beams, log_probs, ids)
    return BeamCase(
        at.beam_state,
        new,
        at.history_bias.gather(1, parents.unsqueeze(2).expand_as(at.history_bias)),
    )


def kernel_step(at: BeamCase, log_probs: Tensor, ids: Tensor) -> BeamCase:
    from dragoman.ops.triton import beam_step_kernel

    assert at.beam_state.length_divisors is not None
    living = beam_step_kernel.ActiveBeamBuffers(*at.beams, at.history_bias)
    beam_step_kernel.advance_beams(
        log_probs,
        ids,
        living,
        kept(at.beam_state),
        at.beam_state.length_divisors,
        eos=EOS,
        nbest=at.beam_state.nbest,
    )
    at.beam_state.step.add_(1)
    return at


def candidates(
    generator: torch.Generator, rows: int, vocab_size: int, count: int, ties: bool
) -> tuple[Tensor, Tensor]:
    """Draw the best tokens of each row: some forbidden, </s> more often than others."""
    scores = (
        torch.randint(-3, 0, (rows, vocab_size), generator=generator) * 0.5
        if ties
        else torch.randn(rows, vocab_size, generator=generator) - 2
    )
    scores[:, EOS] += 0.5
    scores[:, :2] = -torch.inf
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    return order.values[:, :count].contiguous(), order.indices[:, :count].contiguous()


def compare(
    limits: list[int],
    size: int,
    nbest: int,
    alpha: float,
    *,
    ties: bool,
    spare: int,
    device: str = "cpu",
) -> None:
    """Advance two beam states, and compare them after every step."""
    generator = torch.Generator().manual_seed(size * 10 + nbest)
    one, other = (beam_case(limits, size, nbest, alpha, device) for _ in range(2))
    for step in range(max(limits) + 1):
        rows = len(one.beams.sentences)
        values, ids = (
            x.to(device) for x in candidates(generator, rows * size, 6, min(6, size + spare), ties)
        )
        marked = torch.randn(rows, size, size, generator=generator).half().to(device)
        for each in (one, other):
            each.history_bias[:, :, step * size : (step + 1) * size] = marked
        one, other = plain_step(one, values, ids), kernel_step(other, values, ids)
        for expected, found in zip(
            (*one.beams, one.history_bias), (*other.beams, other.history_bias), strict=True
        ):
            assert torch.equal(expected, found)
    real = len(limits)
    for name in ("finished", "truncated", "truncated_at", "active_beams"):
        assert torch.equal(
            getattr(one.beam_state, name)[:real], getattr(other.beam_state, name)[:real]
        )
    assert one.beam_state.results(real, step + 1) == other.beam_state.results(real, step + 1)
    assert bool(other.beam_state.all_finite)


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


# limits, size, n best, alpha, equal scores, spare candidates: every size to five with every n best
CASES = [
    ([1 + (size + nbest) % 4, 5, 2], size, nbest, (0.0, 0.6, 1.0)[(size + nbest) % 3], ties, spare)
    for size in range(1, 6)
    for nbest in range(1, size + 1)
    for ties, spare in ((True, nbest % 2), (False, 0))
]


@interpreted
@pytest.mark.parametrize(("limits", "size", "nbest", "alpha", "ties", "spare"), CASES)
def test_interpreted_steps_equal_the_reference(
    limits: list[int], size: int, nbest: int, alpha: float, ties: bool, spare: int
) -> None:
    compare(limits, size, nbest, alpha, ties=ties, spare=spare)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are none
def test_interpreted_nan_is_detected_and_tokens_are_valid() -> None:
    for alive in (True, False):
        at = beam_case([3], 2, 1, 0.6)
        values, ids = candidates(torch.Generator().manual_seed(0), 4, 6, 2, False)
        values[0 if alive else 2 :] = torch.nan  # the last sentence is empty
        values[2 if alive else 4 :] = 0.0
        at = kernel_step(at, values, ids)
        assert bool(at.beam_state.all_finite) is not alive
        assert ((at.beams.tokens >= 0) & (at.beams.tokens < 6)).all()


def make(**settings: Any) -> Any:
    shape = {"encoder": ["transformer"], "decoder": ["transformer"], "heads": 2}
    model = build_perturbed_transformer(VOCABULARY, **shape, output_bias=True, **settings)
    with torch.no_grad():
        assert model.output_bias is not None
        model.output_bias[EOS] += 1.0
    return model


@torch.inference_mode()
def found_by(
    model: Any, *, size: int, limit: int, dtype: torch.dtype, count: int = 3
) -> list[list[Hypothesis]]:
    """Search; steps after the first of their shape are CUDA graph replays."""
    sources = [[5 + at % 30 for at in range(3 * number + 2)] for number in range(count)]
    request = SearchRequest(
        sources=sources,
        limits=[limit] * count,
        prefixes=[[]] * count,
        strategy=BeamSearch(size),
        sample_ids=range(count),
        min_length=limit - 1,
    )
    search = GraphBeamSearch(
        CudaTransformer(model, dtype),
        graph_capturer=None if next(model.parameters()).is_cuda else lambda action: action,
    )
    for _ in range(2 if next(model.parameters()).is_cuda else 1):
        found = search.run(request, size=size, nbest=1, penalty=WuLengthPenalty())
    return found


def same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]], within: float) -> None:
    assert [row[0].tokens for row in found] == [row[0].tokens for row in expected]
    assert [row[0].score for row in found] == pytest.approx(
        [row[0].score for row in expected], abs=within
    )


@interpreted
@pytest.mark.parametrize("residual", ["pre_norm", "post_norm"])
def test_interpreted_searches_find_the_same(residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and beam search step together, with every kernel enabled."""
    model = make(residual=residual)
    expected = found_by(model, size=2, limit=3, dtype=torch.float16)
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: self.is_enabled)
    same(found_by(model, size=2, limit=3, dtype=torch.float16), expected, 5e-3)
    assert all(each.is_enabled for each in KERNELS)


@needs_triton
@pytest.mark.parametrize(("size", "nbest"), [(1, 1), (4, 1), (5, 5)])
def test_kernel_compiles_for_hopper(size: int, nbest: int) -> None:
    from dragoman.ops.triton import beam_step_kernel

    kernel = beam_step_kernel._beam_step_kernel
    tile = beam_step_kernel._next_power_of_two(size)
    constants = {
        "EOS_ID": 2,
        "BEAM_SIZE": size,
        "TILE": tile,
        "CANDIDATES": size,
        "CANDIDATES_TILE": tile,
        "NBEST": nbest,
        "SLOTS": beam_step_kernel.SLOTS_PER_BLOCK,
    }
    whole = (
        "ids",
        "sentences",
        "tokens",
        "step",
        "limits",
        "active_beams",
        "truncated_at",
        "past_parents",
        "past_tokens",
    )
    types = dict.fromkeys(whole, "*i64") | dict.fromkeys(
        ("log_prob_sums", "finished", "truncated", "past_log_probs", "length_divisors"), "*fp64"
    )
    types |= {"log_probs": "*fp32", "alive": "*u8", "all_finite": "*u8", "history_bias": "*fp16"}
    built = compile_for_hopper(kernel, constants, types, num_warps=1)
    assert "bar.sync" in built.asm["ptx"]  # between reading a table and writing it
    assert built.metadata.shared <= 48 * 1024


def test_kernel_that_fails_is_reported_once_and_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    expected = found_by(model, size=3, limit=6, dtype=torch.float32)
    monkeypatch.setattr(BEAM_STEP_KERNEL, "can_run", lambda x: BEAM_STEP_KERNEL.is_enabled)
    monkeypatch.setitem(sys.modules, "dragoman.ops.triton.beam_step_kernel", None)
    monkeypatch.delattr("dragoman.ops.triton.beam_step_kernel", raising=False)
    for _ in range(2):
        same(found_by(model, size=3, limit=6, dtype=torch.float32), expected, 1e-9)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith("the fused kernel for beam search steps failed")
    assert "beam_step_kernel" in messages[0]  # what was found


class WrongKernel:
    """A fake kernel module with wrong results."""

    ActiveBeamBuffers = staticmethod(lambda *given: given)
    BeamStateBuffers = staticmethod(lambda *given: given)

    @staticmethod
    def advance_beams(
        log_probs: Tensor, ids: Tensor, living: tuple[Tensor, ...], *_: Any, **__: Any
    ) -> None:
        living[1].fill_(7)
        living[2].fill_(-1.0)


def test_kernel_with_wrong_choices_is_disabled_before_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    expected = found_by(model, size=3, limit=6, dtype=torch.float32)
    monkeypatch.setattr(BEAM_STEP_KERNEL, "can_run", lambda x: BEAM_STEP_KERNEL.is_enabled)
    monkeypatch.setitem(sys.modules, "dragoman.ops.triton.beam_step_kernel", WrongKernel)
    monkeypatch.setattr("dragoman.ops.triton.beam_step_kernel", WrongKernel, raising=False)
    same(found_by(model, size=3, limit=6, dtype=torch.float32), expected, 1e-9)
    assert (
        caplog.text.count(
            "kernel for beam search steps failed (ArithmeticError: its result differs"
        )
        == 1
    )


WAYS: dict[str, type[Residual]] = {
    "pre": PreNorm,
    "post": PostNorm,
    "plain": NoNorm,
    "scaled": ScaledResidual,
}


@pytest.mark.parametrize("norm", [LayerNorm, ScaleNorm])
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_fused_residual_equals_two_residuals(
    first: str, second: str, norm: type[torch.nn.Module]
) -> None:
    torch.manual_seed(0)
    one, two = WAYS[first](norm(16)).eval(), WAYS[second](norm(16)).eval()
    x, change = torch.randn(2, 3, 16), torch.randn(2, 3, 16).half()
    with torch.no_grad():
        found = FusedResidual(one, torch.float16).add_output(
            x, change, FusedResidual(two, torch.float16)
        )
        residual = one.add_output(x, change)
        torch.testing.assert_close(found.residual, residual)
        torch.testing.assert_close(found.layer_input, two.prepare_input(residual).half())
        began = FusedResidual(two, torch.float16).first_input(x)
        torch.testing.assert_close(began.layer_input, two.prepare_input(x).half())
        end = FusedResidual.for_output(None, torch.float16)
        torch.testing.assert_close(
            FusedResidual(one, torch.float16).add_output(x, change, end).layer_input,
            residual.half(),
        )


@needs_gpu
@pytest.mark.parametrize(
    ("limits", "size", "nbest", "alpha", "ties", "spare"), [*CASES, ([9] * 40, 8, 8, 0.6, False, 0)]
)
def test_steps_on_a_gpu_equal_the_reference(
    limits: list[int], size: int, nbest: int, alpha: float, ties: bool, spare: int
) -> None:
    compare(limits, size, nbest, alpha, ties=ties, spare=spare, device="cuda")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 4])
def test_searches_on_a_gpu_find_nearly_the_same(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make().to("cuda")
    found = found_by(model, size=size, limit=20, dtype=dtype, count=50)
    assert all(each.is_enabled for each in KERNELS)
    monkeypatch.setattr(GuardedKernel, "can_run", lambda self, x: False)
    expected = found_by(model, size=size, limit=20, dtype=dtype, count=50)
    alike = sum(
        one[0].tokens == other[0].tokens for one, other in zip(found, expected, strict=True)
    )
    assert alike >= (45 if dtype == torch.float16 else 50)
