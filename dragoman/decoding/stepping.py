"""What every strategy shares: the model's verbs, the rows of a search, and one step's log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.errors import DivergedError
from dragoman.text.specials import BOS, EOS, PAD, UNK

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Stepper(Protocol):
    """A model that can be asked for the next token: all that a search knows about it."""

    def start(self, memory: Any) -> Any:
        """Prepare the state before the first token, a row for each row of the memory."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Take one more token a row (B,) and give the logits (B, V) of the next."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """What is asked of a search, row by row; nothing here depends on a row's neighbours."""

    limits: Ints  # (B,) most tokens that a row's output may have
    prefixes: Sequence[Sequence[int]]  # tokens that a row's output must begin with
    lines: Sequence[int]  # a row's number in the whole input, from which sampling draws
    at_least: int = 0  # fewest tokens before the end is allowed

    def forced(self, rows: Ints, step: int) -> Ints:
        """Say which token each of these rows must take at this step; -1 where it is free."""
        return np.array([prefix[step] if step < len(prefix) else -1 for prefix in (self.prefixes[r] for r in rows)], dtype=np.int64)


class Strategy(Protocol):
    """A way to choose tokens: the object that a search is given."""

    def run(self, model: Stepper, state: Any, rows: Rows) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's hypotheses, best first and never none."""
        ...


def next_log_probs(model: Stepper, tokens: Ints, state: Any) -> tuple[Tensor, Any]:
    """Step the model; give the log-probabilities (N, V) of the next token and the new state."""
    logits, state = model.step(torch.from_numpy(tokens).to(state.device, non_blocking=True), state)
    return torch.log_softmax(logits.float(), dim=-1), state


def restrict(log_probs: Tensor, *, forced: Ints, step: int, at_least: int) -> Tensor:
    """Leave only what may be produced: no padding, no beginning, no unknown, and a forced token alone.

    What is left keeps the model's probability: it is not spread over the rest again, so that a forced or a chosen
    token shows what the model really thought of it. Changes its argument, which `next_log_probs` made.
    """
    held = np.flatnonzero(forced >= 0)
    if held.size:
        rows = torch.from_numpy(held).to(log_probs.device)
        wanted = torch.from_numpy(forced[held]).to(log_probs.device)
        kept = log_probs[rows, wanted]
    for banned in (PAD, BOS, UNK, EOS) if step < at_least else (PAD, BOS, UNK):
        log_probs[:, banned] = -torch.inf
    if held.size:
        log_probs[rows] = -torch.inf
        log_probs[rows, wanted] = kept
    return log_probs


class Candidates(NamedTuple):
    """The best next tokens of each row, on the host."""

    log_probs: Floats  # (N, K)
    tokens: Ints  # (N, K)


def best_candidates(log_probs: Tensor, count: int, step: int) -> Candidates:
    """Find each row's best tokens in one transfer; of equal ones, those with the lower ids.

    `topk` takes any of equal values. It is asked for one more than needed: where the last kept and the first
    dropped are equal, that row is sorted again, stably.
    """
    vocabulary = log_probs.shape[-1]
    count, asked = min(count, vocabulary), min(count + 1, vocabulary)
    values, ids = log_probs.topk(asked, dim=-1)
    both = torch.cat([values.double(), ids.double()], dim=-1).cpu().numpy()  # ids are exact in float64
    values_host, ids_host = both[:, :asked], both[:, asked:].astype(np.int64)
    if np.isnan(values_host).any():
        raise not_finite(step)
    if asked > count:
        tied = np.flatnonzero((values_host[:, count - 1] == values_host[:, count]) & np.isfinite(values_host[:, count]))
        if tied.size:
            again = torch.sort(log_probs[torch.from_numpy(tied).to(log_probs.device)], dim=-1, descending=True, stable=True)
            ids_host[tied, :count] = again.indices[:, :count].cpu().numpy()
    return Candidates(values_host[:, :count], ids_host[:, :count])


def not_finite(step: int) -> DivergedError:
    """Make the error for a model whose outputs are not numbers."""
    return DivergedError(
        "a model's outputs must be finite numbers",
        found=f"NaN at output position {step + 1}",
        fix="its weights are damaged or training diverged: use an earlier checkpoint",
    )


class Trace:
    """How every living hypothesis came about, as parents and tokens a step; paths are read backwards."""

    def __init__(self) -> None:
        self._steps: list[tuple[Ints, Ints, Floats]] = []

    def add(self, parents: Ints, tokens: Ints, log_probs: Floats) -> None:
        """Remember one step: row i continues the earlier row `parents[i]` with a token."""
        self._steps.append((parents, tokens, log_probs))

    def path(self, row: int) -> tuple[list[int], list[float]]:
        """Read the tokens and log-probabilities that led to a row of the newest step."""
        tokens: list[int] = []
        log_probs: list[float] = []
        for parents, step_tokens, step_log_probs in reversed(self._steps):
            tokens.append(int(step_tokens[row]))
            log_probs.append(float(step_log_probs[row]))
            row = int(parents[row])
        return tokens[::-1], log_probs[::-1]


def select_rows(state: Any, rows: Ints, before: int) -> Any:
    """Reorder a state's rows, unless they stay as they are: copying every cache is the dear part of a step."""
    if rows.size == before and np.array_equal(rows, np.arange(before)):
        return state
    return state.select(torch.from_numpy(rows).to(state.device))
