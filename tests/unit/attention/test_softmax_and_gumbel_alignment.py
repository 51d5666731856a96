"""Every alignment against plain loops written from the papers' equations, in float64."""

from __future__ import annotations

from math import exp

import pytest
import torch
from torch import Tensor

from dragoman.attention import (
    AdditiveScore,
    Alignment,
    CoverageAlignment,
    CumulativeLocationAlignment,
    HardAlignment,
    LocalMonotonicAlignment,
    LocalPredictiveAlignment,
    LocationSensitiveAlignment,
    Mechanism,
    SmoothedSoftmax,
    Softmax,
    coverage_loss,
    masks,
)
from dragoman.errors import DragomanError

Row = list[float]


def doubles(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def softmax(scores: Row, window: set[int] | None = None) -> Row:
    kept = [exp(e) if window is None or s in window else 0.0 for s, e in enumerate(scores)]
    return [each / sum(kept) for each in kept]


def test_smoothed_weights_have_the_values_of_the_definition() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    weights, _ = SmoothedSoftmax().step(scores, {"mask": torch.ones(1, 4, dtype=torch.bool)})
    torch.testing.assert_close(
        weights[0],
        torch.tensor([0.210014, 0.307065, 0.369959, 0.112963]).double(),
        atol=1e-6,
        rtol=0,
    )


def test_hard_attention_takes_the_best_key_after_training() -> None:
    scores = doubles(2, 3, 5)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    weights = HardAlignment().eval()(scores, mask)
    assert torch.equal(weights.sum(-1), torch.ones(2, 3).double())
    assert torch.equal(weights.argmax(-1), scores.masked_fill(~mask[:, None], -9).argmax(-1))


@pytest.mark.parametrize("training", [False, True])
def test_hard_attention_to_no_key_is_zero(training: bool) -> None:
    mask = torch.tensor([[True, False], [False, False]])
    weights = HardAlignment().train(training)(doubles(2, 1, 2), mask)
    assert weights.tolist() == [[[1.0, 0.0]], [[0.0, 0.0]]]


def test_softmax_takes_a_mask_for_every_position() -> None:
    scores, mask = doubles(2, 3, 3), masks.causal(3).expand(2, 3, 3)
    weights = Softmax()(scores, mask)
    for row in range(2):
        for position in range(3):
            expected = softmax(scores[row, position].tolist(), set(range(position + 1)))
            assert weights[row, position].tolist() == pytest.approx(expected)


def test_hard_attention_samples_in_training_by_the_softmax() -> None:
    torch.manual_seed(0)
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(1, 20_000, 4)
    weights = HardAlignment()(scores, torch.ones(1, 4, dtype=torch.bool))
    assert set(weights.round(decimals=5).unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(
        weights.mean(1)[0],
        torch.tensor([0.087144, 0.236883, 0.643914, 0.032059]),
        atol=0.01,
        rtol=0,
    )


def test_hard_attention_learns_through_the_softmax_of_its_sample() -> None:
    scores, value = doubles(1, 1, 4).requires_grad_(), doubles(4, seed=1)
    torch.manual_seed(2)
    (HardAlignment()(scores, torch.ones(1, 4, dtype=torch.bool)) @ value).sum().backward()
    torch.manual_seed(2)
    noisy = scores.detach() - torch.empty_like(scores).exponential_().log()
    noisy.requires_grad_()
    (noisy.softmax(-1) @ value).sum().backward()
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, noisy.grad)
    assert scores.grad.any()


def test_local_m_advances_and_stays_at_the_last_word() -> None:
    scores, mask = doubles(2, 9, 7), torch.arange(7) < torch.tensor([[7], [4]])
    weights = LocalMonotonicAlignment(radius=2)(scores, mask)
    for row, length in enumerate((7, 4)):
        for t in range(9):
            centre = min(t, length - 1)
            wanted = softmax(
                scores[row, t].tolist(), {s for s in range(length) if abs(s - centre) <= 2}
            )
            assert weights[row, t].tolist() == pytest.approx(wanted, abs=1e-12)


def test_local_p_is_its_equation() -> None:
    torch.manual_seed(0)
    alignment = LocalPredictiveAlignment(query_width=3, radius=2).double()
    scores, query = doubles(2, 4, 7), 3 * doubles(2, 4, 3, seed=1)
    mask = torch.arange(7) < torch.tensor([[7], [5]])
    weights = alignment(scores, mask, query)
    w, v = alignment.query_proj.weight, alignment.position.weight[0] / 3**0.5
    for row, length in enumerate((7, 5)):
        for t in range(4):
            center = length / (1 + exp(-(v @ torch.tanh(w @ query[row, t])).item()))
            inside = softmax(
                scores[row, t].tolist(), {s for s in range(length) if abs(s - center) <= 2}
            )
            wanted = [
                key_weight * exp(-((s - center) ** 2) / 2) for s, key_weight in enumerate(inside)
            ]  # sigma = 1
            assert weights[row, t].tolist() == pytest.approx(wanted, abs=1e-12)


def test_local_p_gaussian_has_the_values_of_its_definition() -> None:
    alignment = LocalPredictiveAlignment(query_width=3, radius=2)
    distances = alignment.distances(torch.tensor([4.3]).double(), 9)
    bell = alignment._gaussian_weights(
        torch.zeros(1, 9).double(), torch.ones(1, 9, dtype=torch.bool), torch.tensor([4.3]).double()
    )
    window = distances.abs() <= 2
    # Four integer positions are within 2 of 4.3; each has weight 1/4 before the Gaussian.
    assert (4 * bell)[window].tolist() == pytest.approx(
        [0.429557, 0.955997, 0.782705, 0.235746], abs=1e-6
    )


@pytest.mark.parametrize("width", [64, 1024])
def test_local_p_does_not_saturate_while_nothing_is_learnt(width: int) -> None:
    """Forty steps of Adam that all pull one way, at 2e-3: a position that every query predicts at
    an end has no gradient to return.
    """
    torch.manual_seed(0)
    alignment, query, length = (
        LocalPredictiveAlignment(query_width=width),
        torch.randn(32, width),
        torch.full((32,), 20),
    )
    optimizer = torch.optim.Adam(alignment.parameters(), 2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        alignment.predict(query, length).mean().backward()
        optimizer.step()
    assert 0.05 < (alignment.predict(query, length) / length).median() < 0.45


def test_local_p_positions_are_exact_in_bfloat16() -> None:
    alignment = LocalPredictiveAlignment(query_width=2).bfloat16()
    center = alignment.predict(torch.zeros(1, 2, dtype=torch.bfloat16), torch.tensor([601]))
    assert center.item() == 300.5


def previous(before: Row, weights: Row) -> Row:
    return weights


def total(before: Row, weights: Row) -> Row:
    return [a + b for a, b in zip(before, weights, strict=True)]


@pytest.mark.parametrize(
    ("kind", "begin", "remember"),
    [(LocationSensitiveAlignment, 1.0, previous), (CumulativeLocationAlignment, 0.0, total)],
    ids=["previous", "sum"],
)
def test_location_features_are_the_filtered_weights(
    kind: type[LocationSensitiveAlignment], begin: float, remember
) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    score = AdditiveScore(query_width=3, key_width=3, score_width=4)
    attention = Mechanism(score, kind(score_width=4, filters=2, radius=1)).double()
    query, key = doubles(1, 3, 3), doubles(1, 5, 3, seed=1)
    found = attention(query=query, key=key, value=key)
    filters = attention.alignment.filters.weight[:, 0]  # (2, 3)
    previous_weights = [begin, 0.0, 0.0, 0.0, 0.0]
    for t in range(3):
        padded, energies = [0.0, *previous_weights, 0.0], []
        for s in range(5):
            f = filters @ torch.tensor(padded[s : s + 3], dtype=torch.float64)
            inside = (
                score.query_proj.weight @ query[0, t]
                + score.key_proj.weight @ key[0, s]
                + attention.alignment.feature_proj.weight @ f
            )
            energies.append((score.energy.weight[0] @ torch.tanh(inside)).item())
        weights = softmax(energies)
        assert found.weights[0, t].tolist() == pytest.approx(weights, abs=1e-12)
        previous_weights = remember(previous_weights, weights)


def test_coverage_is_its_equation() -> None:
    torch.manual_seed(0)
    score = AdditiveScore(query_width=3, key_width=3, score_width=4)
    attention = Mechanism(score, CoverageAlignment(score_width=4)).double()
    query, key = doubles(1, 4, 3), doubles(1, 5, 3, seed=1)
    found = attention(query=query, key=key, value=key)
    covered = torch.zeros(5).double()
    for t in range(4):
        w = attention.alignment.feature_proj.weight[:, 0]
        inside = (
            score.query_proj.weight @ query[0, t]
            + key[0] @ score.key_proj.weight.T
            + covered[:, None] * w
        )
        weights = (torch.tanh(inside) @ score.energy.weight[0]).softmax(-1)
        torch.testing.assert_close(found.weights[0, t], weights)
        covered = covered + weights


@pytest.mark.parametrize(
    "kind", [LocationSensitiveAlignment, CumulativeLocationAlignment, CoverageAlignment]
)
def test_the_memory_learns_and_can_be_smoothed(kind: type[LocationSensitiveAlignment]) -> None:
    torch.manual_seed(0)
    score = AdditiveScore(query_width=3, key_width=3, score_width=4)
    attention = Mechanism(score, kind(score_width=4, base_alignment=SmoothedSoftmax())).double()
    query, key = doubles(1, 4, 3), doubles(1, 5, 3, seed=1)
    attention(query=query, key=key, value=key).context.square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in attention.parameters()
    )
    plain = Mechanism(score, kind(score_width=4)).double()
    plain.load_state_dict(attention.state_dict())
    assert not torch.allclose(
        plain(query=query, key=key, value=key).weights,
        attention(query=query, key=key, value=key).weights,
    )


def test_coverage_loss_counts_repeated_attention() -> None:
    weights = torch.tensor([[[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [0.9, 0.0, 0.1]]])
    torch.testing.assert_close(coverage_loss(weights), torch.tensor([[0.0, 0.2, 0.8]]))


@pytest.mark.parametrize(
    ("kind", "width"),
    [
        (LocalPredictiveAlignment, "query_width"),
        (LocationSensitiveAlignment, "score_width"),
        (CoverageAlignment, "score_width"),
    ],
)
def test_a_missing_width_is_named(kind: type[Alignment], width: str) -> None:
    with pytest.raises(
        DragomanError, match=f"{kind.__name__} needs {width} .*; found {width}=0; pass the {width}"
    ):
        kind()


def test_empty_window_is_rejected() -> None:
    with pytest.raises(
        DragomanError, match="radius of local attention must be at least 1; found radius=0"
    ):
        LocalMonotonicAlignment(radius=0)
    weights = LocalMonotonicAlignment(radius=1)(torch.zeros(1, 5, 5), torch.ones(1, 5).bool())
    assert torch.equal(weights[0] > 0, masks.local(5, radius=1))


def test_a_stateful_base_alignment_is_rejected() -> None:
    with pytest.raises(
        DragomanError,
        match="base_alignment must be stateless; found LocalMonotonicAlignment; use Softmax",
    ):
        CoverageAlignment(score_width=4, base_alignment=LocalMonotonicAlignment())
    assert CoverageAlignment(score_width=4, base_alignment=Softmax()).base_alignment is not None


def test_location_filters_are_tacotrons_by_default() -> None:
    for kind in (LocationSensitiveAlignment, CumulativeLocationAlignment):
        assert kind(score_width=4).filters.weight.shape == (32, 1, 31)
    assert LocationSensitiveAlignment(score_width=4, radius=2).filters.weight.size(2) == 5
    assert LocalMonotonicAlignment().radius == 10
    assert LocalPredictiveAlignment(query_width=4).radius == 10


def test_a_sentence_without_keys_has_nothing_attended_at_first() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    attended = LocationSensitiveAlignment(score_width=4).start(mask)["attended"]
    assert attended.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@torch.no_grad()
def test_local_p_centers_windows_in_the_sentence_without_padding() -> None:
    """In all positions at once and step by step: a query of zeros predicts the middle."""
    alignment = LocalPredictiveAlignment(query_width=2, radius=1).double()
    mask, query = torch.arange(8) < torch.tensor([[8], [4]]), torch.zeros(2, 1, 2).double()
    rows = alignment(torch.zeros(2, 1, 8).double(), mask, query)[:, 0]
    assert rows.argmax(dim=-1).tolist() == [4, 2]
    stepped, _ = alignment.step(torch.zeros(2, 8).double(), alignment.start(mask), query[:, 0])
    torch.testing.assert_close(stepped, rows)
