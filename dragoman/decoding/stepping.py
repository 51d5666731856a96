"""What every strategy shares: the model's verbs, the rows of a search, and one step's scores.

Tokens are chosen by their logits. What turns those into log-probabilities is one number a row, computed where somebody wants them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.largest import Largest, first_largest, largest
from dragoman.errors import DivergedError
from dragoman.text.specials import EOS, SPECIALS, UNK

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
    scored: bool = True  # whether log-probabilities are wanted where the search itself does not need them

    def forced(self, rows: Ints, step: int) -> Ints:
        """Say which token each of these rows must take at this step; -1 where it is free."""
        if not any(self.prefixes):
            return np.full(rows.size, -1, dtype=np.int64)
        return np.array([prefix[step] if step < len(prefix) else -1 for prefix in (self.prefixes[r] for r in rows)], dtype=np.int64)


class Strategy(Protocol):
    """A way to choose tokens: the object that a search is given."""

    def run(self, model: Stepper, state: Any, rows: Rows) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's hypotheses, best first and never none."""
        ...


def next_logits(model: Stepper, tokens: Ints, state: Any) -> tuple[Tensor, Any]:
    """Step the model; give the logits (N, V) of the next token, to be changed at will, and the new state."""
    logits, state = model.step(torch.from_numpy(tokens).to(state.device, non_blocking=True), state)
    return logits.float(), state


def normaliser(logits: Tensor) -> Tensor:
    """Give what is to be taken from logits (N, V) to make log-probabilities: (N, 1)."""
    if logits.device.type != "cpu":
        return logits.logsumexp(dim=-1, keepdim=True)
    # On a CPU torch's log_softmax takes half the time of its logsumexp; the largest of each row tells what was taken from all.
    return logits.amax(dim=-1, keepdim=True) - logits.log_softmax(dim=-1).amax(dim=-1, keepdim=True)


class Ranks:
    """How a search ranks logits (N, V): by torch, unless a model brings a quicker way to the same, as its `ranks`."""

    def first(self, logits: Tensor) -> Largest:
        """Find the largest of each row, the first of equal ones, NaN above all: (N,) each."""
        return first_largest(logits)

    def best(self, logits: Tensor, count: int) -> Largest:
        """Find the `count` largest of each row, in falling order, any of equal ones: (N, count) each."""
        return largest(logits, count)

    def normaliser(self, logits: Tensor) -> Tensor:
        """Give what is to be taken from logits to make log-probabilities: (N, 1)."""
        return normaliser(logits)


_PLAIN = Ranks()


def ranks_of(model: object) -> Ranks:
    """Give a model's way to rank what it scores."""
    return getattr(model, "ranks", _PLAIN)


def restrict(logits: Tensor, *, forced: Ints, step: int, at_least: int) -> Tensor:
    """Leave only what may be produced: no padding, no beginning, no unknown, and a forced token alone.

    The normaliser is computed before, so that what is left keeps the model's probability: it is not spread over the rest again,
    and a forced or a chosen token shows what the model really thought of it. Changes its argument.
    """
    held = np.flatnonzero(forced >= 0)
    if held.size:
        rows = torch.from_numpy(held).to(logits.device)
        wanted = torch.from_numpy(forced[held]).to(logits.device)
        kept = logits[rows, wanted]
    # The special pieces are the first four, and the fewer calls the better: a step of a small model is not long.
    if step < at_least:
        logits[:, : len(SPECIALS)] = -torch.inf
    else:
        logits[:, :EOS] = -torch.inf
        logits[:, UNK] = -torch.inf
    if held.size:
        logits[rows] = -torch.inf
        logits[rows, wanted] = kept
    return logits


class Candidates(NamedTuple):
    """The best next tokens of each row, on the host."""

    log_probs: Floats  # (N, K); logits where no normaliser was given
    tokens: Ints  # (N, K)


def best_candidates(logits: Tensor, count: int, step: int, *, less: Tensor | None, ranks: Ranks = _PLAIN) -> Candidates:
    """Find each row's best tokens in one transfer; of equal ones, those with the lower ids.

    `topk` takes any of equal values. It is asked for one more than needed: where the last kept and the first
    dropped are equal, that row is sorted again, stably. `less` is what `normaliser` gave.
    """
    vocabulary = logits.shape[-1]
    count, asked = min(count, vocabulary), min(count + 1, vocabulary)
    values, ids = ranks.best(logits, asked)
    values_host, ids_host = _to_host(values, ids, less)
    require_finite(values_host, step)
    if asked > count:
        tied = np.flatnonzero((values_host[:, count - 1] == values_host[:, count]) & np.isfinite(values_host[:, count]))
        if tied.size:
            again = torch.sort(logits[torch.from_numpy(tied).to(logits.device)], dim=-1, descending=True, stable=True)
            ids_host[tied, :count] = again.indices[:, :count].cpu().numpy()
    return Candidates(values_host[:, :count], ids_host[:, :count])


def likeliest(logits: Tensor, step: int, *, less: Tensor | None, ranks: Ranks = _PLAIN) -> Candidates:
    """Find each row's best token, the first of equal ones: an (N, 1) of candidates."""
    values, ids = ranks.first(logits)
    values_host, ids_host = _to_host(values.unsqueeze(1), ids.unsqueeze(1), less)
    require_finite(values_host, step)
    return Candidates(values_host, ids_host)


def _to_host(values: Tensor, ids: Tensor, less: Tensor | None) -> tuple[Floats, Ints]:
    """Copy values (N, K), normalised where that is asked for, and ids in one transfer."""
    values = values if less is None else values - less
    if values.device.type == "cpu":
        return values.double().numpy(), ids.numpy()
    both = torch.cat([values.double(), ids.double()], dim=-1).cpu().numpy()  # ids are exact in float64
    return both[:, : values.size(1)], both[:, values.size(1) :].astype(np.int64)


def require_finite(values: Floats, step: int) -> None:
    """Raise DivergedError if one of the largest logits or log-probabilities is NaN or infinite; minus infinity is what may not come."""
    if not (values < np.inf).all():
        raise not_finite(step, "NaN" if np.isnan(values).any() else "infinity")


def not_finite(step: int, found: str = "NaN") -> DivergedError:
    """Return the error for a model whose outputs are not finite."""
    return DivergedError(
        "a model's outputs must be finite numbers",
        found=f"{found} at output position {step + 1}",
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
