"""Local attention of Luong, Pham and Manning (2015): local-m and local-p."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.attention.softmax_and_gumbel_alignment import Alignment, AlignmentState
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax


class LocalAlignment(Alignment):
    """Base of local attention: a softmax over keys within `radius` of a center."""

    def __init__(
        self, *, query_width: int = 0, key_width: int = 0, score_width: int = 0, radius: int = 10
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        if radius < 1:
            raise DragomanError(
                "radius of local attention must be at least 1",
                found=f"radius={radius}",
                fix="use 10, as the paper does",
            )
        self.radius = radius  # D; the window has 2 D + 1 positions

    def distances(self, center: Tensor, keys: int) -> Tensor:
        """Return the distance of each of S keys from the centers (...): (..., S)."""
        return torch.arange(keys, device=center.device) - center.unsqueeze(-1)

    def window_softmax(self, scores: Tensor, mask: Tensor, distances: Tensor) -> Tensor:
        """Return the softmax over the visible keys inside the window."""
        return masked_softmax(scores, mask & (distances.abs() <= self.radius))


class LocalMonotonicAlignment(LocalAlignment):
    r"""Local-m: the window moves by one position per step, as if the alignment were diagonal.

    .. math:: \alpha_{ts} = \mathrm{softmax}_{|s - p_t| \le D}(e_{ts}), \quad p_t = \min(t, S - 1)

    Luong, Pham and Manning (2015), section 3.2, "local-m". The paper does not define p_t
    when the target is longer than the source; here the window stays at the last token.
    """

    def start(self, mask: Tensor) -> AlignmentState:
        """Return the initial state, at the first position."""
        return {"mask": mask, "position": mask.new_zeros(mask.size(0), dtype=torch.long)}

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights of one position, and move the window."""
        mask, position = state["mask"], state["position"]
        weights = self.window_softmax(
            scores, mask, self.distances(_clamp_to_last(position, mask), mask.size(1))
        )
        return weights, {"mask": mask, "position": position + 1}

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Return all weights."""
        positions = torch.arange(scores.size(1), device=scores.device)
        positions = positions.expand(scores.size(0), -1)  # (B, T)
        centers = _clamp_to_last(positions, mask.unsqueeze(1))
        return self.window_softmax(scores, mask.unsqueeze(1), self.distances(centers, mask.size(1)))


class LocalPredictiveAlignment(LocalAlignment):
    r"""Local-p: the query predicts the window's center; a Gaussian favors keys near it.

    .. math:: \alpha_{ts} = \mathrm{softmax}_{|s - p_t| \le D}(e_{ts})
        \exp\left(-\frac{(s - p_t)^2}{2 \sigma^2}\right)

    .. math:: p_t = S\, \mathrm{sigmoid}(v^\top \tanh(W q_t)), \quad \sigma = D / 2

    Luong, Pham and Manning (2015), section 3.2, "local-p". Weights are not renormalized:
    rows sum to less than 1.

    `position.weight` is v times the square root of the width. Adam moves each element of v by about
    the learning rate whatever the gradient, and early in training they move together. With v itself
    as the weight, at width 256 and a learning rate of 2e-3, the sigmoid saturates after 75 steps:
    windows stay at the ends of sentences, with hardly a gradient to bring them back.
    """

    is_discrete = True
    rows_sum_to_one = False

    def __init__(
        self, *, query_width: int = 0, key_width: int = 0, score_width: int = 0, radius: int = 10
    ) -> None:
        super().__init__(
            query_width=query_width, key_width=key_width, score_width=score_width, radius=radius
        )
        self.require_widths(query_width=query_width)
        self.query_proj = nn.Linear(query_width, query_width, bias=False)  # W
        self.position = nn.Linear(query_width, 1, bias=False)  # v times sqrt(width)

    def predict(self, query: Tensor, length: Tensor) -> Tensor:
        """Return the window centers (...) that queries (..., D) predict, for sentence lengths."""
        logit = (
            self.position(torch.tanh(self.query_proj(query))).squeeze(-1) * query.size(-1) ** -0.5
        )
        # At least float32: bfloat16 cannot represent position 300.
        return length * logit.to(torch.promote_types(logit.dtype, torch.float32)).sigmoid()

    def start(self, mask: Tensor) -> AlignmentState:
        """Return the initial state, with the sentences' lengths."""
        return {"mask": mask, "length": mask.sum(dim=-1)}

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights around the center that the query (B, D) predicts."""
        assert query is not None, "local-p predicts the center from the query"
        return self._gaussian_weights(
            scores, state["mask"], self.predict(query, state["length"])
        ), state

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Return all weights, around the centers that the queries (B, T, D) predict."""
        assert query is not None, "local-p predicts the centers from the queries"
        return self._gaussian_weights(
            scores, mask.unsqueeze(1), self.predict(query, mask.sum(dim=-1, keepdim=True))
        )

    def _gaussian_weights(self, scores: Tensor, mask: Tensor, center: Tensor) -> Tensor:
        """Return the softmax in the window times the Gaussian."""
        squares = self.distances(center, mask.size(-1)).square()
        gaussian = torch.exp(squares * (-2 / self.radius**2))  # 1 / (2 sigma^2) = 2 / D^2
        return masked_softmax(scores, mask & (squares <= self.radius**2)) * gaussian.to(
            scores.dtype
        )


def _clamp_to_last(position: Tensor, mask: Tensor) -> Tensor:
    """Return positions clamped to the last token of each sentence."""
    return torch.minimum(position, (mask.sum(dim=-1) - 1).clamp_min(0))
