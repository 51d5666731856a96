"""Beam search that ends a sentence exactly when nothing unfinished can still win."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty, WuPenalty
from dragoman.decoding.resident import ResidentBeam
from dragoman.decoding.stepping import (
    Bools,
    Candidates,
    Floats,
    Ints,
    Rows,
    Stepper,
    Trace,
    best_candidates,
    next_logits,
    ranks_of,
    restrict,
)
from dragoman.errors import ConfigError
from dragoman.text.specials import BOS, EOS


@dataclass(frozen=True, slots=True)
class Beam:
    """Keep the `size` best beginnings at each step; a finished hypothesis keeps its place in the beam.

    So a beam of one is greedy search, and every sentence ends after at most `size` finished hypotheses. It ends before
    that when `nbest` are finished and no living one, continued at best to the row's own limit, can overtake the
    last of them, and then leaves the batch. No sentence sees another.
    """

    size: int = 4
    nbest: int = 1
    penalty: Penalty = field(default_factory=WuPenalty)

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        if self.size < 1:
            raise ConfigError([f"the beam must keep at least 1 hypothesis; found {self.size}; 4 is usual"])
        if not 1 <= self.nbest <= self.size:
            raise ConfigError([f"nbest must be 1 to the size of the beam, {self.size}; found {self.nbest}; raise the beam or lower nbest"])

    def run(self, model: Stepper, state: Any, rows: Rows) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's `nbest` hypotheses, or as many as there are."""
        if state.device.type == "cuda":
            return ResidentBeam(rows, size=self.size, nbest=self.nbest, penalty=self.penalty, device=state.device).run(model, state)
        beams, ranks = _Beams(self, rows), ranks_of(model)
        while beams.sentences.size:
            logits, state = next_logits(model, beams.tokens.ravel(), state)
            less = ranks.normaliser(logits)
            forced = rows.forced(beams.sentences, beams.step)
            logits = restrict(logits, forced=np.repeat(forced, beams.fan), step=beams.step, at_least=rows.at_least)
            state = beams.advance(best_candidates(logits, self.size, beams.step, less=less, ranks=ranks), state)
        return beams.results()


class _Kept(NamedTuple):
    """Candidates, a row for each sentence; `valid` where there is one."""

    parents: Ints  # which hypothesis of its sentence is continued
    tokens: Ints
    log_probs: Floats
    totals: Floats
    valid: Bools

    def take(self, order: Ints) -> _Kept:
        """Take candidates by their place in each row."""
        at = np.arange(len(order))[:, None], order  # what take_along_axis does, in a quarter of its time
        return _Kept(self.parents[at], self.tokens[at], self.log_probs[at], self.totals[at], self.valid[at])

    def rows(self, numbers: Ints) -> _Kept:
        """Take the candidates of some sentences."""
        return _Kept(self.parents[numbers], self.tokens[numbers], self.log_probs[numbers], self.totals[numbers], self.valid[numbers])


class _Beams:
    """The living hypotheses of the sentences that go on, and the finished ones of all.

    The living ones lie in a rectangle (N, F): F is the most that any sentence has, and where a sentence has fewer its
    first is repeated with a total of minus infinity, which no candidate survives.
    """

    def __init__(self, beam: Beam, rows: Rows) -> None:
        count = len(rows.limits)
        self.beam, self.rows, self.trace, self.step = beam, rows, Trace(), 0
        self.sentences: Ints = np.arange(count)  # (N,)
        self.tokens: Ints = np.full((count, 1), BOS)  # (N, F)
        self.totals: Floats = np.zeros((count, 1))  # (N, F)
        self.places: Ints = np.full(count, beam.size)  # of every sentence: places in its beam not yet finished
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.cut: list[list[Hypothesis]] = [[] for _ in range(count)]  # those that met the limit

    @property
    def fan(self) -> int:
        """The hypotheses that each sentence has in the rectangle, F."""
        return self.tokens.shape[1]

    def advance(self, candidates: Candidates, state: Any) -> Any:
        """Take one step's candidates (N * F, C); give the state for the hypotheses that live on."""
        kept = self._best(candidates)
        ended = kept.valid & (kept.tokens == EOS)
        self._finish(kept, ended)
        lives = kept.valid & ~ended & (self.rows.limits[self.sentences] > self.step)[:, None]
        self._cut_short(kept, ended, ~lives.any(axis=1))
        going = np.flatnonzero(lives.any(axis=1) & ~self._decided(kept, lives))
        before = self.fan, len(self.sentences)
        parents = self._go_on(kept, lives, going)
        self.step += 1
        if not going.size:
            return state
        if going.size < before[1]:
            state = state.keep(torch.from_numpy(going).to(state.device))
        rows = (np.arange(going.size)[:, None] * before[0] + parents).ravel()
        same = rows.size == going.size * before[0] and np.array_equal(rows, np.arange(rows.size))
        return state if same else state.reorder(torch.from_numpy(rows).to(state.device))

    def results(self) -> list[list[Hypothesis]]:
        """Rank each sentence's hypotheses: the finished ones, then those that met the limit."""
        return [
            [*sorted(done, key=lambda h: -h.score), *sorted(cut, key=lambda h: -h.score)][: self.beam.nbest]
            for done, cut in zip(self.finished, self.cut, strict=True)
        ]

    def _best(self, candidates: Candidates) -> _Kept:
        """Keep as many candidates a sentence as it has places; of equal ones the lower token, then the better parent."""
        count, width = len(self.sentences), candidates.tokens.shape[1]
        log_probs, tokens = candidates.log_probs.reshape(count, -1), candidates.tokens.reshape(count, -1)  # (N, F * C)
        totals = np.repeat(self.totals, width, axis=1) + log_probs
        parents = np.broadcast_to(np.repeat(np.arange(self.fan), width), totals.shape)
        order = np.lexsort((parents, tokens, -totals), axis=1)[:, : self.beam.size]
        best = _Kept(parents, tokens, log_probs, totals, np.isfinite(totals)).take(order)
        return best._replace(valid=best.valid & (np.arange(order.shape[1]) < self.places[self.sentences, None]))

    def _go_on(self, kept: _Kept, lives: Bools, going: Ints) -> Ints:
        """Make the next rectangle of the sentences `going`, the living ones first; give their parents (N, F)."""
        kept, lives = kept.rows(going), lives[going]
        count = lives.sum(axis=1)[:, None]
        order = np.argsort(~lives, axis=1, kind="stable")[:, : int(count.max(initial=0))]
        repeated = np.arange(order.shape[1]) >= count
        kept = kept.take(np.where(repeated, order[:, :1], order))
        self.trace.add((going[:, None] * self.fan + kept.parents).ravel(), kept.tokens.ravel(), kept.log_probs.ravel())
        self.sentences, self.tokens, self.totals = self.sentences[going], kept.tokens, np.where(repeated, -np.inf, kept.totals)
        return kept.parents

    def _finish(self, kept: _Kept, ended: Bools) -> None:
        """Store the hypotheses that reached their end; their places in the beam are taken."""
        for at, place in np.argwhere(ended):
            tokens, log_probs = self.trace.path(at * self.fan + kept.parents[at, place])
            score = self.beam.penalty.score(float(kept.totals[at, place]), self.step + 1)
            hypothesis = Hypothesis(tokens, [*log_probs, float(kept.log_probs[at, place])], score, finished=True)
            self.finished[self.sentences[at]].append(hypothesis)
            self.places[self.sentences[at]] -= 1

    def _cut_short(self, kept: _Kept, ended: Bools, stuck: Bools) -> None:
        """Store, unfinished, what stands in sentences that can go no further: the limit met, or nothing possible."""
        for at in np.flatnonzero(stuck):
            done = set(kept.parents[at, ended[at]].tolist())
            for place in np.flatnonzero(np.isfinite(self.totals[at])):
                if int(place) not in done:
                    tokens, log_probs = self.trace.path(int(at * self.fan + place))
                    score = self.beam.penalty.score(float(self.totals[at, place]), self.step)
                    self.cut[self.sentences[at]].append(Hypothesis(tokens, log_probs, score, finished=False))

    def _decided(self, kept: _Kept, lives: Bools) -> Bools:
        """Say which sentences' n best are settled: their best living hypothesis cannot overtake the last of them."""
        decided = np.zeros(len(self.sentences), dtype=np.bool_)
        best = np.where(lives, kept.totals, -np.inf).max(axis=1)
        for at, sentence in enumerate(self.sentences):
            done = self.finished[sentence]
            if len(done) >= self.beam.nbest:
                to_beat = sorted((h.score for h in done), reverse=True)[self.beam.nbest - 1]
                longest = int(self.rows.limits[sentence]) + 1  # the end counts
                decided[at] = self.beam.penalty.bound(float(best[at]), self.step + 1, longest) <= to_beat
        return decided
