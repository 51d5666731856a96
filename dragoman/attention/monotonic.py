"""Monotonic attention: a head that only moves to the right, and its soft chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.alignments import Alignment, AlignmentState
from dragoman.attention.scores import AdditiveScore
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax

MAX_DENSE_KEYS = 64  # keys up to which all ways between two of them are written down, which takes a GPU fewer steps than a scan


class MonotonicAlignment(Alignment):
    r"""Go on from the last place, key by key, and stop at the first that fits; never go back.

    .. math:: p_{ts} = \sigma(e_{ts} + r + \xi), \quad \alpha_{ts} = p_{ts}\, q_{ts}

    .. math:: q_{ts} = (1 - p_{t,s-1})\, q_{t,s-1} + \alpha_{t-1,s}, \quad \alpha_0 = (1, 0, \dots, 0)

    Raffel et al. (2017). Training takes the expected weights, with noise on the scores that makes the
    choices clear-cut; evaluation stops where e + r > 0, without noise. What runs past the last key is lost, and with it
    all later weights: rows sum to at most 1. Every key is scored, so this form saves reading, not computing.

    The trained offset r starts below 0, or all attention would rest on the first keys: at -1, where one key in four
    stops the head, because a translation is about as long as its source. For speech the authors take -4.
    """

    is_discrete = True

    def __init__(
        self,
        *,
        query_width: int = 0,
        key_width: int = 0,
        score_width: int = 0,
        offset: float = -1.0,
        noise: float = 1.0,
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.offset = nn.Parameter(torch.tensor(offset))  # r
        self.noise = noise  # the deviation of xi

    def start(self, mask: Tensor) -> AlignmentState:
        """Begin with the head on the first key."""
        wide = torch.promote_types(self.offset.dtype, torch.float32)
        previous = torch.zeros(mask.shape, dtype=wide, device=mask.device)
        previous[:, :1] = 1
        return {"mask": mask, "previous": previous}

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Move on for one position: the expected weights in training, a one or nothing otherwise."""
        mask, previous = state["mask"], state["previous"]
        scores_wide = scores.to(previous.dtype) + self.offset.to(previous.dtype)
        weights = (
            self._expected(scores_wide, mask, previous)
            if self.training
            else _first_stop(scores_wide, mask, previous)
        )
        return weights.to(scores.dtype), {"mask": mask, "previous": weights}

    def _expected(self, scores: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """Say how probable it is that the head stops at each key."""
        if self.noise:
            scores = torch.add(scores, torch.randn_like(scores), alpha=self.noise)
        found: Tensor = _ExpectedAlignment.apply(scores, mask, previous)  # type: ignore[no-untyped-call]
        return found


class MochaAlignment(MonotonicAlignment):
    r"""Monotonic chunkwise attention: where the head stops, a softmax looks back over the last `chunk` keys.

    .. math:: \beta_{ts} = \sum_{k=s}^{s+w-1} \alpha_{tk} \exp(u_{ts}) \Big/ \sum_{l=k-w+1}^{k} \exp(u_{tl})

    Chiu and Raffel (2018); u is an additive score of its own. Rows sum to what the head's row does.
    """

    def __init__(
        self,
        *,
        query_width: int = 0,
        key_width: int = 0,
        score_width: int = 0,
        offset: float = -1.0,
        noise: float = 1.0,
        chunk_size: int = 4,
    ) -> None:
        super().__init__(
            query_width=query_width,
            key_width=key_width,
            score_width=score_width,
            offset=offset,
            noise=noise,
        )
        self.require_widths(query_width=query_width, key_width=key_width, score_width=score_width)
        if chunk_size < 1:
            raise DragomanError(
                "a chunk must hold at least 1 key",
                found=f"chunk={chunk_size}",
                fix="the paper takes 2 to 8",
            )
        self.chunk_size = chunk_size  # w
        self.prepared_width = score_width
        self.chunk_score = AdditiveScore(
            query_width=query_width, key_width=key_width, score_width=score_width
        )

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys for the chunks' own score: (B, S, D) gives (B, S, A)."""
        return self.chunk_score.prepare(key)

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Move on for one position and look back from there."""
        assert query is not None, "a chunk's score needs the query"
        assert key is not None, "a chunk's score needs what `prepare` made of the keys"
        stop_weights, state = super().step(scores, state)
        energies = self.chunk_score(query.view(key.size(0), -1, query.size(1)), key).view_as(
            stop_weights
        )  # rows may share a sentence's keys
        return spread_over_chunks(stop_weights, energies, state["mask"], self.chunk_size), state


class _ExpectedAlignment(torch.autograd.Function):
    r"""One position's expected weights, with their slopes written out: PyTorch would find them by ten times as many small steps.

    .. math:: \frac{\partial L}{\partial \alpha_{t-1,s}} = \lambda_s = p_s\, G_s + (1 - p_s)\, \lambda_{s+1}, \quad
        \frac{\partial L}{\partial e_s} = p_s (1 - p_s)\, q_s\, (G_s - \lambda_{s+1})

    where G are the slopes of the weights: the head's walk, taken from the last key to the first.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """Weigh the keys (B, S)."""
        stop = torch.where(mask, scores.sigmoid(), 0.0)
        paths = _transition_probabilities(1 - stop) if stop.size(1) <= MAX_DENSE_KEYS else None
        arrival = (
            arrival_probabilities(1 - stop, previous)
            if paths is None
            else (previous.unsqueeze(2) * paths).sum(dim=1)
        )
        ctx.save_for_backward(stop, arrival, paths)
        return stop * arrival

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        """Give the slopes of the scores and of the weights before."""
        stop, arrival, paths = ctx.saved_tensors
        ahead = grad * stop
        if paths is None:
            ahead = arrival_probabilities((1 - stop).roll(1, dims=1).flip(1), ahead.flip(1)).flip(1)
        else:
            ahead = (paths * ahead.unsqueeze(1)).sum(dim=2)
        gain = grad - F.pad(ahead[:, 1:], (0, 1))
        return stop * (1 - stop) * arrival * gain, None, ahead


def _transition_probabilities(continue_probs: Tensor) -> Tensor:
    """Say how probable it is that a head at each key comes by each other one: (B, S) gives (B, S, S), from key to key."""
    later = torch.ones(
        continue_probs.size(1),
        continue_probs.size(1),
        dtype=torch.bool,
        device=continue_probs.device,
    ).triu(1)
    return (
        torch.where(later, continue_probs.roll(1, dims=1).unsqueeze(1), 1.0).cumprod(dim=2).triu()
    )


def arrival_probabilities(continue_probs: Tensor, previous: Tensor) -> Tensor:
    r"""Say how probable it is that the head comes by each key: (B, S) and (B, S) give (B, S).

    .. math:: q_s = g_{s-1}\, q_{s-1} + \alpha_s

    A scan by doubling, in log2(S) rounds over all keys. It only multiplies probabilities and adds them, so what vanishes
    vanishes to a right 0. The paper's closed form divides by the product of all g: at 500 keys in float32, with scores of
    size 20, weights are wrong by 1 when that product is clipped, by 4e-5 in logarithms, where digits cancel, and by 1e-7 here.
    """
    keep = F.pad(continue_probs[:, :-1], (1, 0))
    distance = 1
    while distance < previous.size(1):
        previous = previous + keep * F.pad(previous[:, :-distance], (distance, 0))
        keep = keep * F.pad(keep[:, :-distance], (distance, 0))
        distance *= 2
    return previous


def spread_over_chunks(
    stop_weights: Tensor, energies: Tensor, mask: Tensor, chunk_size: int
) -> Tensor:
    """Divide the weight of each stop among the `chunk` keys that end there, by their energies: all are (B, S)."""
    keys, before = stop_weights.size(1), chunk_size - 1
    windows = F.pad(energies, (before, 0)).unfold(
        1, chunk_size, 1
    )  # (B, S, chunk); the last of a window is the stop itself
    visible = F.pad(mask, (before, 0)).unfold(1, chunk_size, 1)
    parts = masked_softmax(windows, visible) * stop_weights.unsqueeze(-1)
    shifted = [
        F.pad(parts[:, before - slot :, slot], (0, before - slot))[:, :keys]
        for slot in range(chunk_size)
    ]
    return torch.stack(shifted).sum(dim=0)


def _first_stop(scores: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
    """Stop at the first key from the last place on whose score is above 0; after the end there is none."""
    fits = (scores > 0) & mask & (previous.cumsum(dim=-1) > 0.5)
    return (fits & (fits.cumsum(dim=-1) == 1)).to(previous.dtype)
