"""Alignments: what to make of the scores. Some remember where they looked before."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax

AlignmentState = dict[str, Tensor]  # named tensors whose axis 0 is the row


class Alignment(nn.Module):
    """Turn scores into weights, one position after another or all at once.

    All are built with the widths of queries, keys and scores; most need none of them.
    """

    has_score_features = (
        False  # whether it has terms for the score, which make a position wait for the one before
    )
    prepared_width = 0  # the width of what `prepare` makes
    has_loss = False  # whether a position adds to the loss in training, which makes a block go from one to the next
    loss_name = ""  # what is added is called
    is_discrete = (
        False  # whether rounding may turn what is attended to, because numbers are compared
    )

    def __init__(self, *, query_width: int = 0, key_width: int = 0, score_width: int = 0) -> None:
        super().__init__()
        self.query_width, self.key_width, self.score_width = query_width, key_width, score_width

    def prepare(self, key: Tensor) -> Tensor:
        """Do once a sentence what needs only the keys (B, S, D); most alignments need none: (B, S, 0)."""
        return key[..., :0]

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin a sentence whose keys may be attended to where `mask` (B, S) is True."""
        return {"mask": mask}

    def features(self, state: AlignmentState) -> Tensor | None:
        """Give the score terms (B, 1, S, A) to take in, where this alignment has any."""
        return None

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys for one position: scores (B, S) give weights (B, S).

        The query (B, D), and `key`, what `prepare` made (B, S, A), are for those that look beyond the scores.
        """
        raise NotImplementedError

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Weigh the keys for every position: scores (B, T, S), mask (B, S), query (B, T, D) give weights (B, T, S)."""
        state = self.start(mask)
        rows = []
        for position, at in enumerate(scores.unbind(dim=1)):
            weights, state = self.step(
                at, state, None if query is None else query[:, position], key
            )
            rows.append(weights)
        return torch.stack(rows, dim=1)

    def step_loss(self, weights: Tensor, state: AlignmentState) -> Tensor | None:
        """Say what a position adds to the loss (B,), after it got weights (B, S) and left a state."""
        return None

    def require_widths(self, **widths: int) -> None:
        """Refuse to be built without a width that this alignment cannot do without."""
        for name, width in widths.items():
            if width < 1:
                raise DragomanError(
                    f"the alignment {type(self).__name__} needs {name} to size its weights",
                    found=f"{name}={width}",
                    fix=f"pass the {name} that the score has",
                )


class Softmax(Alignment):
    r"""Spread each query's attention over all the keys that it may see.

    .. math:: \alpha_{ts} = \exp(e_{ts}) / \sum_{s'} \exp(e_{ts'})

    Bahdanau, Cho and Bengio (2015), equation 6; called global attention by Luong, Pham and Manning (2015).
    """

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys for one position; nothing is remembered."""
        return masked_softmax(scores, state["mask"]), state

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Weigh the keys for every position at once; `mask` is (B, S), or broadcastable to the scores."""
        return masked_softmax(scores, mask.unsqueeze(1) if mask.dim() == 2 else mask)


class SmoothedSoftmax(Softmax):
    r"""A bounded sigmoid in the exponential's place: no key can outshout all others.

    .. math:: \alpha_{ts} = \sigma(e_{ts}) / \sum_{s'} \sigma(e_{ts'})

    Chorowski et al. (2015), "smoothing". It is the softmax of the sigmoid's logarithm.
    """

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Weigh the keys for one position; nothing is remembered."""
        return super().step(F.logsigmoid(scores), state)

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Weigh the keys for every position at once."""
        return super().forward(F.logsigmoid(scores), mask)


class HardAlignment(Softmax):
    r"""Look at one key only: a sampled one in training, the best one otherwise.

    .. math:: \alpha_{t} = \mathrm{onehot}(\arg\max_s (e_{ts} + \gamma_{ts})), \quad \gamma_{ts} \sim \mathrm{Gumbel}(0, 1)

    Xu et al. (2015), stochastic "hard" attention. The sample is drawn from the softmax by Gumbel's trick, and its gradient is that of
    the softmax of the same noisy scores (straight-through; Jang, Gu and Poole, 2017), which needs neither REINFORCE's
    baseline nor its entropy term. Without noise (evaluation) the choice is the argmax.
    """

    is_discrete = True

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Choose one key for one position; nothing is remembered."""
        return self._choose(scores, state["mask"]), state

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Choose one key for every position at once."""
        return self._choose(scores, mask.unsqueeze(1))

    def _choose(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Set the chosen key to 1: exactly in the values, through the softmax in the gradients."""
        if self.training:
            scores = self.add_gumbel_noise(scores)
        probabilities = masked_softmax(scores, mask)
        return self.one_hot_argmax(scores, mask, probabilities) + (
            probabilities - probabilities.detach()
        )

    @staticmethod
    def add_gumbel_noise(scores: Tensor) -> Tensor:
        """Add noise by which the best score is one drawn from the softmax: Gumbel's trick."""
        # An exponential number's negative logarithm is Gumbel's; in float32, for bfloat16 has few different ones.
        exponential = torch.empty_like(
            scores, dtype=torch.promote_types(scores.dtype, torch.float32)
        ).exponential_()
        return scores - exponential.clamp_min(torch.finfo(exponential.dtype).tiny).log().to(
            scores.dtype
        )

    @staticmethod
    def one_hot_argmax(scores: Tensor, mask: Tensor, like: Tensor) -> Tensor:
        """Set the best visible key to 1 and all others to 0, in the type of a tensor."""
        best = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).argmax(dim=-1, keepdim=True)
        return torch.zeros_like(like).scatter(-1, best, 1.0).masked_fill(~mask, 0.0)
