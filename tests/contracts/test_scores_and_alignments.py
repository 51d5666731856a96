"""What every score and every alignment promises, alone and together."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from dragoman.attention import Alignment, Mechanism, SelfAttention
from dragoman.attention.catalogue import ALIGNMENTS, SCORES
from dragoman.errors import DragomanError

WIDTHS = {"query_width": 4, "key_width": 4, "score_width": 6}
PAIRS = [
    (score, alignment)
    for score, alignment in product(SCORES, ALIGNMENTS)
    if SCORES.load(score).accepts_features or not ALIGNMENTS.load(alignment).has_score_features
]
REFUSED = [pair for pair in product(SCORES, ALIGNMENTS) if pair not in PAIRS]


def mechanism(score: str, alignment: str, value: nn.Module | None = None) -> Mechanism:
    """Build a pair in evaluation mode, where nothing is sampled."""
    torch.manual_seed(0)
    return (
        Mechanism(SCORES.load(score)(**WIDTHS), ALIGNMENTS.load(alignment)(**WIDTHS), value)
        .double()
        .eval()
    )


def exempt(alignment: str, promise: str) -> bool:
    return promise in (ALIGNMENTS[alignment].exempt or {})


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (B, T, D), keys (B, S, D) and a mask (B, S)."""
    torch.manual_seed(1)
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])
    return (
        torch.randn(2, 3, 4, dtype=torch.float64),
        torch.randn(2, 5, 4, dtype=torch.float64),
        mask,
    )


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_stepping_equals_forward(score: str, alignment: str) -> None:
    attention = mechanism(score, alignment, nn.Linear(4, 3))
    query, key, mask = tensors()
    whole = attention(query=query, key=key, value=key, mask=mask)
    prepared = attention.prepare(key=key, value=key, mask=mask)
    state = attention.start(prepared)
    for step in range(3):
        attended, state = attention.step(query[:, step : step + 1], prepared, state)
        torch.testing.assert_close(attended.context, whole.context[:, step : step + 1])
        torch.testing.assert_close(attended.weights, whole.weights[:, step : step + 1])
    assert whole.context.shape == (2, 3, 3)


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_hidden_keys_change_nothing(score: str, alignment: str) -> None:
    attention = mechanism(score, alignment)
    query, key, mask = tensors()
    before = attention(query=query, key=key, value=key, mask=mask)
    key[0, 3:] = 1e3
    after = attention(query=query, key=key, value=key, mask=mask)
    torch.testing.assert_close(after.context, before.context)
    assert not after.weights[0, :, 3:].any()


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_weights_times_values_are_the_context_and_rows_sum_to_one(
    score: str, alignment: str
) -> None:
    attention = mechanism(score, alignment)
    query, key, mask = tensors()
    context, weights = attention(query=query, key=key, value=key, mask=mask)
    torch.testing.assert_close(weights @ key, context)
    if exempt(alignment, "rows sum to one"):
        assert weights.ge(0).all()
        assert weights.sum(-1).le(1 + 1e-12).all()
    else:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    nothing = attention(query=query, key=key, value=key, mask=torch.zeros(2, 5, dtype=torch.bool))
    assert not nothing.weights.any()
    assert not nothing.context.any()


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_no_mask_means_everything(score: str, alignment: str) -> None:
    attention = mechanism(score, alignment)
    query, key, _ = tensors()
    whole = attention(query=query, key=key, value=key, mask=torch.ones(2, 5, dtype=torch.bool))
    torch.testing.assert_close(attention(query=query, key=key, value=key), whole)


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_gradients_equal_finite_differences(score: str, alignment: str) -> None:
    attention = mechanism(score, alignment)
    query, key, mask = tensors()
    query.requires_grad_()
    key.requires_grad_()
    if exempt(alignment, "gradients"):  # the weaker promise: finite ones in training
        attention.train()(query=query, key=key, value=key, mask=mask).context.sum().backward()
        assert key.grad is not None
        assert key.grad.isfinite().all()
        return
    assert torch.autograd.gradcheck(
        lambda q, k: attention(query=q, key=k, value=k, mask=mask).context, (query, key)
    )


@pytest.mark.parametrize("pair", REFUSED, ids=" ".join)
def test_features_that_the_score_does_not_accept_are_rejected_when_built(
    pair: tuple[str, str],
) -> None:
    with pytest.raises(
        DragomanError, match=r"that accepts them; found \w+ with \w+Score; use score additive"
    ):
        mechanism(*pair)


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_other_rows_and_padding_change_nothing(score: str, alignment: str) -> None:
    """A batch of sentences gives what each gives alone (fairseq#4207: monotonic attention that
    could not be batched).
    """
    attention = mechanism(score, alignment)
    query, key, mask = tensors()
    together = attention(query=query, key=key, value=key, mask=mask)
    alone = attention(query=query[:1], key=key[:1, :3], value=key[:1, :3])
    torch.testing.assert_close(together.context[:1], alone.context)
    torch.testing.assert_close(together.weights[:1, :, :3], alone.weights)


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_selecting_rows_commutes_with_stepping(score: str, alignment: str) -> None:
    """A reordered state continues each row as before (fairseq#3892 gathered the wrong rows)."""
    attention = mechanism(score, alignment)
    query, key, mask = tensors()
    rows = torch.tensor([1, 0, 1])
    prepared = attention.prepare(key=key, value=key, mask=mask)
    _, state = attention.step(query[:, :1], prepared, attention.start(prepared))
    wanted, _ = attention.step(query[:, 1:2], prepared, state)
    chosen = attention.prepare(key=key[rows], value=key[rows], mask=mask[rows])
    found, _ = attention.step(
        query[rows, 1:2], chosen, {name: tensor[rows] for name, tensor in state.items()}
    )
    torch.testing.assert_close(found.weights, wanted.weights[rows])


@pytest.mark.parametrize(("score", "alignment"), PAIRS)
def test_training_in_mixed_precision_reaches_every_parameter(score: str, alignment: str) -> None:
    attention = mechanism(score, alignment).float().train()
    query, key, mask = tensors()
    query, key = query.float().requires_grad_(), key.float()
    with torch.autocast("cpu", torch.bfloat16):
        context, weights = attention(query=query, key=key, value=key, mask=mask)
        prepared = attention.prepare(key=key, value=key, mask=mask)
        attention.step(query[:, :1], prepared, attention.start(prepared))
    context.float().square().sum().backward()
    assert weights.isfinite().all()
    for path, parameter in attention.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_an_alignment_all_at_once_equals_its_steps(name: str) -> None:
    torch.manual_seed(0)
    alignment = ALIGNMENTS.load(name)(**WIDTHS).double().eval()
    query, key, mask = tensors()
    scores, own = torch.randn(2, 3, 5, dtype=torch.float64), alignment.prepare(key)
    whole = alignment(scores, mask, query, own)
    stepwise = Alignment.forward(
        alignment, scores, mask, query, own
    )  # the loop that every alignment inherits
    torch.testing.assert_close(stepwise, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_five_hundred_keys_and_hidden_ones_give_finite_weights_and_gradients(
    name: str, dtype: torch.dtype
) -> None:
    """No NaN from masks or from products that vanish, in training's types (fairseq#4001)."""
    torch.manual_seed(0)
    alignment = ALIGNMENTS.load(name)(**WIDTHS).to(dtype)
    scores = (20 * torch.randn(2, 4, 500)).to(dtype).requires_grad_()
    mask = torch.arange(500) < torch.tensor([[500], [0]])  # the second row may see nothing
    with torch.autograd.set_detect_anomaly(True):
        own = alignment.prepare(torch.randn(2, 500, 4).to(dtype))
        weights = alignment(scores, mask, torch.randn(2, 4, 4).to(dtype), own)
        weights.square().sum().backward()
    assert weights.dtype == dtype
    assert weights.isfinite().all()
    assert not weights[1].any()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


@pytest.mark.parametrize("name", SCORES)
def test_a_score_works_with_and_without_heads(name: str) -> None:
    torch.manual_seed(0)
    score = SCORES.load(name)(query_width=4, key_width=4, score_width=6)
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)  # three heads
    together = score(query, score.prepare(key))
    for head in range(3):
        torch.testing.assert_close(
            score(query[:, head], score.prepare(key[:, head])), together[:, head]
        )


@pytest.mark.parametrize("name", SCORES)
def test_a_score_fits_into_multi_head_attention(name: str) -> None:
    """A score that calls itself fused must be what the fused kernel computes."""
    torch.manual_seed(0)
    attention = SelfAttention(
        8, 2, score=SCORES.load(name)(query_width=4, key_width=4, score_width=6)
    )
    x = torch.randn(2, 5, 8)
    query, key, value = attention.split(attention.query_key_value(x), 3).unbind(1)
    weights = attention.score(query, attention.score.prepare(key)).softmax(-1)
    torch.testing.assert_close(
        attention(x), attention.output((weights @ value).transpose(1, 2).flatten(2))
    )


class FadingAlignment(ALIGNMENTS.load("softmax")):  # type: ignore[misc]
    """A stateful alignment: attended keys get less weight afterwards."""

    has_score_features = True

    def start(self, mask: Tensor) -> dict[str, Tensor]:
        return {"mask": mask, "seen": torch.zeros(mask.shape, dtype=torch.float64)}

    def features(self, state: dict[str, Tensor]) -> Tensor | None:
        return state["seen"][:, None, :, None]

    def step(
        self,
        scores: Tensor,
        state: dict[str, Tensor],
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        weights, _ = super().step(scores, state, query, key)
        return weights, {**state, "seen": state["seen"] + weights}


class FeatureScore(SCORES.load("scaled_dot")):  # type: ignore[misc]
    """A score function that accepts the alignment's features."""

    accepts_features = True

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        scores = super().forward(query, prepared)
        return scores if features is None else scores - features.squeeze(-1)


def test_mechanism_accepts_a_stateful_alignment() -> None:
    attention = Mechanism(FeatureScore(query_width=4, key_width=4), FadingAlignment()).double()
    query, key, mask = tensors()
    found = attention(query=query, key=key, value=key, mask=mask)
    seen = torch.zeros(2, 5, dtype=torch.float64)
    for step in range(3):  # straight from the definition
        scores = (query[:, step : step + 1] @ key.mT).squeeze(1)
        weights = (scores / 2 - seen).masked_fill(~mask, -torch.inf).softmax(-1)
        torch.testing.assert_close(found.weights[:, step], weights)
        seen = seen + weights


def test_a_dot_product_of_two_widths_is_rejected() -> None:
    with pytest.raises(DragomanError, match="equal width; found 4 and 6; project one of them"):
        SCORES.load("scaled_dot")(query_width=4, key_width=6)
