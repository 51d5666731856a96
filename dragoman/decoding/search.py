"""The interface between search strategies and models: constraints, candidates, backpointers, and the entry point `search`."""

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
from dragoman.ops.topk import TopK, blocked_argmax, blocked_topk
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class IncrementalDecoder(Protocol):
    """A model that can be asked for the next token: all that a search knows about it."""

    def start(self, memory: Any) -> Any:
        """Prepare the state before the first token, a row for each row of the memory."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Take one more token a row (B,) and give the logits (B, V) of the next."""
        ...


@dataclass(frozen=True, slots=True)
class SearchConstraints:
    """What is asked of a search, row by row; nothing here depends on a row's neighbours."""

    limits: IntArray  # (B,) most tokens that a row's output may have
    prefixes: Sequence[Sequence[int]]  # tokens that a row's output must begin with
    lines: Sequence[int]  # a row's number in the whole input, from which sampling draws
    min_length: int = 0  # fewest tokens before the end is allowed
    return_scores: bool = (
        True  # whether log-probabilities are wanted where the search itself does not need them
    )

    def forced(self, rows: IntArray, step: int) -> IntArray:
        """Say which token each of these rows must take at this step; -1 where it is free."""
        if not any(self.prefixes):
            return np.full(rows.size, -1, dtype=np.int64)
        return np.array(
            [
                prefix[step] if step < len(prefix) else -1
                for prefix in (self.prefixes[r] for r in rows)
            ],
            dtype=np.int64,
        )


class SearchStrategy(Protocol):
    """A way to choose tokens: the object that a search is given."""

    def run(
        self, model: IncrementalDecoder, state: Any, rows: SearchConstraints
    ) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's hypotheses, best first and never none."""
        ...


def next_logits(model: IncrementalDecoder, tokens: IntArray, state: Any) -> tuple[Tensor, Any]:
    """Step the model; give the logits (N, V) of the next token, to be changed at will, and the new state."""
    logits, state = model.step(torch.from_numpy(tokens).to(state.device, non_blocking=True), state)
    return logits.float(), state


def log_sum_exp(logits: Tensor) -> Tensor:
    """Give what is to be taken from logits (N, V) to make log-probabilities: (N, 1)."""
    if logits.device.type != "cpu":
        return logits.logsumexp(dim=-1, keepdim=True)
    # On a CPU torch's log_softmax takes half the time of its logsumexp; the largest of each row tells what was taken from all.
    return logits.amax(dim=-1, keepdim=True) - logits.log_softmax(dim=-1).amax(dim=-1, keepdim=True)


class LogitsBackend:
    """How a search ranks logits (N, V): by torch, unless a model brings a quicker way to the same, as its `ranks`."""

    def argmax(self, logits: Tensor) -> TopK:
        """Find the largest of each row, the first of equal ones, NaN above all: (N,) each."""
        return blocked_argmax(logits)

    def topk(self, logits: Tensor, count: int) -> TopK:
        """Find the `count` largest of each row, in falling order, any of equal ones: (N, count) each."""
        return blocked_topk(logits, count)

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """Give what is to be taken from logits to make log-probabilities: (N, 1)."""
        return log_sum_exp(logits)


_TORCH_BACKEND = LogitsBackend()


def get_logits_backend(model: object) -> LogitsBackend:
    """Give a model's way to rank what it scores."""
    return getattr(model, "logits_backend", _TORCH_BACKEND)


def apply_constraints(logits: Tensor, *, forced: IntArray, step: int, min_length: int) -> Tensor:
    """Leave only what may be produced: no padding, no beginning, no unknown, and a forced token alone.

    The normaliser is computed before, so that what is left keeps the model's probability: it is not spread over the rest again,
    and a forced or a chosen token shows what the model really thought of it. Changes its argument.
    """
    forced_rows = np.flatnonzero(forced >= 0)
    if forced_rows.size:
        rows = torch.from_numpy(forced_rows).to(logits.device)
        forced_tokens = torch.from_numpy(forced[forced_rows]).to(logits.device)
        kept = logits[rows, forced_tokens]
    # The special pieces are the first four, and the fewer calls the better: a step of a small model is not long.
    if step < min_length:
        logits[:, : len(SPECIAL_TOKENS)] = -torch.inf
    else:
        logits[:, :EOS] = -torch.inf
        logits[:, UNK] = -torch.inf
    if forced_rows.size:
        logits[rows] = -torch.inf
        logits[rows, forced_tokens] = kept
    return logits


class Candidates(NamedTuple):
    """The best next tokens of each row, on the host."""

    log_probs: FloatArray  # (N, K); logits where no normaliser was given
    tokens: IntArray  # (N, K)


def topk_candidates(
    logits: Tensor,
    count: int,
    step: int,
    *,
    log_normalizer: Tensor | None,
    logits_backend: LogitsBackend = _TORCH_BACKEND,
) -> Candidates:
    """Find each row's best tokens in one transfer; of equal ones, those with the lower ids.

    `topk` takes any of equal values. It is asked for one more than needed: where the last kept and the first
    dropped are equal, that row is sorted again, stably. `less` is what `normaliser` gave.
    """
    vocabulary = logits.shape[-1]
    count, requested = min(count, vocabulary), min(count + 1, vocabulary)
    values, ids = logits_backend.topk(logits, requested)
    values_host, ids_host = _to_host(values, ids, log_normalizer)
    require_finite(values_host, step)
    if requested > count:
        tied_rows = np.flatnonzero(
            (values_host[:, count - 1] == values_host[:, count])
            & np.isfinite(values_host[:, count])
        )
        if tied_rows.size:
            resorted = torch.sort(
                logits[torch.from_numpy(tied_rows).to(logits.device)],
                dim=-1,
                descending=True,
                stable=True,
            )
            ids_host[tied_rows, :count] = resorted.indices[:, :count].cpu().numpy()
    return Candidates(values_host[:, :count], ids_host[:, :count])


def argmax_candidates(
    logits: Tensor,
    step: int,
    *,
    log_normalizer: Tensor | None,
    logits_backend: LogitsBackend = _TORCH_BACKEND,
) -> Candidates:
    """Find each row's best token, the first of equal ones: an (N, 1) of candidates."""
    values, ids = logits_backend.argmax(logits)
    values_host, ids_host = _to_host(values.unsqueeze(1), ids.unsqueeze(1), log_normalizer)
    require_finite(values_host, step)
    return Candidates(values_host, ids_host)


def _to_host(
    values: Tensor, ids: Tensor, log_normalizer: Tensor | None
) -> tuple[FloatArray, IntArray]:
    """Copy values (N, K), normalised where that is asked for, and ids in one transfer."""
    values = values if log_normalizer is None else values - log_normalizer
    if values.device.type == "cpu":
        return values.double().numpy(), ids.numpy()
    both = (
        torch.cat([values.double(), ids.double()], dim=-1).cpu().numpy()
    )  # ids are exact in float64
    return both[:, : values.size(1)], both[:, values.size(1) :].astype(np.int64)


def require_finite(values: FloatArray, step: int) -> None:
    """Raise DivergedError if one of the largest logits or log-probabilities is NaN or infinite; minus infinity is what may not come."""
    if not (values < np.inf).all():
        raise non_finite_error(step, "NaN" if np.isnan(values).any() else "infinity")


def non_finite_error(step: int, found: str = "NaN") -> DivergedError:
    """Return the error for a model whose outputs are not finite."""
    return DivergedError(
        "a model's outputs must be finite numbers",
        found=f"{found} at output position {step + 1}",
        fix="its weights are damaged or training diverged: use an earlier checkpoint",
    )


class Backpointers:
    """How every living hypothesis came about, as parents and tokens a step; paths are read backwards."""

    def __init__(self) -> None:
        self._steps: list[tuple[IntArray, IntArray, FloatArray]] = []

    def add(self, parents: IntArray, tokens: IntArray, log_probs: FloatArray) -> None:
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


def select_rows(state: Any, rows: IntArray, before: int) -> Any:
    """Reorder a state's rows, unless they stay as they are: copying every cache is the dear part of a step."""
    if rows.size == before and np.array_equal(rows, np.arange(before)):
        return state
    return state.select(torch.from_numpy(rows).to(state.device))


@torch.inference_mode()
def search(
    model: IncrementalDecoder,
    memory: Any,
    *,
    limits: Tensor,
    strategy: SearchStrategy,
    prefixes: Sequence[Sequence[int]] | None = None,
    lines: Sequence[int] | None = None,
    min_length: int = 0,
    return_scores: bool = True,
) -> list[list[Hypothesis]]:
    """Find the best outputs for every row of the memory, best first, at least one a row.

    `limits` (B,) are the most tokens a row may have, its end not counted; a prefix longer than its limit raises it.
    `prefixes` are forced beginnings, `lines` number the rows in the whole input for sampling, and before
    `at_least` tokens no row may end. Without `scored`, hypotheses of a search that needs no log-probabilities have none.
    """
    count = len(limits)
    forced = (
        [list(prefix) for prefix in prefixes]
        if prefixes is not None
        else [[] for _ in range(count)]
    )
    lines = range(count) if lines is None else lines
    assert len(forced) == len(lines) == count, (
        f"{count} rows need as many prefixes and lines; got {len(forced)} and {len(lines)}"
    )
    assert not any(token in (PAD, BOS, EOS) for prefix in forced for token in prefix), (
        "a prefix must not hold PAD, BOS or EOS"
    )
    max_lengths = np.maximum(
        limits.cpu().numpy().astype(np.int64), [max(1, len(prefix)) for prefix in forced]
    )
    return strategy.run(
        model,
        model.start(memory),
        SearchConstraints(max_lengths, forced, lines, min_length, return_scores),
    )
