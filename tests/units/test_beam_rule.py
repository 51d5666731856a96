"""The beam's rule in one launch: the same choices as the rule on the board, in Triton's interpreter and on a GPU, and done without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kernel_kit import compile_for_hopper, interpreted, needs_gpu, needs_triton, run_interpreted
from model_kit import shaken
from torch import Tensor

from dragoman.config import Config
from dragoman.decoding.beam import Beam
from dragoman.decoding.board import Beams, Board
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import WuPenalty
from dragoman.engines import Request
from dragoman.engines.gpu import advancing
from dragoman.engines.gpu.advancing import RULE
from dragoman.engines.gpu.laid_out import LaidOut
from dragoman.engines.gpu.recorded import RecordedBeam
from dragoman.engines.gpu.ways import Way
from dragoman.kernels.beam_attention import CROSS, OWN
from dragoman.kernels.guarding import Guarded
from dragoman.kernels.joining import JOINING
from dragoman.kernels.ranking import RANKING
from dragoman.layers.norms import LayerNorm, ScaleNorm
from dragoman.layers.residual import Plain, PostNorm, PreNorm, Residual, Scaled
from dragoman.models.build import build_model
from dragoman.text.specials import EOS

KERNELS = (OWN, CROSS, JOINING, RANKING, RULE)
VOCABULARY = 40


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    """Switch the kernels on for each test."""
    for each in KERNELS:
        each.works = True
    yield
    for each in KERNELS:
        each.works = True


class Side(NamedTuple):
    """A board with the beams that are searched for on it."""

    board: Board
    beams: Beams
    seen: Tensor


def side(limits: list[int], size: int, nbest: int, alpha: float, device: str = "cpu") -> Side:
    """Begin a search for one sentence more than there are limits: nobody's."""
    rows, steps = len(limits) + 1, max(limits) + 2
    board = Board(sentences=rows, steps=steps, size=size, nbest=nbest, penalty=WuPenalty(alpha), device=torch.device(device))
    beams = board.begin(np.array(limits), fan=size, rows=rows)
    return Side(board, beams, torch.zeros(rows, size, steps * size, device=device).half())


def kept(board: Board) -> Any:
    from dragoman.kernels import beam_rule

    return beam_rule.Kept(*advancing._kept(board))


def plain_step(at: Side, log_probs: Tensor, ids: Tensor) -> Side:
    new, parents = at.board.choose(at.beams, log_probs, ids)
    return Side(at.board, new, at.seen.gather(1, parents.unsqueeze(2).expand_as(at.seen)))


def kernel_step(at: Side, log_probs: Tensor, ids: Tensor) -> Side:
    from dragoman.kernels import beam_rule

    assert at.board.divisors is not None
    living = beam_rule.Living(*at.beams, at.seen)
    beam_rule.advance(log_probs, ids, living, kept(at.board), at.board.divisors, end=EOS, nbest=at.board.nbest)
    at.board.step.add_(1)
    return at


def candidates(generator: torch.Generator, rows: int, pieces: int, count: int, ties: bool) -> tuple[Tensor, Tensor]:
    """Draw the best pieces of each row, some that may not come among them, ends more often than others."""
    scores = torch.randint(-3, 0, (rows, pieces), generator=generator) * 0.5 if ties else torch.randn(rows, pieces, generator=generator) - 2
    scores[:, EOS] += 0.5
    scores[:, :2] = -torch.inf
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    return order.values[:, :count].contiguous(), order.indices[:, :count].contiguous()


def compare(limits: list[int], size: int, nbest: int, alpha: float, *, ties: bool, spare: int, device: str = "cpu") -> None:
    """Search on two boards, and compare all that goes on after every step, and what is found."""
    generator = torch.Generator().manual_seed(size * 10 + nbest)
    one, other = (side(limits, size, nbest, alpha, device) for _ in range(2))
    for step in range(max(limits) + 1):
        rows = len(one.beams.sentences)
        values, ids = (x.to(device) for x in candidates(generator, rows * size, 6, min(6, size + spare), ties))
        marked = torch.randn(rows, size, size, generator=generator).half().to(device)
        for each in (one, other):
            each.seen[:, :, step * size : (step + 1) * size] = marked
        one, other = plain_step(one, values, ids), kernel_step(other, values, ids)
        for expected, found in zip((*one.beams, one.seen), (*other.beams, other.seen), strict=True):
            assert torch.equal(expected, found)
    real = len(limits)
    for name in ("finished", "cut", "cut_after", "places"):
        assert torch.equal(getattr(one.board, name)[:real], getattr(other.board, name)[:real])
    assert one.board.results(real, step + 1) == other.board.results(real, step + 1)
    assert bool(other.board.sound)


@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    run_interpreted(__file__)


CASES = [  # limits, size, n best, alpha, equal scores, spare candidates: every size to five with every n best
    ([1 + (size + nbest) % 4, 5, 2], size, nbest, (0.0, 0.6, 1.0)[(size + nbest) % 3], ties, spare)
    for size in range(1, 6)
    for nbest in range(1, size + 1)
    for ties, spare in ((True, nbest % 2), (False, 0))
]


@interpreted
@pytest.mark.parametrize(("limits", "size", "nbest", "alpha", "ties", "spare"), CASES)
def test_interpreted_steps_are_those_of_the_board(limits: list[int], size: int, nbest: int, alpha: float, ties: bool, spare: int) -> None:
    compare(limits, size, nbest, alpha, ties=ties, spare=spare)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that are none
def test_interpreted_what_is_no_number_is_noticed_and_gives_tokens_all_the_same() -> None:
    for alive in (True, False):
        at = side([3], 2, 1, 0.6)
        values, ids = candidates(torch.Generator().manual_seed(0), 4, 6, 2, False)
        values[0 if alive else 2 :] = torch.nan  # the last sentence is nobody's
        values[2 if alive else 4 :] = 0.0
        at = kernel_step(at, values, ids)
        assert bool(at.board.sound) is not alive
        assert ((at.beams.tokens >= 0) & (at.beams.tokens < 6)).all()


def make(**settings: Any) -> Any:
    torch.manual_seed(0)
    shape = {"encoder": ["self"], "decoder": ["self"], "width": 32, "heads": 2, "feedforward": 48, "output_bias": True}
    model = shaken(build_model(Config().replace(model={**shape, **settings}).model, src_vocabulary=VOCABULARY, tgt_vocabulary=VOCABULARY))
    with torch.no_grad():
        assert model.output_bias is not None
        model.output_bias[EOS] += 1.0
    return model.eval()


@torch.inference_mode()
def found_by(model: Any, *, size: int, limit: int, dtype: torch.dtype, count: int = 3) -> list[list[Hypothesis]]:
    """Search, all steps that are not the first of their kind by what was recorded."""
    sources = [[5 + at % 30 for at in range(3 * number + 2)] for number in range(count)]
    request = Request(
        sources=sources, limits=[limit] * count, prefixes=[[]] * count, strategy=Beam(size), lines=range(count), at_least=limit - 1
    )
    search = RecordedBeam(LaidOut(model, dtype), record=None if next(model.parameters()).is_cuda else lambda action: action)
    for _ in range(2 if next(model.parameters()).is_cuda else 1):
        found = search.run(request, size=size, nbest=1, penalty=WuPenalty())
    return found


def same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]], within: float) -> None:
    assert [row[0].tokens for row in found] == [row[0].tokens for row in expected]
    assert [row[0].score for row in found] == pytest.approx([row[0].score for row in expected], abs=within)


@interpreted
@pytest.mark.parametrize("residual", ["pre", "post"])
def test_interpreted_searches_find_the_same(residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model and rule together, every kernel at work."""
    model = make(residual=residual)
    expected = found_by(model, size=2, limit=3, dtype=torch.float16)
    monkeypatch.setattr(Guarded, "tries", lambda self, x: self.works)
    same(found_by(model, size=2, limit=3, dtype=torch.float16), expected, 5e-3)
    assert all(each.works for each in KERNELS)


@needs_triton
@pytest.mark.parametrize(("size", "nbest"), [(1, 1), (4, 1), (5, 5)])
def test_the_kernel_can_be_compiled_for_a_gpu_that_is_not_there(size: int, nbest: int) -> None:
    from dragoman.kernels import beam_rule

    kernel = beam_rule._advance
    tile = beam_rule._power(size)
    constants = {"END": 2, "SIZE": size, "TILE": tile, "CANDIDATES": size, "WIDE": tile, "NBEST": nbest, "SLOTS": beam_rule.SLOTS}
    whole = ("ids", "sentences", "tokens", "step", "limits", "places", "cut_after", "past_parents", "past_tokens")
    types = dict.fromkeys(whole, "*i64") | dict.fromkeys(("totals", "finished", "cut", "past_log_probs", "divisors"), "*fp64")
    types |= {"log_probs": "*fp32", "alive": "*u8", "sound": "*u8", "seen": "*fp16"}
    built = compile_for_hopper(kernel, constants, types, num_warps=1)
    assert "bar.sync" in built.asm["ptx"]  # between reading a table and writing it
    assert built.metadata.shared <= 48 * 1024


def test_a_rule_that_does_not_run_is_told_of_once_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    expected = found_by(model, size=3, limit=6, dtype=torch.float32)
    monkeypatch.setattr(RULE, "tries", lambda x: RULE.works)
    monkeypatch.setitem(sys.modules, "dragoman.kernels.beam_rule", None)
    monkeypatch.delattr("dragoman.kernels.beam_rule", raising=False)
    for _ in range(2):
        same(found_by(model, size=3, limit=6, dtype=torch.float32), expected, 1e-9)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("the beam's rule does not run here")
    assert "beam_rule" in told[0]  # what was found


class Impostor:
    """Stands for the module of the kernel, and does something else."""

    Living = staticmethod(lambda *given: given)
    Kept = staticmethod(lambda *given: given)

    @staticmethod
    def advance(log_probs: Tensor, ids: Tensor, living: tuple[Tensor, ...], *_: Any, **__: Any) -> None:
        living[1].fill_(7)
        living[2].fill_(-1.0)


def test_a_rule_that_chooses_something_else_is_found_out_before_it_does_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    expected = found_by(model, size=3, limit=6, dtype=torch.float32)
    monkeypatch.setattr(RULE, "tries", lambda x: RULE.works)
    monkeypatch.setitem(sys.modules, "dragoman.kernels.beam_rule", Impostor)
    monkeypatch.setattr("dragoman.kernels.beam_rule", Impostor, raising=False)
    same(found_by(model, size=3, limit=6, dtype=torch.float32), expected, 1e-9)
    assert caplog.text.count("the beam's rule does not run here (ArithmeticError: it differs") == 1


WAYS: dict[str, type[Residual]] = {"pre": PreNorm, "post": PostNorm, "plain": Plain, "scaled": Scaled}


@pytest.mark.parametrize("norm", [LayerNorm, ScaleNorm])
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_a_way_out_and_in_is_what_the_two_residuals_do(first: str, second: str, norm: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    one, two = WAYS[first](norm(16)).eval(), WAYS[second](norm(16)).eval()
    x, change = torch.randn(2, 3, 16), torch.randn(2, 3, 16).half()
    with torch.no_grad():
        found = Way(one, torch.float16).leave(x, change, Way(two, torch.float16))
        stream = one.leave(x, change)
        torch.testing.assert_close(found.stream, stream)
        torch.testing.assert_close(found.entering, two.enter(stream).half())
        began = Way(two, torch.float16).begin(x)
        torch.testing.assert_close(began.entering, two.enter(x).half())
        end = Way.out(None, torch.float16)
        torch.testing.assert_close(Way(one, torch.float16).leave(x, change, end).entering, stream.half())


@needs_gpu
@pytest.mark.parametrize(("limits", "size", "nbest", "alpha", "ties", "spare"), [*CASES, ([9] * 40, 8, 8, 0.6, False, 0)])
def test_steps_on_a_gpu_are_those_of_the_board(limits: list[int], size: int, nbest: int, alpha: float, ties: bool, spare: int) -> None:
    compare(limits, size, nbest, alpha, ties=ties, spare=spare, device="cuda")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 4])
def test_searches_on_a_gpu_find_nearly_the_same(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make().to("cuda")
    found = found_by(model, size=size, limit=20, dtype=dtype, count=50)
    assert all(each.works for each in KERNELS)
    monkeypatch.setattr(Guarded, "tries", lambda self, x: False)
    expected = found_by(model, size=size, limit=20, dtype=dtype, count=50)
    alike = sum(one[0].tokens == other[0].tokens for one, other in zip(found, expected, strict=True))
    assert alike >= (45 if dtype == torch.float16 else 50)
