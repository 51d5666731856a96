"""What every score and every alignment promises, alone and together."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from dragoman.attention import Mechanism, SelfAttention
from dragoman.attention.catalogue import ALIGNMENTS, SCORES
from dragoman.errors import DragomanError

PAIRS = list(product(SCORES, ALIGNMENTS))


def mechanism(score: str, alignment: str, value: nn.Module | None = None) -> Mechanism:
    torch.manual_seed(0)
    return Mechanism(SCORES.load(score)(query_width=4, key_width=4, score_width=6), ALIGNMENTS.load(alignment)(), value).double()


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Make queries (B, T, D), keys (B, S, D) and a mask (B, S)."""
    torch.manual_seed(1)
    mask = torch.tensor([[True, True, True, False, False], [True] * 5])
    return torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64), mask


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
def test_weights_times_values_are_the_context_and_rows_sum_to_one(score: str, alignment: str) -> None:
    attention = mechanism(score, alignment)
    query, key, mask = tensors()
    context, weights = attention(query=query, key=key, value=key, mask=mask)
    torch.testing.assert_close(weights @ key, context)
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
def test_gradients_are_slopes(score: str, alignment: str) -> None:
    attention = mechanism(score, alignment)
    query, key, mask = tensors()
    query.requires_grad_()
    key.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: attention(query=q, key=k, value=k, mask=mask).context, (query, key))


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_an_alignment_all_at_once_equals_its_steps(name: str) -> None:
    alignment = ALIGNMENTS.load(name)()
    scores, mask = torch.randn(2, 3, 5, dtype=torch.float64), tensors()[2]
    whole = alignment(scores, mask)
    stepwise = super(type(alignment), alignment).forward(scores, mask)  # the loop that every alignment inherits
    torch.testing.assert_close(stepwise, whole)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_works_with_and_without_heads(name: str) -> None:
    torch.manual_seed(0)
    score = SCORES.load(name)(query_width=4, key_width=4, score_width=6)
    query, key = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)  # three heads
    together = score(query, score.prepare(key))
    for head in range(3):
        torch.testing.assert_close(score(query[:, head], score.prepare(key[:, head])), together[:, head])


@pytest.mark.parametrize("name", SCORES)
def test_a_score_fits_into_multi_head_attention(name: str) -> None:
    """A score that calls itself fused must be what the fused kernel computes."""
    torch.manual_seed(0)
    attention = SelfAttention(8, 2, score=SCORES.load(name)(query_width=4, key_width=4, score_width=6))
    x = torch.randn(2, 5, 8)
    query, key, value = attention.project(x).unbind(1)
    weights = attention.score(query, attention.score.prepare(key)).softmax(-1)
    torch.testing.assert_close(attention(x), attention.output((weights @ value).transpose(1, 2).flatten(2)))


class Fading(ALIGNMENTS.load("softmax")):  # type: ignore[misc]
    """An alignment with a memory: what was looked at is less interesting afterwards."""

    sequential = True

    def start(self, mask: Tensor) -> dict[str, Tensor]:
        return {"mask": mask, "seen": torch.zeros(mask.shape, dtype=torch.float64)}

    def features(self, state: dict[str, Tensor]) -> Tensor | None:
        return state["seen"][:, None, :, None]

    def step(self, scores: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        weights, _ = super().step(scores, state)
        return weights, {**state, "seen": state["seen"] + weights}


class Listening(SCORES.load("scaled_dot")):  # type: ignore[misc]
    """A score with room for the alignment's terms."""

    def forward(self, query: Tensor, prepared: Tensor, features: Tensor | None = None) -> Tensor:
        scores = super().forward(query, prepared)
        return scores if features is None else scores - features.squeeze(-1)


def test_the_seam_takes_an_alignment_that_remembers() -> None:
    attention = Mechanism(Listening(query_width=4, key_width=4), Fading()).double()
    query, key, mask = tensors()
    found = attention(query=query, key=key, value=key, mask=mask)
    seen = torch.zeros(2, 5, dtype=torch.float64)
    for step in range(3):  # straight from the definition
        scores = (query[:, step : step + 1] @ key.mT).squeeze(1)
        weights = (scores / 2 - seen).masked_fill(~mask, -torch.inf).softmax(-1)
        torch.testing.assert_close(found.weights[:, step], weights)
        seen = seen + weights


def test_a_dot_product_of_two_widths_is_refused() -> None:
    with pytest.raises(DragomanError, match="one width; found 4 and 6; project one of them"):
        SCORES.load("scaled_dot")(query_width=4, key_width=6)
