"""Expected alignment of monotonic attention, with its gradients in closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Up to this many keys the probabilities of moving from each key to each other are stored as a
# matrix, which takes a GPU fewer launches than a scan.
MAX_DENSE_KEYS = 64


def expected_alignment(scores: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
    r"""Return the probability that a monotonic head stops at each key: (B, S).

    .. math:: \alpha_{ts} = p_{ts}\, q_{ts}, \quad p_{ts} = \sigma(e_{ts}), \quad
        q_{ts} = (1 - p_{t,s-1})\, q_{t,s-1} + \alpha_{t-1,s}

    Raffel et al. (2017). `scores` are e_t, `previous` is alpha_{t-1}, (B, S) each;
    `mask` (B, S) is True for real keys.
    """
    expected: Tensor = _ExpectedAlignment.apply(scores, mask, previous)  # type: ignore[no-untyped-call]
    return expected


class _ExpectedAlignment(torch.autograd.Function):
    r"""The expected alignment of one position, with ten times fewer kernels than autograd's.

    .. math:: \frac{\partial L}{\partial \alpha_{t-1,s}} = \lambda_s
            = p_s\, G_s + (1 - p_s)\, \lambda_{s+1}, \quad
        \frac{\partial L}{\partial e_s} = p_s (1 - p_s)\, q_s\, (G_s - \lambda_{s+1})

    where G is the gradient of the weights: the same recurrence from the last key to the first.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """Return the weights (B, S)."""
        stop = torch.where(mask, scores.sigmoid(), 0.0)
        transitions = (
            _transition_probabilities(1 - stop) if stop.size(1) <= MAX_DENSE_KEYS else None
        )
        arrival = (
            arrival_probabilities(1 - stop, previous)
            if transitions is None
            else (previous.unsqueeze(2) * transitions).sum(dim=1)
        )
        ctx.save_for_backward(stop, arrival, transitions)
        return stop * arrival

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        """Return the gradients of the scores and of the previous weights."""
        stop, arrival, transitions = ctx.saved_tensors
        ahead = grad * stop
        if transitions is None:
            ahead = arrival_probabilities((1 - stop).roll(1, dims=1).flip(1), ahead.flip(1)).flip(1)
        else:
            ahead = (transitions * ahead.unsqueeze(1)).sum(dim=2)
        gain = grad - F.pad(ahead[:, 1:], (0, 1))
        return stop * (1 - stop) * arrival * gain, None, ahead


def _transition_probabilities(continue_probs: Tensor) -> Tensor:
    """Return the probability of passing from each key to each other: (B, S) to (B, S, S)."""
    keys, device = continue_probs.size(1), continue_probs.device
    later = torch.ones(keys, keys, dtype=torch.bool, device=device).triu(1)
    steps = torch.where(later, continue_probs.roll(1, dims=1).unsqueeze(1), 1.0)
    return steps.cumprod(dim=2).triu()


def arrival_probabilities(continue_probs: Tensor, previous: Tensor) -> Tensor:
    r"""Return the probability that the head reaches each key: (B, S) and (B, S) to (B, S).

    .. math:: q_s = g_{s-1}\, q_{s-1} + \alpha_s

    A scan by doubling, in log2(S) rounds over all keys. It only multiplies and adds probabilities,
    so underflow gives a correct 0. The paper's closed form divides by the product of all g. At 500
    keys in float32 with scores of size 20, weights are wrong by 1 if that product is clipped, by
    4e-5 in log space, where digits cancel, and by 1e-7 here.
    """
    keep = F.pad(continue_probs[:, :-1], (1, 0))
    distance = 1
    while distance < previous.size(1):
        previous = previous + keep * F.pad(previous[:, :-distance], (distance, 0))
        keep = keep * F.pad(keep[:, :-distance], (distance, 0))
        distance *= 2
    return previous
