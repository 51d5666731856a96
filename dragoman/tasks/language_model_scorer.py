"""Log-probabilities of tokens in evaluation, for perplexity: by carried states or sliding windows.

A model that carries states reads a document segment by segment and reuses what it computed. Any
other model reads sliding windows, which overlap, and scores the last tokens of each, so that every
token but a document's first has at least a window minus the stride as context.
`LanguageTask.evaluate` in tasks/language_model.py computes the perplexity of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.models.language_model import NeuralLanguageModel
from dragoman.runtime import signals
from dragoman.text.special_tokens import BOS, PAD
from dragoman.training.progress_display import Progress, QuietProgress

MIN_PART_WARMUPS = 4  # a part of a document is at least so many warm-ups long
LOGIT_ELEMENTS = 1 << 26  # logits computed at a time


class Stream(Protocol):
    """Tokens with the token before each, and where documents begin."""

    @property
    def inputs(self) -> NDArray[np.int32]:
        """The token before each token, (N,)."""
        ...

    @property
    def targets(self) -> NDArray[np.int32]:
        """The tokens, (N,)."""
        ...

    @property
    def starts(self) -> NDArray[np.int64]:
        """The positions where documents begin."""
        ...


class ScoredSpan(NamedTuple):
    """Consecutive tokens that are read together, of which those from `scored` on are scored."""

    begin: int
    scored: int
    end: int


class TokenScorer:
    """Computes log-probabilities of tokens with a model in evaluation mode."""

    def __init__(
        self,
        model: NeuralLanguageModel,
        *,
        device: torch.device,
        segment: int,
        memory: int,
        stride: int,
        carries: bool,
        batch_rows: int,
        parts: int = 0,
    ) -> None:
        self._model, self._device, self._carries = model, device, carries
        self._segment, self._memory, self._stride = segment, memory, stride
        self._batch_rows = batch_rows  # rows that are computed together
        self._parts = parts or batch_rows  # parts of the text that are scored in parallel

    def total(self, stream: Stream, *, progress: Progress | None = None) -> float:
        """Return the negative log-likelihood of all tokens, in nats."""
        spans = list(self._spans(stream))
        return sum(self._score(stream.inputs, stream.targets, spans, progress or QuietProgress()))

    def documents(self, rows: Sequence[NDArray[np.int32]]) -> list[float]:
        """Return the negative log-likelihood of each document, in nats, each in one go."""
        lengths = np.array([len(row) for row in rows], np.int64)
        ends = np.cumsum(lengths)
        targets = np.concatenate([*rows, np.zeros(0, np.int32)])
        inputs = np.concatenate([np.zeros(1, np.int32), targets[:-1]])[: len(targets)]
        starts = ends - lengths
        inputs[starts[lengths > 0]] = BOS
        spans, owners = list[ScoredSpan](), list[int]()
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            if start == end:
                continue
            own = [ScoredSpan(start, start, end)] if self._carries else [*self._windows(start, end)]
            spans += own
            owners += [number] * len(own)
        scores = self._score(inputs, targets, spans, QuietProgress())
        totals = [0.0] * len(rows)
        for owner, score in zip(owners, scores, strict=True):
            totals[owner] += score
        return totals

    def _spans(self, stream: Stream) -> Iterator[ScoredSpan]:
        """Yield the spans that score every token once."""
        bounds = [*stream.starts.tolist(), len(stream.targets)]
        warmup = max(self._memory, self._segment)
        size = max(-(-len(stream.targets) // self._parts), MIN_PART_WARMUPS * warmup)
        for start, end in itertools.pairwise(bounds):
            if not self._carries:
                yield from self._windows(start, end)
            elif self._parts == 1:
                yield ScoredSpan(start, start, end)
            else:
                for scored in range(start, end, size):
                    yield ScoredSpan(max(start, scored - warmup), scored, min(scored + size, end))

    def _windows(self, start: int, end: int) -> Iterator[ScoredSpan]:
        """Yield overlapping windows of a document."""
        first = min(start + self._segment, end)
        yield ScoredSpan(start, start, first)
        for scored in range(first, end, self._stride):
            stop = min(scored + self._stride, end)
            yield ScoredSpan(max(start, stop - self._segment), scored, stop)

    def _score(
        self,
        inputs: NDArray[np.int32],
        targets: NDArray[np.int32],
        spans: Sequence[ScoredSpan],
        progress: Progress,
    ) -> list[float]:
        """Return the negative log-likelihood of the scored tokens of each span."""
        # Long spans first: a batch takes as many segments as its longest.
        order = sorted(range(len(spans)), key=lambda each: spans[each].begin - spans[each].end)
        groups = [
            order[first : first + self._batch_rows]
            for first in range(0, len(order), self._batch_rows)
        ]
        totals = [0.0] * len(spans)
        with progress.phase("scoring", len(groups), "batches") as phase:
            for group in groups:
                scores = self._score_group(inputs, targets, [spans[each] for each in group])
                for each, score in zip(group, scores.tolist(), strict=True):
                    totals[each] = score
                phase.advance()
        return totals

    @torch.no_grad()
    def _score_group(
        self, inputs: NDArray[np.int32], targets: NDArray[np.int32], spans: Sequence[ScoredSpan]
    ) -> Tensor:
        """Return the negative log-likelihoods (B,) of spans that are read in parallel."""
        longest = max(span.end - span.begin for span in spans)
        step = self._segment if self._carries else longest
        total = torch.zeros(len(spans), dtype=torch.float64, device=self._device)
        state = self._model.start(len(spans), memory=self._memory) if self._carries else None
        begins, scored, ends = (np.array(each)[:, None] for each in zip(*spans, strict=True))
        for first in range(0, longest, step):
            signals.raise_if_stop_requested()
            index = begins + np.arange(first, min(first + step, longest))
            real, counts = index < ends, (index >= scored) & (index < ends)
            clipped = np.minimum(index, len(targets) - 1)
            tokens = self._tensor(np.where(real, inputs[clipped], PAD))
            if state is None:
                mask = None if real.all() else self._tensor(real)
                hidden = self._model.decode(tokens, mask)
            else:
                hidden, state = self._model.extend_hidden(tokens, state)
            if not counts.any():
                continue  # warm-up
            nll = self._token_nll(hidden, self._tensor(targets[clipped]))
            total += (nll * self._tensor(counts)).sum(dim=1, dtype=torch.float64)
        return total.cpu()

    def _token_nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return -log p of each target, (B, T), with at most LOGIT_ELEMENTS logits at a time."""
        rows = max(1, LOGIT_ELEMENTS // self._model.output_weight.size(0))
        flat, wanted_ids = hidden.flatten(0, 1), targets.flatten()
        parts = (
            (flat[first : first + rows], wanted_ids[first : first + rows])
            for first in range(0, len(flat), rows)
        )
        found = [
            torch.nn.functional.cross_entropy(
                self._model.project(part).float(), wanted, reduction="none"
            )
            for part, wanted in parts
        ]
        return torch.cat(found).view_as(targets)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        """Return an array on the device; ids as int64."""
        wide = array if array.dtype == np.bool_ else array.astype(np.int64)
        return torch.from_numpy(wide).to(self._device)
