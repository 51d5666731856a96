"""The best next pieces of each row of logits with their log-probabilities: in one pass on a GPU, and step by step.

PyTorch goes over the logits, which are the largest tensor of a step, once to normalise them, once to write them, and several times more
to find the largest. The kernel is Triton's (`ranking_rows.py`), imported at the first use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.kernels.guarding import Guarded

LOW = 31  # ids below it can be forbidden: a bit each
MOST = 16  # pieces of a row: each is a round that the compiler writes out
COMPARED = 64  # rows, for the definition takes the memory of several tensors of logits

RANKING = Guarded("the ranking of logits")


class Ranked(NamedTuple):
    """The best pieces of each row, in falling order; of equal ones the lower comes first."""

    log_probs: Tensor  # (N, K)
    ids: Tensor  # (N, K)


class Rules(NamedTuple):
    """What may not come next, whatever its probability: it is not spread over the rest."""

    never: tuple[int, ...]  # pieces
    end: int  # the piece that may not come before `at_least` steps were taken
    step: Tensor  # ()
    at_least: Tensor  # ()


def rank(logits: Tensor, count: int, rules: Rules, *, bias: Tensor | None = None) -> Ranked | None:
    """Find the `count` best pieces of each row of logits (N, V), a bias (V,) added, by Triton's kernel; None where it does not run."""
    fits = logits.numel() > 0 and count <= min(MOST, logits.size(1)) and logits.stride(1) == 1 and max(*rules.never, rules.end) < LOW
    if not (fits and RANKING.tries(logits)):
        return None

    def fast() -> Ranked:
        from dragoman.kernels import ranking_rows

        return Ranked(*ranking_rows.rank(logits, bias, count, rules.never, rules.end, rules.step, rules.at_least))

    def few() -> Tensor:
        return biased(logits[:COMPARED], bias)

    def values(found: Ranked) -> tuple[Tensor, ...]:
        """Show what stands at the ids: of nearly equal pieces either may come first."""
        log_probs, ids = (each[:COMPARED] for each in found)
        return log_probs.masked_fill(log_probs == -torch.inf, 0.0), few().gather(1, ids)

    kind = (logits.dtype, logits.size(1), count, bias is None)
    found = RANKING.run(kind, fast, lambda: rank_reference(few(), count, rules), seen_as=values)
    return found if RANKING.works and len(found.ids) == len(logits) else None


def biased(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias (V,), if there is one, in float32."""
    return logits.float() if bias is None else logits.float() + bias


def rank_reference(logits: Tensor, count: int, rules: Rules) -> Ranked:
    """Do what `rank` does from its definition."""
    scores = restricted(logits.float().log_softmax(dim=-1), rules)
    ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
    return Ranked(*(each[:, :count].contiguous() for each in ordered))  # rows side by side, as whoever takes them expects


def restricted(scores: Tensor, rules: Rules) -> Tensor:
    """Push what may not come out of sight of scores (N, V), which are changed."""
    for piece in rules.never:
        scores[:, piece].fill_(-torch.inf)
    scores[:, rules.end].masked_fill_(rules.step < rules.at_least, -torch.inf)
    return scores
