"""What lies between the products of attention in chunks: a chain of small operations that a compiler makes one kernel of.

They write over the scores that they are given, which nobody needs afterwards.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MOST_VARIANTS = 256  # one for each round, causal or not, in each type; torch gives up quietly past its own 8


def share(scores: Tensor, mine: Tensor, theirs: Tensor, window: int, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the scores (chunks, window, span) of a round into exponentials; give them, what was taken off, and the logs of their sums.

    Codes of queries (rounds, chunks, window) and of keys (rounds, chunks, span) say who meets in this round, the last, and in none before.
    """
    scores = scores.masked_fill_(_hidden(mine, theirs, window, causal), -torch.inf)
    highest = scores.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min / 4)  # finite, so that differences are numbers
    shares = scores.sub_(highest).exp_()
    wide = torch.promote_types(scores.dtype, torch.float32)
    return shares, highest, shares.sum(dim=-1, keepdim=True, dtype=wide).log_() + highest


def slope(
    scores: Tensor, gains: Tensor, total: Tensor, common: Tensor, mine: Tensor, theirs: Tensor, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Give the weights of a round and the gradient of its scores, by what each value would gain (chunks, window, span).

    `total` is the log of each query's sum over all rounds and `common` what the softmax takes from all its gradients, (chunks, window, 1).
    """
    weights = scores.masked_fill_(_hidden(mine, theirs, window, causal), -torch.inf).sub_(total).exp_()
    return weights, gains.sub_(common).mul_(weights)


def _hidden(mine: Tensor, theirs: Tensor, window: int, causal: bool) -> Tensor:
    """Say which keys a query does not meet, or has met in an earlier round: (chunks, window, span)."""
    mine, theirs = mine.unsqueeze(-1), theirs.unsqueeze(-2)
    lowest, highest = mine - window, mine - 1 if causal else mine + window
    hidden = (theirs[-1] < lowest[-1]).logical_or_(theirs[-1] > highest[-1])
    if not causal:
        hidden = hidden.logical_or_(theirs[-1] == mine[-1])  # itself
    for turn in range(mine.size(0) - 1):
        hidden = hidden.logical_or_((theirs[turn] >= lowest[turn]).logical_and_(theirs[turn] <= highest[turn]))
    return hidden


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call; should that fail, the plain one takes over."""
    chosen: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        try:
            chosen[:] = chosen or [_compiled(function)]
            return chosen[0](*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if chosen == [function]:
                raise
            logger.warning("compiling failed, and hashed attention goes on without it (%s); set compiled=false", type(error).__name__)
            chosen[:] = [function]
            return function(*arguments)

    return call


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for any length."""
    limits: Any = torch._dynamo.config  # torch 2.11 has no public switch for it
    limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
    return torch.compile(function, dynamic=True)
