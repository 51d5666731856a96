"""Local attention: a window of the source, which walks along or goes where the query sends it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.attention.alignments import Alignment, AlignmentState
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax


class LocalAlignment(Alignment):
    """What the two local attentions have in common: a softmax within `reach` places of a centre."""

    def __init__(
        self, *, query_width: int = 0, key_width: int = 0, score_width: int = 0, radius: int = 10
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        if radius < 1:
            raise DragomanError(
                "a local window must reach at least 1 place",
                found=f"reach={radius}",
                fix="Luong's is 10",
            )
        self.radius = radius  # D; the window has 2 D + 1 places

    def distances(self, centre: Tensor, keys: int) -> Tensor:
        """Measure how far each of S keys stands from the centres (...): (..., S)."""
        return torch.arange(keys, device=centre.device) - centre.unsqueeze(-1)

    def window_softmax(self, scores: Tensor, mask: Tensor, distances: Tensor) -> Tensor:
        """Spread the weights over the visible keys inside the window."""
        return masked_softmax(scores, mask & (distances.abs() <= self.radius))


class LocalMonotonicAlignment(LocalAlignment):
    r"""A window that walks one place a step: source and target are taken to run side by side.

    .. math:: \alpha_{ts} = \mathrm{softmax}_{|s - p_t| \le D}(e_{ts}), \quad p_t = \min(t, S - 1)

    Luong, Pham and Manning (2015), section 3.2, "local-m". The paper leaves open what happens when the target outruns
    the source; here the window stays at the last word.
    """

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin at the first place."""
        return {"mask": mask, "position": mask.new_zeros(mask.size(0), dtype=torch.long)}

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Weigh the window's keys, then move on."""
        mask, position = state["mask"], state["position"]
        weights = self.window_softmax(
            scores, mask, self.distances(_clamp_to_last(position, mask), mask.size(1))
        )
        return weights, {"mask": mask, "position": position + 1}

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Weigh every position's window at once."""
        positions = torch.arange(scores.size(1), device=scores.device).expand(
            scores.size(0), -1
        )  # (B, T)
        centres = _clamp_to_last(positions, mask.unsqueeze(1))
        return self.window_softmax(scores, mask.unsqueeze(1), self.distances(centres, mask.size(1)))


class LocalPredictiveAlignment(LocalAlignment):
    r"""A window whose centre the query predicts; a bell curve favours keys near it.

    .. math:: \alpha_{ts} = \mathrm{softmax}_{|s - p_t| \le D}(e_{ts}) \exp\left(-\frac{(s - p_t)^2}{2 \sigma^2}\right)

    .. math:: p_t = S\, \mathrm{sigmoid}(v^\top \tanh(W q_t)), \quad \sigma = D / 2

    Luong, Pham and Manning (2015), section 3.2, "local-p". The bell is not made up for: rows sum to less than 1.

    `position.weight` is v times the root of the width. Adam moves each of v's elements by about the learning rate whatever the
    gradient, and while attention has nothing to say yet they move together: with v itself as the weight, at width 256 and a rate of
    2e-3, the sigmoid is saturated after 75 steps, windows stand at the sentences' ends, and hardly a gradient brings them back.
    """

    is_discrete = True

    def __init__(
        self, *, query_width: int = 0, key_width: int = 0, score_width: int = 0, radius: int = 10
    ) -> None:
        super().__init__(
            query_width=query_width, key_width=key_width, score_width=score_width, radius=radius
        )
        self.require_widths(query_width=query_width)
        self.query_proj = nn.Linear(query_width, query_width, bias=False)  # W
        self.position = nn.Linear(query_width, 1, bias=False)  # v times the root of the width

    def predict(self, query: Tensor, length: Tensor) -> Tensor:
        """Return the centres (...) that queries (..., D) predict in sentences of some length."""
        logit = (
            self.position(torch.tanh(self.query_proj(query))).squeeze(-1) * query.size(-1) ** -0.5
        )
        # At least float32: a sentence's 300th place is not a number of bfloat16.
        return length * logit.to(torch.promote_types(logit.dtype, torch.float32)).sigmoid()

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin a sentence, its length counted once."""
        return {"mask": mask, "length": mask.sum(dim=-1)}

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys around the place that the query (B, D) predicts; nothing is remembered."""
        assert query is not None, "local-p predicts its place from the query"
        return self._gaussian_weights(
            scores, state["mask"], self.predict(query, state["length"])
        ), state

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Weigh every position's keys at once, around the places that the queries (B, T, D) predict."""
        assert query is not None, "local-p predicts its places from the queries"
        return self._gaussian_weights(
            scores, mask.unsqueeze(1), self.predict(query, mask.sum(dim=-1, keepdim=True))
        )

    def _gaussian_weights(self, scores: Tensor, mask: Tensor, centre: Tensor) -> Tensor:
        """Put the softmax in the window under the bell."""
        squares = self.distances(centre, mask.size(-1)).square()
        gaussian = torch.exp(squares * (-2 / self.radius**2))  # 1 / (2 sigma^2) = 2 / D^2
        return masked_softmax(scores, mask & (squares <= self.radius**2)) * gaussian.to(
            scores.dtype
        )


def _clamp_to_last(position: Tensor, mask: Tensor) -> Tensor:
    """Hold a place back at the sentence's last word."""
    return torch.minimum(position, (mask.sum(dim=-1) - 1).clamp_min(0))
