"""Every score against plain loops written from the papers' equations, in float64."""

from __future__ import annotations

from math import exp, sqrt, tanh

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dragoman.attention import NormedAdditiveScore, Score
from dragoman.attention.catalogue import SCORES
from dragoman.errors import DragomanError

Row = list[float]
UNEQUAL = ("general", "additive", "normed_additive", "location", "fixed")
POSITIONAL = ("location", "fixed")


def dot(a: Row, b: Row) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def times(matrix: nn.Linear, x: Row) -> Row:
    return [dot(row, x) for row in matrix.weight.tolist()]


def additive(score: Score, q: Row, k: Row) -> float:
    hidden = [
        tanh(w + u)
        for w, u in zip(times(score.query_proj, q), times(score.key_proj, k), strict=True)
    ]
    return dot(score.energy.weight[0].tolist(), hidden)


def normed(score: Score, q: Row, k: Row) -> float:
    parts = zip(
        times(score.query_proj, q), times(score.key_proj, k), score.bias.tolist(), strict=True
    )
    v = score.energy.weight[0].tolist()
    return score.gain.item() * dot(v, [tanh(w + u + b) for w, u, b in parts]) / sqrt(dot(v, v))


PAPERS = {
    "scaled_dot": lambda score, q, k, s: dot(q, k) / sqrt(len(q)),
    "dot": lambda score, q, k, s: dot(q, k),
    "learned_scale_dot": lambda score, q, k, s: score.scale.item() * dot(q, k),
    "cosine": lambda score, q, k, s: (
        exp(score.log_strength.item()) * dot(q, k) / sqrt(dot(q, q) * dot(k, k))
    ),
    "general": lambda score, q, k, s: dot(q, times(score.key_proj, k)),
    "location": lambda score, q, k, s: times(score.position_proj, q)[s],
    "fixed": lambda score, q, k, s: score.weight[s].item(),
    "additive": lambda score, q, k, s: additive(score, q, k),
    "normed_additive": lambda score, q, k, s: normed(score, q, k),
}


def build(name: str, key_width: int = 4, **options: int) -> Score:
    torch.manual_seed(0)
    score: Score = SCORES.load(name)(
        query_width=4, key_width=key_width, score_width=6, **options
    ).double()
    for (
        parameter
    ) in score.parameters():  # away from starting values at which a wrong formula could hide
        nn.init.normal_(parameter)
    return score


def tensors(key_width: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(
        2, 5, key_width, dtype=torch.float64
    )


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_its_paper_s_equation(name: str) -> None:
    score = build(name)
    query, key = tensors()
    found = score(query, score.prepare(key))
    assert found.shape == (2, 3, 5)
    for b, t, s in ((b, t, s) for b in range(2) for t in range(3) for s in range(5)):
        wanted = PAPERS[name](score, query[b, t].tolist(), key[b, s].tolist(), s)
        assert found[b, t, s].item() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_score_with_a_matrix_joins_two_widths(name: str) -> None:
    score = build(name, key_width=7)
    query, key = tensors(key_width=7)
    assert score(query, score.prepare(key))[1, 2, 4].item() == pytest.approx(
        PAPERS[name](score, query[1, 2].tolist(), key[1, 4].tolist(), 4), rel=1e-12
    )


@pytest.mark.parametrize("name", sorted(set(SCORES) - set(UNEQUAL)))
def test_dot_product_of_two_widths_is_rejected(name: str) -> None:
    with pytest.raises(DragomanError, match="equal width; found 4 and 6; project one of them"):
        SCORES.load(name)(query_width=4, key_width=6)


@pytest.mark.parametrize("name", SCORES)
def test_features_are_a_term_inside_the_tanh_or_rejected(name: str) -> None:
    score, (query, key) = build(name), tensors()
    features = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    if not score.accepts_features:
        with pytest.raises(
            DragomanError,
            match=(
                rf"only additive scores.*found {type(score).__name__} and .*\(2, 3, 5, 6\); "
                rf"use score additive"
            ),
        ):
            score(query, score.prepare(key), features)
        return
    # A feature that is the same everywhere is a bias of the keys.
    same = score(query, score.prepare(key), features[:1, :1, :1].expand(2, 3, 5, 6))
    torch.testing.assert_close(same, score(query, score.prepare(key) + features[0, 0, 0]))
    assert not torch.allclose(score(query, score.prepare(key), features), same)


@pytest.mark.parametrize("name", SCORES)
def test_every_parameter_receives_a_gradient(name: str) -> None:
    score = build(name, **({"max_positions": 5} if name in POSITIONAL else {}))
    query, key = tensors()
    weights = score(query.requires_grad_(), score.prepare(key)).softmax(-1)
    (weights @ key).square().sum().backward()
    for path, parameter in score.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.ne(0).any(), path


@pytest.mark.parametrize("name", SCORES)
def test_a_key_of_zeros_leaves_values_and_gradients_finite(name: str) -> None:
    """Padding is often zeros, whose direction is undefined (fairseq#4001: NaN spread from masked
    positions).
    """
    score, (query, key) = build(name), tensors()
    key[0, 3:] = 0
    key.requires_grad_()
    found = score(query, score.prepare(key))
    found.sum().backward()
    assert found.isfinite().all()
    assert key.grad is None or key.grad.isfinite().all()


def test_normed_additive_is_pytorch_s_weight_norm() -> None:
    score = build("normed_additive")
    query, key = tensors()
    peer = nn.Linear(6, 1, bias=False).double()
    peer.weight.data.copy_(score.energy.weight)
    peer = parametrizations.weight_norm(peer)
    peer.parametrizations.weight.original0.data.fill_(score.gain.item())
    hidden = torch.tanh(
        score.query_proj(query)[:, :, None] + score.key_proj(key)[:, None] + score.bias
    )
    torch.testing.assert_close(score(query, score.prepare(key)), peer(hidden).squeeze(-1))


def test_normed_additive_starts_where_the_paper_does() -> None:
    score = NormedAdditiveScore(query_width=4, key_width=4, score_width=16)
    assert score.gain.item() == pytest.approx(0.25)
    assert not score.bias.any()


@pytest.mark.parametrize("name", POSITIONAL)
def test_positional_scores_ignore_the_words_past_their_last_position(name: str) -> None:
    score = build(name, max_positions=3)
    query, key = tensors()
    weights = score(query, score.prepare(key)).softmax(-1)
    assert not weights[..., 3:].any()
    torch.testing.assert_close(weights[..., :3], score(query, key[:, :3]).softmax(-1))


def test_fixed_weights_start_equal_and_see_neither_query_nor_keys() -> None:
    score = SCORES.load("fixed")(query_width=4, key_width=4)
    query, key = tensors()
    assert not score(query, key).any()
    torch.nn.init.normal_(score.weight)
    torch.testing.assert_close(score(query, key), score(query + 1, key.flip(1)))


def test_the_cosine_does_not_see_lengths() -> None:
    score = build("cosine")
    query, key = tensors()
    torch.testing.assert_close(
        score(3 * query, score.prepare(100 * key)), score(query, score.prepare(key))
    )
