"""The search interface: `SearchRequest`, strategies, the backend they run on, and `search`.

To add a strategy (greedy, beam search and sampling are three), implement `SearchStrategy`. A
strategy calls a model by `step` and computes with a `SearchBackend`; it never tests the model or
the device. `mask_invalid_tokens` applies forced tokens and the minimum length to the logits;
`ConstrainedRows` in `constrained_logits.py` applies constraints to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.decoding.beam_step import ActiveBeams, BeamState, BeamStepOutput
from dragoman.decoding.beam_trace import BeamObserver
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.errors import DivergedError
from dragoman.ops.topk import TopK, blocked_argmax, blocked_topk, log_sum_exp
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class IncrementalDecoder(Protocol):
    """A model that scores one target position at a time: all that a search knows about a model."""

    def start(self, memory: Any) -> Any:
        """Return the decoder state before the first token, one row per row of the memory."""
        ...

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Append one token per row (B,); return the logits (B, V) of the next and the new state."""
        ...


class SearchStrategy(Protocol):
    """A decoding algorithm: greedy search, beam search or sampling."""

    @property
    def name(self) -> str:
        """The strategy's name in messages: `beam search`."""
        ...

    @property
    def beam_size(self) -> int | None:
        """Hypotheses in the beam, 1 for greedy search; None if the strategy has no beam."""
        ...

    @property
    def nbest(self) -> int:
        """Hypotheses returned for each sentence at most."""
        ...

    @property
    def rows_per_sentence(self) -> int:
        """Rows of a batch that each sentence takes in the decoder."""
        ...

    @property
    def penalty(self) -> LengthPenalty:
        """The length penalty under which hypotheses are ranked."""
        ...

    def run(
        self, model: IncrementalDecoder, state: Any, request: SearchRequest, backend: SearchBackend
    ) -> list[list[Hypothesis]]:
        """Search from a fresh state; return at least one hypothesis per row, best first."""
        ...


class TokenConstraints(Protocol):
    """Which tokens may follow in one row: `SentenceConstraints` or `NoRepeatNgram`."""

    needs_check: bool  # whether `allowed` is not enough, and `can_complete` must be called
    reason: str  # reason in a beam trace for a token that it forbids

    def start(self) -> Any:
        """Return the state before the first token."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """Return the state after a token."""
        ...

    def allowed(self, state: Any, remaining: int) -> NDArray[np.bool_]:
        """Return which tokens may follow if so many may be written, (V,)."""
        ...

    def can_complete(self, state: Any, token: int, remaining: int) -> bool:
        """Whether a token leaves a completion within the remaining tokens."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """One batch to decode. No field of a row depends on the other rows of the batch."""

    strategy: SearchStrategy
    limits: Sequence[int]  # maximum output length of each row, EOS not counted
    prefixes: Sequence[Sequence[int]]  # forced first tokens; one longer than its limit raises it
    sample_ids: Sequence[int]  # identifies each row in the whole input: seeds its sampling
    sources: Sequence[Sequence[int]] = ()  # source token ids without EOS
    min_length: int = 0  # tokens before EOS is allowed
    return_scores: bool = True  # whether hypotheses need scores and log-probabilities
    constraints: Sequence[TokenConstraints] = ()  # one for each row, or none at all
    observer: BeamObserver | None = None  # records the beam search, at a cost

    @property
    def max_lengths(self) -> IntArray:
        """The maximum output length of each row, (B,): at least 1 and at least its prefix's."""
        return np.maximum(
            np.asarray(self.limits, dtype=np.int64),
            [max(1, len(prefix)) for prefix in self.prefixes],
        )

    @property
    def longest(self) -> int:
        """The length of the longest source or output that may occur, EOS included."""
        outputs = (
            max(limit, len(prefix))
            for limit, prefix in zip(self.limits, self.prefixes, strict=True)
        )
        return 1 + max([*map(len, self.sources), *outputs])

    def forced_tokens(self, rows: IntArray, step: int) -> IntArray:
        """Return the token that the prefix of each of these rows forces here; -1 for none."""
        if not any(self.prefixes):
            return np.full(rows.size, -1, dtype=np.int64)
        return np.array(
            [
                prefix[step] if step < len(prefix) else -1
                for prefix in (self.prefixes[row] for row in rows)
            ],
            dtype=np.int64,
        )


class SearchBackend:
    """The operations of a search that have faster forms on some devices.

    These are the references, in PyTorch, for any device. Subclasses in `inference/` replace them:
    `CppSearchBackend` on a CPU with the compiled kernels, `EagerSearchBackend` on a GPU.
    """

    sync_every_steps = 1  # steps between two reads of the beam state by the host
    compact_below = 1.0  # fraction of active sentences below which finished ones are dropped

    def argmax(self, logits: Tensor) -> TopK:
        """Return the largest logit of each row, the first of equal ones, NaN above all: (N,)."""
        return blocked_argmax(logits)

    def topk(self, logits: Tensor, count: int) -> TopK:
        """Return the `count` largest logits of each row in descending order: (N, count).

        Of equal logits those with the lower ids are returned. `torch.topk` returns any of them, so
        one more is computed: a row whose last kept and first dropped logit are equal is sorted.
        """
        vocab_size = logits.size(1)
        if count >= vocab_size:
            return blocked_topk(logits, vocab_size)
        values, ids = blocked_topk(logits, count + 1)
        tied = (values[:, count - 1] == values[:, count]) & values[:, count].isfinite()
        values, ids = values[:, :count], ids[:, :count]
        if tied.any():
            resorted = torch.sort(logits[tied], dim=-1, descending=True, stable=True)
            ids[tied] = resorted.indices[:, :count]
        return TopK(values, ids)

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """Return the log-sum-exp of each row, (N, 1): subtracted from logits it normalizes them."""
        return log_sum_exp(logits)

    def beam_step(
        self, beam_state: BeamState, beams: ActiveBeams, log_probs: Tensor, ids: Tensor
    ) -> BeamStepOutput:
        """Advance the beams by one step; see `BeamState.advance`."""
        return beam_state.advance(beams, log_probs, ids)

    def decode_greedy(
        self,
        model: IncrementalDecoder,
        state: Any,
        request: SearchRequest,
        penalty: LengthPenalty,
    ) -> list[list[Hypothesis]] | None:
        """Decode the whole batch greedily in a fused form; None if the request has none."""
        return None


REFERENCE_BACKEND = SearchBackend()


def next_logits(model: IncrementalDecoder, tokens: IntArray, state: Any) -> tuple[Tensor, Any]:
    """Step the model with tokens (N,); return writable float32 logits (N, V) and the new state."""
    logits, state = model.step(torch.from_numpy(tokens).to(state.device, non_blocking=True), state)
    return logits.float(), state


def mask_invalid_tokens(logits: Tensor, *, forced: IntArray, step: int, min_length: int) -> Tensor:
    """Set the logits of tokens that may not come next to -inf, in place.

    PAD, BOS and UNK are never produced, EOS not before `min_length`, and where a token is forced
    (-1 for none) nothing else. The log-sum-exp is computed before this: the remaining tokens keep
    the probabilities of the model and are not renormalized.
    """
    forced_rows = np.flatnonzero(forced >= 0)
    if forced_rows.size:
        rows = torch.from_numpy(forced_rows).to(logits.device)
        forced_tokens = torch.from_numpy(forced[forced_rows]).to(logits.device)
        kept = logits[rows, forced_tokens]
    # The special tokens are the first four ids. Few calls matter: a step of a small model is short.
    if step < min_length:
        logits[:, : len(SPECIAL_TOKENS)] = -torch.inf
    else:
        logits[:, :EOS] = -torch.inf
        logits[:, UNK] = -torch.inf
    if forced_rows.size:
        logits[rows] = -torch.inf
        logits[rows, forced_tokens] = kept
    return logits


class ChosenTokens(NamedTuple):
    """One token per row, on the host."""

    tokens: IntArray  # (N,)
    log_probs: FloatArray  # (N,); logits if no log-sum-exp was computed


def to_host(values: Tensor, ids: Tensor, step: int) -> ChosenTokens:
    """Copy values and token ids (N,) to the host; raise DivergedError for NaN or infinity."""
    chosen = ChosenTokens(ids.cpu().numpy(), values.double().cpu().numpy())
    if not (chosen.log_probs < np.inf).all():
        raise non_finite_error(step, "NaN" if np.isnan(chosen.log_probs).any() else "infinity")
    return chosen


def non_finite_error(step: int, found: str = "NaN") -> DivergedError:
    """Return the error for a model whose outputs are not finite."""
    return DivergedError(
        "a model's outputs must be finite numbers",
        found=f"{found} at output position {step + 1}",
        fix="its weights are damaged or training diverged: use an earlier checkpoint",
    )


def select_rows(state: Any, rows: IntArray, before: int) -> Any:
    """Select rows of a decoder state, unless nothing changes: a copy of all caches is expensive."""
    if rows.size == before and np.array_equal(rows, np.arange(before)):
        return state
    return state.select(torch.from_numpy(rows).to(state.device))


@torch.inference_mode()
def search(
    model: IncrementalDecoder,
    memory: Any,
    *,
    limits: Tensor | Sequence[int],
    strategy: SearchStrategy,
    prefixes: Sequence[Sequence[int]] | None = None,
    sample_ids: Sequence[int] | None = None,
    min_length: int = 0,
    return_scores: bool = True,
    constraints: Sequence[TokenConstraints] = (),
    observer: BeamObserver | None = None,
    backend: SearchBackend = REFERENCE_BACKEND,
) -> list[list[Hypothesis]]:
    """Decode every row of the memory; return at least one hypothesis per row, best first.

    The arguments are the fields of `SearchRequest`. Without `return_scores`, hypotheses of greedy
    search have no log-probabilities and score 0.
    """
    count = len(limits)
    prefixes = [[] for _ in range(count)] if prefixes is None else prefixes
    sample_ids = range(count) if sample_ids is None else sample_ids
    assert len(prefixes) == len(sample_ids) == count, (
        f"{count} rows need as many prefixes and sample ids; "
        f"got {len(prefixes)} and {len(sample_ids)}"
    )
    assert not any(token in (PAD, BOS, EOS) for prefix in prefixes for token in prefix), (
        "a prefix must not hold PAD, BOS or EOS"
    )
    request = SearchRequest(
        strategy=strategy,
        limits=[int(limit) for limit in limits],
        prefixes=prefixes,
        sample_ids=sample_ids,
        min_length=min_length,
        return_scores=return_scores,
        constraints=constraints,
        observer=observer,
    )
    return strategy.run(model, model.start(memory), request, backend)
