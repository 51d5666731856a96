"""Alignments that tell the score where they looked before: by place, or by how much of each word is done."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.attention.alignments import Alignment, AlignmentState, Softmax
from dragoman.errors import DragomanError


class LocationSensitiveAlignment(Alignment):
    r"""Filters over the last position's weights tell the score where to go on.

    .. math:: f_t = F * \alpha_{t-1}, \qquad e_{ts} = v^\top \tanh(W q_t + U k_s + Z f_{ts})

    Chorowski et al. (2015), "location-aware"; the gradient flows back through the earlier weights. Before the first
    position all attention lies on the first key. `inner` makes weights of the scores: a softmax, or the paper's smoothing.
    """

    has_score_features = True

    def __init__(
        self,
        *,
        query_width: int = 0,
        key_width: int = 0,
        score_width: int = 0,
        filters: int = 32,
        radius: int = 15,
        base_alignment: Alignment | None = None,
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.require_widths(score_width=score_width)
        self.base_alignment = _require_stateless(
            Softmax() if base_alignment is None else base_alignment
        )
        self.filters = nn.Conv1d(
            1, filters, 2 * radius + 1, padding=radius, bias=False
        )  # F; a wider one for speech frames
        self.feature_proj = nn.Linear(filters, score_width, bias=False)  # Z

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin with all attention on the first key."""
        first = torch.zeros(mask.shape, dtype=self.filters.weight.dtype, device=mask.device)
        first[:, :1] = 1
        return {"mask": mask, "attended": first.masked_fill(~mask, 0)}

    def features(self, state: AlignmentState) -> Tensor | None:
        """Filter where was looked, (B, S), into terms (B, 1, S, A)."""
        found = self.filters(state["attended"].unsqueeze(1))  # (B, filters, S)
        return self.feature_proj(found.transpose(1, 2)).unsqueeze(1)

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys for one position and remember it."""
        weights, _ = self.base_alignment.step(scores, {"mask": state["mask"]}, query)
        return weights, {
            "mask": state["mask"],
            "attended": self.update_attended(
                state["attended"], weights.to(state["attended"].dtype)
            ),
        }

    def update_attended(self, attended: Tensor, weights: Tensor) -> Tensor:
        """Keep the last position's weights (B, S) only."""
        return weights


class CumulativeLocationAlignment(LocationSensitiveAlignment):
    r"""Filters over the sum of all earlier weights, which also shows what is behind.

    .. math:: f_t = F * \textstyle\sum_{t' < t} \alpha_{t'}

    Shen et al. (2018), "Tacotron 2", section 2.2: 32 filters of width 31.
    """

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin with nothing looked at."""
        return {
            "mask": mask,
            "attended": torch.zeros(
                mask.shape, dtype=self.filters.weight.dtype, device=mask.device
            ),
        }

    def update_attended(self, attended: Tensor, weights: Tensor) -> Tensor:
        """Add the weights (B, S) to those before."""
        return attended + weights


class CoverageAlignment(Alignment):
    r"""How much each key was attended to so far is a term of its score, so that nothing is said twice or left out.

    .. math:: c_{ts} = \textstyle\sum_{t' < t} \alpha_{t's}, \qquad e_{ts} = v^\top \tanh(W q_t + U k_s + w c_{ts})

    See, Liu and Manning (2017), the coverage mechanism, after Tu et al. (2016). `coverage_loss` is its training term, added to a
    model's loss by `loss_weight`.
    """

    has_score_features = True
    loss_name = "coverage"

    def __init__(
        self,
        *,
        query_width: int = 0,
        key_width: int = 0,
        score_width: int = 0,
        base_alignment: Alignment | None = None,
        loss_weight: float = 0.0,
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.loss_weight, self.has_loss = loss_weight, loss_weight > 0
        self.require_widths(score_width=score_width)
        self.base_alignment = _require_stateless(
            Softmax() if base_alignment is None else base_alignment
        )
        self.feature_proj = nn.Linear(1, score_width, bias=False)  # w

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin with nothing covered."""
        return {
            "mask": mask,
            "covered": torch.zeros(
                mask.shape, dtype=self.feature_proj.weight.dtype, device=mask.device
            ),
        }

    def features(self, state: AlignmentState) -> Tensor | None:
        """Turn coverage (B, S) into terms (B, 1, S, A)."""
        return self.feature_proj(state["covered"].unsqueeze(-1)).unsqueeze(1)

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys for one position and add it to what is covered."""
        weights, _ = self.base_alignment.step(scores, {"mask": state["mask"]}, query)
        return weights, {
            "mask": state["mask"],
            "covered": state["covered"] + weights.to(state["covered"].dtype),
        }

    def step_loss(self, weights: Tensor, state: AlignmentState) -> Tensor | None:
        """Say how much was attended to again, (B,): `coverage_loss` of one position, by its weight."""
        if not self.loss_weight:
            return None
        return self.loss_weight * torch.minimum(weights, state["covered"] - weights).sum(dim=-1)


def coverage_loss(weights: Tensor) -> Tensor:
    r"""Sum what was attended to again: weights (B, T, S) give one number a position, (B, T).

    .. math:: \textstyle\sum_s \min(\alpha_{ts}, c_{ts})

    See, Liu and Manning (2017), the coverage loss.
    """
    return torch.minimum(weights, weights.cumsum(dim=1) - weights).sum(dim=-1)


def _require_stateless(base_alignment: Alignment) -> Alignment:
    """Let in only what makes weights of one position's scores and mask: a memory inside a memory has no meaning here."""
    if not isinstance(base_alignment, Softmax):
        raise DragomanError(
            "the inner alignment must be one without a memory of its own",
            found=type(base_alignment).__name__,
            fix="use Softmax, Smoothed or Hard",
        )
    return base_alignment
