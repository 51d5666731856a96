"""Dropout: rate, independence, the same mask in forward and backward pass, and no mask saved under
torch.compile.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter

import pytest
import torch
from kernel_kit import needs_gpu
from torch import Tensor, nn

from dragoman.attention import SelfAttention
from dragoman.layers.feed_forward import FeedForward
from dragoman.layers.norms_and_residuals import PreNorm
from dragoman.ops import dropout
from dragoman.ops.dropout import hash_positions, hashed_dropout

COUNT = 2**18
SIGMAS = 4.5  # one good generator in 150,000 is further off; the seeds are fixed


def hash_first(first: int, second: int, count: int = COUNT) -> Tensor:
    return hash_positions(torch.Size([count]), torch.tensor([first, second]))


def drawn(number: int) -> Tensor:
    """Hash with the number-th pair of seeds."""
    generator = torch.Generator().manual_seed(number)
    first, second = torch.randint(-(2**31), 2**31 - 1, (2,), generator=generator).tolist()
    return hash_first(first, second)


def low(hashes: Tensor, rate: float) -> Tensor:
    """Return the dropout mask minus its mean."""
    return (hashes < round(rate * 2**32) - 2**31).double() - rate


def sigmas(one: Tensor, other: Tensor, rate: float) -> float:
    """Return the correlation of two masks in standard deviations."""
    return abs((one * other).mean().item()) / (rate * (1 - rate)) * math.sqrt(one.numel())


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(1000, 101), (3,), (1, 1)])
def test_dropout_equals_pytorchs(shape: tuple[int, ...], rate: float) -> None:
    """Elements are zeroed with probability `rate` or scaled by 1 / (1 - rate).

    The backward pass uses the same mask, and a seed gives the same mask again.
    """
    x = torch.ones(shape, requires_grad=True)
    torch.manual_seed(0)
    dropped = dropout(x, rate)
    dropped.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dropped.detach())
    values = set(dropped.detach().flatten().tolist())
    assert all(value == 0 or value == pytest.approx(1 / (1 - rate), rel=1e-4) for value in values)
    torch.manual_seed(0)
    torch.testing.assert_close(dropout(x, rate), dropped, rtol=0, atol=0)
    if x.numel() > 1000:
        assert (dropped == 0).float().mean().item() == pytest.approx(rate, abs=0.005)
        pairs = (dropped.view(-1)[:-1] == 0) & (dropped.view(-1)[1:] == 0)
        assert pairs.float().mean().item() == pytest.approx(
            rate**2, abs=0.005
        )  # adjacent elements are independent


EDGES = [0.0, 1e-9, 1 - 1e-6, 1 - 1e-12, 1.0]  # both ends, and rates that round to them


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
@pytest.mark.parametrize("rate", EDGES)
@pytest.mark.parametrize("form", ["plain", "hashed", "compiled"])
def test_dropout_at_the_ends_of_its_range_is_pytorchs(form: str, rate: float) -> None:
    """Zeros at 1, the identity at 0, forward and backward; an int16 or int32 that wraps around
    would keep everything, enlarged.
    """
    torch.manual_seed(0)
    functions = {
        "plain": dropout,
        "hashed": hashed_dropout,
        "compiled": torch.compile(dropout, backend="aot_eager_decomp_partition", fullgraph=True),
    }
    x = torch.randn(7, 3, requires_grad=True)
    outer = torch.randn(7, 3)
    found, expected = functions[form](x, rate), nn.functional.dropout(x, rate)
    torch.testing.assert_close(found, expected)
    (grad,), (expected_grad,) = (torch.autograd.grad(each, x, outer) for each in (found, expected))
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("rate", [-0.1, 1.5, math.nan])
def test_a_dropout_probability_is_from_0_to_1(rate: float) -> None:
    with pytest.raises(ValueError, match=f"from 0 to 1; found {rate}"):
        dropout(torch.ones(3), rate)


def test_the_hash_is_the_published_mixer() -> None:
    """Integers of any size, cut to 32 bits by hand: Wellons's lowbias32, with the second seed put
    in halfway.
    """

    def mixed(index: int, first: int, second: int) -> int:
        bits = (index ^ first) & 0xFFFFFFFF
        bits ^= bits >> 16
        bits = (bits * 0x7FEB352D & 0xFFFFFFFF) ^ (second & 0xFFFFFFFF)
        bits ^= bits >> 15
        bits = bits * 0x846CA68B & 0xFFFFFFFF
        bits ^= bits >> 16
        return bits - 2**32 if bits >= 2**31 else bits

    for first, second in [(0, 0), (1, -1), (-(2**31), 2**31 - 2), (123_456_789, -987_654_321)]:
        assert hash_first(first, second, 300).tolist() == [
            mixed(index, first, second) for index in range(300)
        ]


@pytest.mark.parametrize("rate", [1e-4, 0.1, 0.3, 0.5, 0.9])
def test_the_hash_drops_as_many_as_asked(rate: float) -> None:
    for number in range(5):
        deviation = low(drawn(number), rate).mean().item()
        assert abs(deviation) < SIGMAS * math.sqrt(rate * (1 - rate) / COUNT)


@pytest.mark.parametrize("byte", range(4))
def test_every_byte_of_the_hash_takes_all_values_equally_often(byte: int) -> None:
    """Chi-square with 255 degrees of freedom: 255 on average, its spread 22.6."""
    counts = torch.bincount((drawn(1).long() >> (8 * byte)) & 255, minlength=256).double()
    chi = ((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum().item()
    assert abs(chi - 255) < SIGMAS * 22.6


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_adjacent_elements_are_independent(rate: float) -> None:
    """In a row, between rows of the usual widths, and in blocks: counts over sixteen adjacent
    elements are binomial.
    """
    dropped = low(drawn(2), rate)
    for lag in (1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 128, 256, 512, 1024, 2048, 65_536):
        assert sigmas(dropped[:-lag], dropped[lag:], rate) < SIGMAS, lag
    sums = Counter((dropped.view(-1, 16) > 0).sum(dim=1).tolist())
    expected = [COUNT / 16 * math.comb(16, k) * rate**k * (1 - rate) ** (16 - k) for k in range(17)]
    likely = [k for k in range(17) if expected[k] > 10]
    chi = sum((sums[k] - expected[k]) ** 2 / expected[k] for k in likely)
    assert chi < len(likely) + SIGMAS * math.sqrt(2 * len(likely))


def test_calls_are_independent_even_when_one_seed_is_shared() -> None:
    rate = 0.1
    calls = [low(drawn(number), rate) for number in range(8)]
    pairs = [(one, other) for one in range(8) for other in range(one)]
    assert all(sigmas(calls[one], calls[other], rate) < SIGMAS for one, other in pairs)
    shared = hash_first(77, 1_234_567), hash_first(77, -1_765_432_109)
    assert sigmas(low(shared[0], rate), low(shared[1], rate), rate) < SIGMAS
    moved = hash_first(
        78, -1_765_432_109
    )  # the first seeds differ in one bit: the mask would only be permuted
    assert not torch.equal(moved.sort().values, shared[0].sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_hashed_dropout_scales_in_forward_and_backward(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (
        (torch.rand(40, 50) + 0.5).to(dtype).requires_grad_()
    )  # none is zero: some of torch 2.11's normal bfloat16 numbers are
    dropped = hashed_dropout(x, 0.25)
    kept = dropped != 0
    assert dropped.dtype is dtype
    assert 0.6 < kept.double().mean().item() < 0.9
    torch.testing.assert_close(dropped, torch.where(kept, x * (1 / 0.75), 0))
    outer = (torch.rand(40, 50) + 0.5).to(dtype)
    (grad,) = torch.autograd.grad(dropped, x, outer)
    torch.testing.assert_close(grad, torch.where(kept, outer * (1 / 0.75), 0))


def test_hashed_dropout_is_a_function_of_the_seed() -> None:
    x = torch.ones(30, 7)
    torch.manual_seed(3)
    first, second = hashed_dropout(x, 0.5), hashed_dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(hashed_dropout(x, 0.5), first)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    assert not torch.equal(hashed_dropout(x, 0.5), first)


def test_layout_does_not_matter() -> None:
    """Dropout depends on the index of an element, not on its memory layout."""
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    straight = hashed_dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(hashed_dropout(x.t().contiguous().t(), 0.5), straight)


class Layers(nn.Module):
    """Transformer layers: enough of them for a compiler that would save masks it could
    recompute.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.residuals = nn.ModuleList(
            PreNorm(nn.LayerNorm(16), dropout=0.25) for _ in range(2 * count)
        )
        self.attentions = nn.ModuleList(SelfAttention(16, 2) for _ in range(count))
        self.ffns = nn.ModuleList(
            FeedForward(16, 32, activation=nn.Tanh(), dropout=0.25) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        changes = [
            change for pair in zip(self.attentions, self.ffns, strict=True) for change in pair
        ]
        for residual, change in zip(self.residuals, changes, strict=True):
            x = residual.add_output(x, change(residual.prepare_input(x)))
        return x


def kept_by(function: nn.Module, x: Tensor) -> tuple[Tensor, Counter[torch.dtype]]:
    """Run something, and count the elements saved for the backward pass by dtype."""
    kept: Counter[torch.dtype] = Counter()

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.dtype] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = function(x)
    return output, kept


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_layers_save_seeds_and_no_masks(dynamic: bool) -> None:
    """By the compiler's own division of the graph: of six dropouts nothing waits but a few whole
    numbers each.
    """
    torch.manual_seed(0)
    x = torch.randn(5, 7, 16)
    layers = torch.compile(
        Layers(2), backend="aot_eager_decomp_partition", fullgraph=True, dynamic=dynamic
    )
    output, kept = kept_by(layers, x)
    output.sum().backward()
    assert kept[torch.bool] == kept[torch.uint8] == 0
    assert kept[torch.int32] + kept[torch.int64] <= 6 * 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_dropout_uses_one_mask_in_forward_and_backward() -> None:
    x = torch.ones(64, 33, requires_grad=True)
    compiled = torch.compile(
        lambda x: dropout(x, 0.25) * 2, backend="aot_eager_decomp_partition", fullgraph=True
    )
    dropped = compiled(x)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    torch.testing.assert_close(grad, dropped)
    assert dropped.unique().tolist() == pytest.approx([0.0, 2 / 0.75])
    torch.testing.assert_close(
        torch.compile(lambda x: dropout(x, 1.0), backend="aot_eager")(x), torch.zeros(64, 33)
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "c++", "clang++")), reason="needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dropout_in_generated_code() -> None:
    """What the compiler generates multiplies whole numbers past their range as PyTorch does, seeded
    alike and anew each time.
    """
    x = torch.ones(257, 33, requires_grad=True)
    compiled = torch.compile(dropout, fullgraph=True)
    torch.manual_seed(0)
    first, second = compiled(x, 0.25), compiled(x, 0.25)
    (grad,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(grad, first)
    assert not torch.equal(first, second)
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.manual_seed(0)
    assert torch.equal(compiled(x, 0.25), first)
    hashed = torch.compile(hash_positions, fullgraph=True)
    seeds = torch.tensor([123_456_789, -987_654_321])
    assert torch.equal(hashed(x.shape, seeds), hash_positions(x.shape, seeds))
    _, ours = kept_by(torch.compile(Layers(2)), torch.randn(5, 7, 16))
    assert ours[torch.bool] == 0


@needs_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dropout_in_code_generated_for_a_gpu() -> None:
    seeds = torch.tensor([123_456_789, -987_654_321], device="cuda")
    shape = torch.Size([513, 129])
    assert torch.equal(
        torch.compile(hash_positions)(shape, seeds).cpu(), hash_positions(shape, seeds.cpu())
    )
    x = torch.ones(shape, device="cuda", requires_grad=True)
    dropped = torch.compile(dropout, fullgraph=True)(x, 0.25)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    torch.testing.assert_close(grad, dropped)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    plain = dropout(x, 0.25)  # PyTorch's own
    assert (plain == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
