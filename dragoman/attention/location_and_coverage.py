"""Location-sensitive attention and coverage: earlier weights are features of the score."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.attention.softmax_and_gumbel_alignment import Alignment, AlignmentState, Softmax
from dragoman.errors import DragomanError


class LocationSensitiveAlignment(Alignment):
    r"""Location-sensitive attention: convolved previous weights are features of the score.

    .. math:: f_t = F * \alpha_{t-1}, \qquad e_{ts} = v^\top \tanh(W q_t + U k_s + Z f_{ts})

    Chorowski et al. (2015); gradients flow through the earlier weights. Before the first position
    all attention is on the first key. `base_alignment` computes the weights: a softmax, or the
    paper's smoothing.
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
        # F; speech frames need a larger radius.
        self.filters = nn.Conv1d(1, filters, 2 * radius + 1, padding=radius, bias=False)
        self.feature_proj = nn.Linear(filters, score_width, bias=False)  # Z

    def start(self, mask: Tensor) -> AlignmentState:
        """Return the initial state, with all attention on the first key."""
        first = torch.zeros(mask.shape, dtype=self.filters.weight.dtype, device=mask.device)
        first[:, :1] = 1
        return {"mask": mask, "attended": first.masked_fill(~mask, 0)}

    def features(self, state: AlignmentState) -> Tensor | None:
        """Convolve the attended weights (B, S) to score features (B, 1, S, A)."""
        found = self.filters(state["attended"].unsqueeze(1))  # (B, filters, S)
        return self.feature_proj(found.transpose(1, 2)).unsqueeze(1)

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights of one position, and store them in the state."""
        weights, _ = self.base_alignment.step(scores, {"mask": state["mask"]}, query)
        return weights, {
            "mask": state["mask"],
            "attended": self.update_attended(
                state["attended"], weights.to(state["attended"].dtype)
            ),
        }

    def update_attended(self, attended: Tensor, weights: Tensor) -> Tensor:
        """Return the last position's weights (B, S)."""
        return weights


class CumulativeLocationAlignment(LocationSensitiveAlignment):
    r"""Location-sensitive attention on the sum of all earlier weights.

    .. math:: f_t = F * \textstyle\sum_{t' < t} \alpha_{t'}

    Shen et al. (2018), "Tacotron 2", section 2.2: 32 filters of width 31.
    """

    def start(self, mask: Tensor) -> AlignmentState:
        """Return the initial state, with nothing attended to."""
        return {
            "mask": mask,
            "attended": torch.zeros(
                mask.shape, dtype=self.filters.weight.dtype, device=mask.device
            ),
        }

    def update_attended(self, attended: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of all weights (B, S)."""
        return attended + weights


class CoverageAlignment(Alignment):
    r"""Coverage: the sum of earlier weights of each key is a feature of its score.

    .. math:: c_{ts} = \textstyle\sum_{t' < t} \alpha_{t's}, \qquad
        e_{ts} = v^\top \tanh(W q_t + U k_s + w c_{ts})

    See, Liu and Manning (2017), after Tu et al. (2016). `coverage_loss` times `loss_weight` is
    added to the model's loss.
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
        """Return the initial state, with zero coverage."""
        return {
            "mask": mask,
            "covered": torch.zeros(
                mask.shape, dtype=self.feature_proj.weight.dtype, device=mask.device
            ),
        }

    def features(self, state: AlignmentState) -> Tensor | None:
        """Project the coverage (B, S) to score features (B, 1, S, A)."""
        return self.feature_proj(state["covered"].unsqueeze(-1)).unsqueeze(1)

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights of one position, and add them to the coverage."""
        weights, _ = self.base_alignment.step(scores, {"mask": state["mask"]}, query)
        return weights, {
            "mask": state["mask"],
            "covered": state["covered"] + weights.to(state["covered"].dtype),
        }

    def step_loss(self, weights: Tensor, state: AlignmentState) -> Tensor | None:
        """Return the weighted coverage loss of one position (B,)."""
        if not self.loss_weight:
            return None
        return self.loss_weight * torch.minimum(weights, state["covered"] - weights).sum(dim=-1)


def coverage_loss(weights: Tensor) -> Tensor:
    r"""Return the coverage loss (B, T) of attention weights (B, T, S).

    .. math:: \textstyle\sum_s \min(\alpha_{ts}, c_{ts})

    See, Liu and Manning (2017), equation 12.
    """
    return torch.minimum(weights, weights.cumsum(dim=1) - weights).sum(dim=-1)


def _require_stateless(base_alignment: Alignment) -> Alignment:
    """Raise DragomanError unless an alignment depends on one position's scores and mask only."""
    if not isinstance(base_alignment, Softmax):
        raise DragomanError(
            "base_alignment must be stateless",
            found=type(base_alignment).__name__,
            fix="use Softmax, SmoothedSoftmax or HardAlignment",
        )
    return base_alignment
