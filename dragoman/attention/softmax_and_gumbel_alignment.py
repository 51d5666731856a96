"""Alignment functions: from attention scores to attention weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax

AlignmentState = dict[str, Tensor]  # named tensors whose axis 0 is the row


class Alignment(nn.Module):
    """Base of alignment functions, which compute weights for one position or for all.

    All are built with the widths of queries, keys and scores; most need none of them.
    """

    has_score_features = False  # whether it adds terms to the score; then positions are sequential
    prepared_width = 0  # width of the result of `prepare`
    has_loss = False  # whether a position adds to the training loss; then positions are sequential
    loss_name = ""  # name of that loss
    is_discrete = False  # whether weights depend on comparisons, which rounding may change
    rows_sum_to_one = True  # whether a row of weights sums to 1, and not to at most 1
    scans_keys = False  # whether evaluation reads keys one by one, forward only: `scan`

    def __init__(self, *, query_width: int = 0, key_width: int = 0, score_width: int = 0) -> None:
        super().__init__()
        self.query_width, self.key_width, self.score_width = query_width, key_width, score_width

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys (B, S, D) once per sentence; by default nothing: (B, S, 0)."""
        return key[..., :0]

    def start(self, mask: Tensor) -> AlignmentState:
        """Return the initial state for keys with a mask (B, S)."""
        return {"mask": mask}

    def features(self, state: AlignmentState) -> Tensor | None:
        """Return terms (B, 1, S, A) to add inside the score, or None."""
        return None

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return weights (B, S) for the scores (B, S) of one position, and the next state.

        Some alignments also use the query (B, D) and `key`, the result of `prepare` (B, S, A).
        """
        raise NotImplementedError

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Return weights (B, T, S) for scores (B, T, S), mask (B, S) and query (B, T, D)."""
        state = self.start(mask)
        rows = []
        for position, position_scores in enumerate(scores.unbind(dim=1)):
            weights, state = self.step(
                position_scores, state, None if query is None else query[:, position], key
            )
            rows.append(weights)
        return torch.stack(rows, dim=1)

    def scan(
        self, score_keys: Callable[[Tensor, Tensor], Tensor], state: AlignmentState
    ) -> tuple[Tensor, AlignmentState]:
        """Return which rows (B,) stop at their new `state["position"]`, and that state.

        `score_keys(rows, positions)` returns the score (N,) of one key of each of N rows. Only for
        evaluation, and for alignments with `scans_keys`.
        """
        raise NotImplementedError

    def step_loss(self, weights: Tensor, state: AlignmentState) -> Tensor | None:
        """Return the loss (B,) of a position with weights (B, S) and its new state, or None."""
        return None

    def require_widths(self, **widths: int) -> None:
        """Raise DragomanError if a width that this alignment needs is missing."""
        for name, width in widths.items():
            if width < 1:
                raise DragomanError(
                    f"the alignment {type(self).__name__} needs {name} to size its weights",
                    found=f"{name}={width}",
                    fix=f"pass the {name} that the score has",
                )


class Softmax(Alignment):
    r"""Softmax over all keys that the mask allows.

    .. math:: \alpha_{ts} = \exp(e_{ts}) / \sum_{s'} \exp(e_{ts'})

    Bahdanau, Cho and Bengio (2015), equation 6; "global attention" in Luong, Pham and
    Manning (2015).
    """

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights of one position; the state does not change."""
        return masked_softmax(scores, state["mask"]), state

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Return all weights; `mask` is (B, S), or broadcastable to the scores."""
        return masked_softmax(scores, mask.unsqueeze(1) if mask.dim() == 2 else mask)


class SmoothedSoftmax(Softmax):
    r"""Softmax with a sigmoid instead of the exponential, which gives flatter weights.

    .. math:: \alpha_{ts} = \sigma(e_{ts}) / \sum_{s'} \sigma(e_{ts'})

    Chorowski et al. (2015), "smoothing". It is the softmax of the log-sigmoid.
    """

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights of one position; the state does not change."""
        return super().step(F.logsigmoid(scores), state)

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Return all weights."""
        return super().forward(F.logsigmoid(scores), mask)


class HardAlignment(Softmax):
    r"""Hard attention: one sampled key in training, the best key in evaluation.

    .. math:: \alpha_{t} = \mathrm{onehot}(\arg\max_s (e_{ts} + \gamma_{ts})), \quad
        \gamma_{ts} \sim \mathrm{Gumbel}(0, 1)

    Xu et al. (2015), stochastic "hard" attention. The sample is drawn from the softmax by the
    Gumbel-max trick, and its gradient is that of the softmax of the same noisy scores
    (straight-through; Jang, Gu and Poole, 2017), which needs neither REINFORCE's baseline nor its
    entropy term.
    """

    is_discrete = True

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return one-hot weights of one position; the state does not change."""
        return self._choose(scores, state["mask"]), state

    def forward(
        self, scores: Tensor, mask: Tensor, query: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        """Return all one-hot weights."""
        return self._choose(scores, mask.unsqueeze(1))

    def _choose(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Return one-hot weights whose gradient is the softmax's (straight-through)."""
        if self.training:
            scores = self.add_gumbel_noise(scores)
        probabilities = masked_softmax(scores, mask)
        return self.one_hot_argmax(scores, mask, probabilities) + (
            probabilities - probabilities.detach()
        )

    @staticmethod
    def add_gumbel_noise(scores: Tensor) -> Tensor:
        """Add Gumbel noise, so that the argmax is a sample of the softmax."""
        # The negative log of an exponential variate; in float32, as bfloat16 has few distinct
        # values.
        exponential = torch.empty_like(
            scores, dtype=torch.promote_types(scores.dtype, torch.float32)
        ).exponential_()
        return scores - exponential.clamp_min(torch.finfo(exponential.dtype).tiny).log().to(
            scores.dtype
        )

    @staticmethod
    def one_hot_argmax(scores: Tensor, mask: Tensor, like: Tensor) -> Tensor:
        """Return 1 for the best visible key and 0 for all others, in the dtype of `like`."""
        best = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).argmax(dim=-1, keepdim=True)
        return torch.zeros_like(like).scatter(-1, best, 1.0).masked_fill(~mask, 0.0)
