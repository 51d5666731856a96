"""Beam search that ends a sentence exactly when nothing unfinished can still win."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dragoman.decoding.device_beam_search import DeviceBeamSearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search import (
    Backpointers,
    BoolArray,
    Candidates,
    FloatArray,
    IncrementalDecoder,
    IntArray,
    SearchConstraints,
    apply_constraints,
    get_logits_backend,
    next_logits,
    topk_candidates,
)
from dragoman.errors import ConfigError
from dragoman.text.special_tokens import BOS, EOS


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keep the `size` best beginnings at each step; a finished hypothesis keeps its place in the beam.

    So a beam of one is greedy search, and every sentence ends after at most `size` finished hypotheses. It ends before
    that when `nbest` are finished and no living one, continued at best to the row's own limit, can overtake the
    last of them, and then leaves the batch. No sentence sees another.
    """

    size: int = 4
    nbest: int = 1
    penalty: LengthPenalty = field(default_factory=WuLengthPenalty)

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        if self.size < 1:
            raise ConfigError(
                [f"the beam must keep at least 1 hypothesis; found {self.size}; 4 is usual"]
            )
        if not 1 <= self.nbest <= self.size:
            raise ConfigError(
                [
                    f"nbest must be 1 to the size of the beam, {self.size}; found {self.nbest}; raise the beam or lower nbest"
                ]
            )

    def run(
        self, model: IncrementalDecoder, state: Any, rows: SearchConstraints
    ) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's `nbest` hypotheses, or as many as there are."""
        if state.device.type == "cuda":
            return DeviceBeamSearch(
                rows, size=self.size, nbest=self.nbest, penalty=self.penalty, device=state.device
            ).run(model, state)
        beams, logits_backend = _HostBeamState(self, rows), get_logits_backend(model)
        while beams.sentences.size:
            logits, state = next_logits(model, beams.tokens.ravel(), state)
            log_normalizer = logits_backend.log_sum_exp(logits)
            forced = rows.forced(beams.sentences, beams.step)
            logits = apply_constraints(
                logits,
                forced=np.repeat(forced, beams.beams_per_sentence),
                step=beams.step,
                min_length=rows.min_length,
            )
            state = beams.advance(
                topk_candidates(
                    logits,
                    self.size,
                    beams.step,
                    log_normalizer=log_normalizer,
                    logits_backend=logits_backend,
                ),
                state,
            )
        return beams.results()


class _SelectedCandidates(NamedTuple):
    """Candidates, a row for each sentence; `valid` where there is one."""

    parents: IntArray  # which hypothesis of its sentence is continued
    tokens: IntArray
    log_probs: FloatArray
    log_prob_sums: FloatArray
    valid: BoolArray

    def take(self, order: IntArray) -> _SelectedCandidates:
        """Take candidates by their place in each row."""
        at = (
            np.arange(len(order))[:, None],
            order,
        )  # what take_along_axis does, in a quarter of its time
        return _SelectedCandidates(
            self.parents[at],
            self.tokens[at],
            self.log_probs[at],
            self.log_prob_sums[at],
            self.valid[at],
        )

    def rows(self, numbers: IntArray) -> _SelectedCandidates:
        """Take the candidates of some sentences."""
        return _SelectedCandidates(
            self.parents[numbers],
            self.tokens[numbers],
            self.log_probs[numbers],
            self.log_prob_sums[numbers],
            self.valid[numbers],
        )


class _HostBeamState:
    """The living hypotheses of the sentences that go on, and the finished ones of all.

    The living ones lie in a rectangle (N, F): F is the most that any sentence has, and where a sentence has fewer its
    first is repeated with a total of minus infinity, which no candidate survives.
    """

    def __init__(self, beam: BeamSearch, rows: SearchConstraints) -> None:
        count = len(rows.limits)
        self.beam, self.rows, self.backpointers, self.step = beam, rows, Backpointers(), 0
        self.sentences: IntArray = np.arange(count)  # (N,)
        self.tokens: IntArray = np.full((count, 1), BOS)  # (N, F)
        self.log_prob_sums: FloatArray = np.zeros((count, 1))  # (N, F)
        self.open_beams: IntArray = np.full(
            count, beam.size
        )  # of every sentence: places in its beam not yet finished
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.truncated: list[list[Hypothesis]] = [
            [] for _ in range(count)
        ]  # those that met the limit

    @property
    def beams_per_sentence(self) -> int:
        """The hypotheses that each sentence has in the rectangle, F."""
        return self.tokens.shape[1]

    def advance(self, candidates: Candidates, state: Any) -> Any:
        """Take one step's candidates (N * F, C); give the state for the hypotheses that live on."""
        selected = self._select_candidates(candidates)
        ended = selected.valid & (selected.tokens == EOS)
        self._store_finished(selected, ended)
        survives = selected.valid & ~ended & (self.rows.limits[self.sentences] > self.step)[:, None]
        self._store_truncated(selected, ended, ~survives.any(axis=1))
        active = np.flatnonzero(survives.any(axis=1) & ~self._is_decided(selected, survives))
        before = self.beams_per_sentence, len(self.sentences)
        parents = self._continue_beams(selected, survives, active)
        self.step += 1
        if not active.size:
            return state
        if active.size < before[1]:
            state = state.keep(torch.from_numpy(active).to(state.device))
        rows = (np.arange(active.size)[:, None] * before[0] + parents).ravel()
        same = rows.size == active.size * before[0] and np.array_equal(rows, np.arange(rows.size))
        return state if same else state.reorder(torch.from_numpy(rows).to(state.device))

    def results(self) -> list[list[Hypothesis]]:
        """Rank each sentence's hypotheses: the finished ones, then those that met the limit."""
        return [
            [*sorted(done, key=lambda h: -h.score), *sorted(truncated, key=lambda h: -h.score)][
                : self.beam.nbest
            ]
            for done, truncated in zip(self.finished, self.truncated, strict=True)
        ]

    def _select_candidates(self, candidates: Candidates) -> _SelectedCandidates:
        """Keep as many candidates a sentence as it has places; of equal ones the lower token, then the better parent."""
        count, width = len(self.sentences), candidates.tokens.shape[1]
        log_probs, tokens = (
            candidates.log_probs.reshape(count, -1),
            candidates.tokens.reshape(count, -1),
        )  # (N, F * C)
        log_prob_sums = np.repeat(self.log_prob_sums, width, axis=1) + log_probs
        parents = np.broadcast_to(
            np.repeat(np.arange(self.beams_per_sentence), width), log_prob_sums.shape
        )
        order = np.lexsort((parents, tokens, -log_prob_sums), axis=1)[:, : self.beam.size]
        best = _SelectedCandidates(
            parents, tokens, log_probs, log_prob_sums, np.isfinite(log_prob_sums)
        ).take(order)
        return best._replace(
            valid=best.valid & (np.arange(order.shape[1]) < self.open_beams[self.sentences, None])
        )

    def _continue_beams(
        self, selected: _SelectedCandidates, survives: BoolArray, active: IntArray
    ) -> IntArray:
        """Make the next rectangle of the sentences `going`, the living ones first; give their parents (N, F)."""
        selected, survives = selected.rows(active), survives[active]
        count = survives.sum(axis=1)[:, None]
        order = np.argsort(~survives, axis=1, kind="stable")[:, : int(count.max(initial=0))]
        repeated = np.arange(order.shape[1]) >= count
        selected = selected.take(np.where(repeated, order[:, :1], order))
        self.backpointers.add(
            (active[:, None] * self.beams_per_sentence + selected.parents).ravel(),
            selected.tokens.ravel(),
            selected.log_probs.ravel(),
        )
        self.sentences, self.tokens, self.log_prob_sums = (
            self.sentences[active],
            selected.tokens,
            np.where(repeated, -np.inf, selected.log_prob_sums),
        )
        return selected.parents

    def _store_finished(self, selected: _SelectedCandidates, ended: BoolArray) -> None:
        """Store the hypotheses that reached their end; their places in the beam are taken."""
        for at, place in np.argwhere(ended):
            tokens, log_probs = self.backpointers.path(
                at * self.beams_per_sentence + selected.parents[at, place]
            )
            score = self.beam.penalty.score(float(selected.log_prob_sums[at, place]), self.step + 1)
            hypothesis = Hypothesis(
                tokens, [*log_probs, float(selected.log_probs[at, place])], score, finished=True
            )
            self.finished[self.sentences[at]].append(hypothesis)
            self.open_beams[self.sentences[at]] -= 1

    def _store_truncated(
        self, selected: _SelectedCandidates, ended: BoolArray, is_stuck: BoolArray
    ) -> None:
        """Store, unfinished, what stands in sentences that can go no further: the limit met, or nothing possible."""
        for at in np.flatnonzero(is_stuck):
            done = set(selected.parents[at, ended[at]].tolist())
            for place in np.flatnonzero(np.isfinite(self.log_prob_sums[at])):
                if int(place) not in done:
                    tokens, log_probs = self.backpointers.path(
                        int(at * self.beams_per_sentence + place)
                    )
                    score = self.beam.penalty.score(float(self.log_prob_sums[at, place]), self.step)
                    self.truncated[self.sentences[at]].append(
                        Hypothesis(tokens, log_probs, score, finished=False)
                    )

    def _is_decided(self, selected: _SelectedCandidates, survives: BoolArray) -> BoolArray:
        """Say which sentences' n best are settled: their best living hypothesis cannot overtake the last of them."""
        is_decided = np.zeros(len(self.sentences), dtype=np.bool_)
        best = np.where(survives, selected.log_prob_sums, -np.inf).max(axis=1)
        for at, sentence in enumerate(self.sentences):
            done = self.finished[sentence]
            if len(done) >= self.beam.nbest:
                to_beat = sorted((h.score for h in done), reverse=True)[self.beam.nbest - 1]
                longest = int(self.rows.limits[sentence]) + 1  # the end counts
                is_decided[at] = (
                    self.beam.penalty.upper_bound(float(best[at]), self.step + 1, longest)
                    <= to_beat
                )
        return is_decided
