"""Monotonic attention against its paper's recurrence, against every path of the head, and at
lengths where others broke.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import prod

import pytest
import torch
from torch import Tensor

from dragoman.attention import (
    AdditiveScore,
    LocationScore,
    Mechanism,
    MochaAlignment,
    MonotonicAlignment,
    Softmax,
    record,
)
from dragoman.attention.monotonic import spread_over_chunks
from dragoman.config import ModelConfig
from dragoman.errors import DragomanError
from dragoman.models.factory import build_model
from dragoman.ops import monotonic_attention
from dragoman.ops.monotonic_attention import arrival_probabilities, expected_alignment

Row = list[float]
STOPS = torch.tensor(
    [[0.1, 0.5, 0.9, 0.2], [0.3, 0.3, 0.6, 0.8]], dtype=torch.float64
)  # p, two positions


def everything(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def quiet(**options: float) -> MonotonicAlignment:
    """An alignment without noise or offset: its stops are the sigmoids of its scores."""
    return MonotonicAlignment(**{"offset": 0.0, "noise": 0.0, **options}).double()


def recurrence(stops: Tensor) -> Tensor:
    """Follow the recurrence of the paper, one number after another: stops (T, S) give weights (T,
    S).
    """
    before = [1.0] + [0.0] * (stops.size(1) - 1)
    rows = []
    for row in stops.tolist():
        weights: Row = []
        q = 0.0
        for s, p in enumerate(row):
            q = (1 - row[s - 1]) * q + before[s] if s else before[0]
            weights.append(p * q)
        rows.append(weights)
        before = weights
    return torch.tensor(rows, dtype=torch.float64)


def every_path(stops: Tensor) -> Tensor:
    """Sum the probabilities of all monotonic paths, without the recurrence."""
    positions, keys = stops.shape
    weights = torch.zeros_like(stops)
    for t in range(1, positions + 1):
        for path in combinations_with_replacement(range(keys), t):  # never back
            before = (0, *path)
            chance = prod(
                float(stops[i, path[i]])
                * prod(1 - float(stops[i, s]) for s in range(before[i], path[i]))
                for i in range(t)
            )
            weights[t - 1, path[-1]] += chance
    return weights


def test_expected_weights_have_the_values_of_the_definition() -> None:
    weights = quiet()(STOPS.logit().unsqueeze(0), everything(1, 4))[0]
    wanted = torch.tensor(
        [[0.1, 0.45, 0.405, 0.009], [0.03, 0.156, 0.4614, 0.25328]], dtype=torch.float64
    )
    torch.testing.assert_close(weights, wanted)
    assert weights.sum(-1).tolist() == pytest.approx([0.964, 0.90068])


@pytest.mark.parametrize("short", [0, 64], ids=["by a scan", "by all ways"])
def test_expected_weights_are_the_recurrence_and_the_sum_over_paths(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monotonic_attention, "MAX_DENSE_KEYS", short)
    torch.manual_seed(0)
    scores = 2 * torch.randn(1, 4, 5, dtype=torch.float64)
    weights = quiet()(scores, everything(1, 5))[0]
    torch.testing.assert_close(weights, recurrence(scores[0].sigmoid()))
    torch.testing.assert_close(weights, every_path(scores[0].sigmoid()))


@pytest.mark.parametrize("size", [1.0, 20.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_five_hundred_keys_over_many_positions_stay_right(dtype: torch.dtype, size: float) -> None:
    """Scores of any size give the recurrence's weights and finite gradients (fairseq#4001: NaN from
    a vanished product).
    """
    torch.manual_seed(0)
    scores = (size * torch.randn(1, 60, 500) - 2).to(dtype).requires_grad_()
    weights = quiet().to(dtype)(scores, everything(1, 500))
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    wanted = recurrence(scores[0].detach().double().sigmoid())
    torch.testing.assert_close(weights[0].detach().double(), wanted, atol=tolerance, rtol=tolerance)
    (weights * torch.randn_like(weights)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert weights.sum(-1).le(1 + 1e-2).all()


def test_the_scan_is_the_loop_for_every_length() -> None:
    for keys in (1, 2, 3, 7, 8, 9):
        torch.manual_seed(keys)
        skip, previous = (
            torch.rand(2, keys, dtype=torch.float64),
            torch.rand(2, keys, dtype=torch.float64),
        )
        found, q = (
            arrival_probabilities(skip, previous),
            torch.zeros(2, dtype=torch.float64),
        )
        for s in range(keys):
            q = (skip[:, s - 1] * q if s else 0) + previous[:, s]
            torch.testing.assert_close(found[:, s], q)


@pytest.mark.parametrize("short", [0, 64], ids=["by a scan", "by all ways"])
def test_gradients_of_the_expected_weights_equal_finite_differences(
    short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monotonic_attention, "MAX_DENSE_KEYS", short)
    torch.manual_seed(0)
    scores = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    assert torch.autograd.gradcheck(lambda e: quiet()(e, mask), (scores,))
    chunks = MochaAlignment(
        query_width=4, key_width=4, score_width=6, noise=0.0, chunk_size=2
    ).double()
    query, key = (
        torch.randn(2, 3, 4, dtype=torch.float64),
        torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(
        lambda e, k: chunks(e, mask, query, chunks.prepare(k)), (scores, key)
    )


def test_head_in_evaluation_stops_at_the_first_match_and_never_moves_back() -> None:
    """Each row of a batch follows its own head (fairseq#3892 gathered the wrong position, #4207
    took one row only).
    """
    torch.manual_seed(0)
    scores = torch.randn(8, 12, 9, dtype=torch.float64)
    lengths = torch.tensor([9, 9, 7, 5, 3, 1, 9, 8])
    weights = quiet(offset=-0.5).eval()(scores, torch.arange(9) < lengths[:, None])
    for row, length in enumerate(lengths.tolist()):
        at = 0
        for t in range(12):  # algorithm 1 of the paper, with the sigmoid's threshold for the draw
            while at < length and scores[row, t, at] <= 0.5:
                at += 1
            wanted = [float(s == at) for s in range(9)]
            assert weights[row, t].tolist() == (wanted if at < length else [0.0] * 9)


def test_sure_scores_make_training_and_evaluation_agree() -> None:
    torch.manual_seed(0)
    scores = 100 * torch.randn(4, 6, 9, dtype=torch.float64).sign()
    alignment = quiet()
    torch.testing.assert_close(
        alignment.train()(scores, everything(4, 9)), alignment.eval()(scores, everything(4, 9))
    )


def test_noise_is_drawn_in_training_only() -> None:
    alignment, scores = MonotonicAlignment(), torch.zeros(1, 2, 6)
    torch.manual_seed(0)
    first, second = alignment(scores, everything(1, 6)), alignment(scores, everything(1, 6))
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(alignment(scores, everything(1, 6)), first)
    alignment.eval()
    assert torch.equal(alignment(scores, everything(1, 6)), alignment(scores, everything(1, 6)))


def test_the_offset_learns() -> None:
    alignment = MonotonicAlignment()
    assert alignment.offset.item() == -1
    alignment(torch.zeros(1, 2, 6), everything(1, 6)).sum().backward()
    assert alignment.offset.grad is not None
    assert alignment.offset.grad.ne(0)


def test_chunks_have_the_values_of_the_definition() -> None:
    stops = recurrence(STOPS)[1:]
    energies = torch.tensor([[0.2, -0.1, 0.5, 0.0]], dtype=torch.float64)
    found = spread_over_chunks(stops, energies, everything(1, 4), 2)
    torch.testing.assert_close(
        found, torch.tensor([[0.119613, 0.229881, 0.455562, 0.095624]]).double(), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(found.sum(), stops.sum())


@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_chunks_are_their_equation(chunk_size: int) -> None:
    torch.manual_seed(0)
    stops, energies = torch.rand(2, 6, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    found = spread_over_chunks(stops, energies, everything(2, 6), chunk_size)
    for row in range(2):
        for s in range(6):
            wanted = sum(
                stops[row, k]
                * energies[row, s].exp()
                / energies[row, max(0, k - chunk_size + 1) : k + 1].exp().sum()
                for k in range(s, min(s + chunk_size, 6))
            )
            torch.testing.assert_close(found[row, s], wanted)


def test_a_chunk_of_one_is_monotonic_attention() -> None:
    torch.manual_seed(0)
    chunks = MochaAlignment(
        query_width=4, key_width=4, score_width=6, offset=0.0, noise=0.0, chunk_size=1
    ).double()
    scores, query, key = (torch.randn(2, 3, n, dtype=torch.float64) for n in (3, 4, 4))
    torch.testing.assert_close(
        chunks(scores, everything(2, 3), query, chunks.prepare(key)),
        quiet()(scores, everything(2, 3)),
    )


def test_energies_far_apart_leave_chunks_finite() -> None:
    """A chunk far below the row's largest energy still has weights, where one common maximum would
    give 0 / 0.
    """
    energies = torch.tensor([[300.0, 0.0, 1.0, -300.0, -301.0]], requires_grad=True)
    found = spread_over_chunks(torch.full((1, 5), 0.2), energies, everything(1, 5), 2)
    assert found.sum().item() == pytest.approx(1)
    found.square().sum().backward()
    assert energies.grad is not None
    assert energies.grad.isfinite().all()


def test_chunks_cover_the_keys_before_the_head_inside_a_mechanism() -> None:
    torch.manual_seed(0)
    widths = {"query_width": 4, "key_width": 4, "score_width": 6}
    attention = (
        Mechanism(AdditiveScore(**widths), MochaAlignment(**widths, offset=0.1, chunk_size=2))
        .double()
        .eval()
    )
    query, key = (
        torch.randn(1, 5, 4, dtype=torch.float64),
        torch.randn(1, 7, 4, dtype=torch.float64),
    )
    head = (
        Mechanism(attention.score, quiet(offset=0.1))
        .eval()(query=query, key=key, value=key)
        .weights[0]
    )
    found = attention(query=query, key=key, value=key).weights[0]
    assert head.any()
    for row, stop in zip(found, head, strict=True):
        at = int(stop.argmax()) if stop.any() else -9
        assert set(row.nonzero().flatten().tolist()) == {s for s in (at - 1, at) if s >= 0}


def test_chunk_size_of_zero_is_rejected() -> None:
    with pytest.raises(DragomanError, match="chunk_size must be at least 1; found chunk_size=0"):
        MochaAlignment(query_width=4, key_width=4, score_width=6, chunk_size=0)
    with pytest.raises(
        DragomanError, match=r"MochaAlignment needs query_width .*; found query_width=0"
    ):
        MochaAlignment()


class CountingScore(AdditiveScore):
    """An additive score that counts the keys it reads."""

    def __init__(self, **widths: int) -> None:
        super().__init__(**widths)
        self.reads = 0

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        self.reads += query.size(0) * query.size(1) * prepared.size(1)
        return super().forward(query, prepared, features)


def scanned(
    attention: Mechanism, query: Tensor, key: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the contexts of `scan` and of `step`, position by position."""
    prepared = attention.prepare(key=key, value=key, mask=mask)
    states = [attention.start(prepared), attention.start(prepared)]
    contexts: list[list[Tensor]] = [[], []]
    for position in query.unsqueeze(2).unbind(1):
        context, states[0] = attention.scan(position, prepared, states[0])
        attended, states[1] = attention.step(position, prepared, states[1])
        contexts[0].append(context)
        contexts[1].append(attended.context)
        assert torch.equal(states[0]["position"], states[1]["position"])
    return torch.cat(contexts[0], 1), torch.cat(contexts[1], 1)


@pytest.mark.parametrize("offset", [-3.0, -0.5, 0.0, 0.5, 9.0])
@pytest.mark.parametrize("hole", [False, True])
@torch.no_grad()
def test_scanning_stops_where_scoring_all_keys_does(offset: float, hole: bool) -> None:
    """Heads that stay, that advance, and that move past the last key; rows of several lengths, one
    without keys.
    """
    torch.manual_seed(0)
    score = AdditiveScore(query_width=8, key_width=8, score_width=8)
    attention = Mechanism(score, MonotonicAlignment(offset=offset)).double().eval()
    score.energy.weight.mul_(6)
    query, key = (torch.randn(4, n, 8, dtype=torch.float64) for n in (9, 12))
    mask = torch.arange(12) < torch.tensor([[12], [5], [1], [0]])
    if hole:
        mask[:, 2] = False
    found, expected = scanned(attention, query, key, mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    whole = attention(query=query, key=key, value=key, mask=mask).context
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("offset", [-3.0, -0.5, 0.0, 9.0])
@torch.no_grad()
def test_every_source_position_is_read_once_and_again_only_where_the_head_is(
    offset: float,
) -> None:
    """At most S + T reads for S keys and T positions, in all rows of a batch together."""
    torch.manual_seed(0)
    score = CountingScore(query_width=8, key_width=8, score_width=8)
    attention = Mechanism(score, MonotonicAlignment(offset=offset)).eval()
    score.energy.weight.mul_(6)
    lengths, positions = torch.tensor([300, 40, 1]), 120
    query, key = torch.randn(3, positions, 8), torch.randn(3, 300, 8)
    prepared = attention.prepare(key=key, value=key, mask=torch.arange(300) < lengths.unsqueeze(1))
    assert attention.can_scan(prepared)
    state, score.reads = attention.start(prepared), 0
    for position in query.unsqueeze(2).unbind(1):
        _, state = attention.scan(position, prepared, state)
    assert 0 < score.reads <= int(lengths.sum()) + 3 * positions
    # Reads are the distance that the head went, plus one at every position where it stood on a key.
    assert score.reads >= int(state["position"].sum())


@torch.no_grad()
def test_beams_share_the_keys_of_a_sentence_when_scanning() -> None:
    torch.manual_seed(0)
    score = AdditiveScore(query_width=8, key_width=8, score_width=8)
    attention = Mechanism(score, MonotonicAlignment(offset=0.0)).eval()
    key, query = torch.randn(2, 12, 8), torch.randn(6, 1, 8)
    shared = attention.prepare(key=key, value=key)
    own = attention.prepare(key=key.repeat_interleave(3, 0), value=key.repeat_interleave(3, 0))
    state = attention.start(own)
    found, _ = attention.scan(query, shared, state)
    expected, _ = attention.step(query, own, state)
    torch.testing.assert_close(found, expected.context)


def test_modules_without_scan_score_every_key() -> None:
    """Training, recording, short sources, scores of positions, and other alignments."""
    widths = {"query_width": 4, "key_width": 4, "score_width": 4}
    score, key = AdditiveScore(**widths), torch.randn(1, 300, 4)

    def can_scan(attention: Mechanism, keys: Tensor = key) -> bool:
        return attention.can_scan(attention.prepare(key=keys, value=keys))

    monotonic = Mechanism(score, MonotonicAlignment()).eval()
    assert can_scan(monotonic)
    assert not can_scan(monotonic, key[:, :20])
    with record(monotonic):
        assert not can_scan(monotonic)
    assert not can_scan(Mechanism(LocationScore(**widths), MonotonicAlignment()).eval())
    assert not can_scan(Mechanism(score, MochaAlignment(**widths)).eval())
    assert not can_scan(Mechanism(score, Softmax()).eval())
    assert not can_scan(monotonic.train())


@torch.no_grad()
def test_a_decoder_scans_long_sources_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=("gru",),
        decoder=("gru(attention=monotonic, decoder=bahdanau)",),
        width=16,
        heads=1,
        positions="none",
        dropout=0.0,
    )
    model = build_model(config, src_vocab_size=20, tgt_vocab_size=20).double().eval()
    for parameter in model.parameters():
        parameter.mul_(2)
    src, tgt = torch.randint(4, 20, (2, 300)), torch.randint(4, 20, (2, 12))
    with record(model):
        expected = model(src, tgt)
    calls = []
    scan = Mechanism.scan
    monkeypatch.setattr(Mechanism, "scan", lambda *args: (calls.append(1), scan(*args))[1])
    torch.testing.assert_close(model(src, tgt), expected)
    assert len(calls) == 12


def test_offset_noise_and_chunks_have_their_documented_defaults() -> None:
    widths = {"query_width": 4, "key_width": 4, "score_width": 4}
    mocha = MochaAlignment(**widths)
    for alignment in (MonotonicAlignment(**widths), mocha):
        assert alignment.offset.item() == -1.0
        assert alignment.noise == 1.0
    assert mocha.chunk_size == 4


def test_noise_has_the_given_standard_deviation() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool).expand(20_000, 1)
    torch.manual_seed(0)
    alignment = MonotonicAlignment(offset=0.0, noise=3.0)
    weights, _ = alignment.step(torch.zeros(20_000, 1), alignment.start(mask))
    assert weights.logit().std().item() == pytest.approx(3.0, rel=0.05)


def test_padding_between_keys_never_stops_the_head() -> None:
    """Its probability moves on to the next real key."""
    scores, mask = torch.full((1, 3), 50.0), torch.tensor([[False, True, True]])
    previous = torch.tensor([[1.0, 0.0, 0.0]])
    torch.testing.assert_close(
        expected_alignment(scores, mask, previous), torch.tensor([[0.0, 1.0, 0.0]])
    )


def test_the_offset_is_part_of_the_probability_of_a_stop() -> None:
    alignment = MonotonicAlignment(offset=-1.0)
    found = alignment.stop_probabilities(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0]).sub(1.0).sigmoid())


@torch.no_grad()
def test_beams_of_mocha_read_the_keys_of_their_own_sentence() -> None:
    torch.manual_seed(0)
    widths = {"query_width": 3, "key_width": 4, "score_width": 5}
    attention = Mechanism(AdditiveScore(**widths), MochaAlignment(**widths, noise=0.0))
    attention = attention.double().train()  # a head that may stop at any key
    memory, query = torch.randn(2, 6, 4).double(), torch.randn(6, 1, 3).double()
    prepared = attention.prepare(key=memory, value=memory)
    rows = torch.arange(6) // 3  # three beams of two sentences
    separate = attention.prepare(key=memory[rows], value=memory[rows])
    state = attention.start(separate)
    expected, _ = attention.step(query, separate, state)
    found, _ = attention.step(query, prepared, state)
    torch.testing.assert_close(found.weights, expected.weights)
    torch.testing.assert_close(found.context, expected.context)
