"""Beam search that ends a sentence exactly when nothing unfinished can still win."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty, WuPenalty
from dragoman.decoding.stepping import (
    Bools,
    Candidates,
    Floats,
    Ints,
    Rows,
    Stepper,
    Trace,
    best_candidates,
    next_log_probs,
    restrict,
    select_rows,
)
from dragoman.errors import ConfigError
from dragoman.text.specials import BOS, EOS


@dataclass(frozen=True, slots=True)
class Beam:
    """Keep the `size` best beginnings at each step; a finished hypothesis keeps its place in the beam.

    So a beam of one is greedy search, and every sentence ends after at most `size` finished hypotheses. It ends before
    that when `nbest` are finished and no living one, continued at best to the row's own limit, can overtake the
    last of them. The living hypotheses of all sentences lie in one ragged list, so that nothing is computed for a
    sentence, or a place in a beam, that is done, and no sentence sees another.
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
        beams = _Beams(self, rows)
        step = 0
        while beams.sentences.size:
            log_probs, state = next_log_probs(model, beams.tokens, state)
            forced = rows.forced(beams.sentences, step)
            log_probs = restrict(log_probs, forced=forced, step=step, at_least=rows.at_least)
            before = beams.sentences.size
            parents = beams.advance(best_candidates(log_probs, self.size, step), step)
            if parents.size:
                state = select_rows(state, parents, before)
            step += 1
        return beams.results()


class _Kept(NamedTuple):
    """The candidates that stay in the beams: sentence by sentence, best first."""

    parents: Ints
    tokens: Ints
    log_probs: Floats
    totals: Floats
    sentences: Ints


class _Beams:
    """The living hypotheses of all sentences, best first within a sentence, and the finished ones beside them."""

    def __init__(self, beam: Beam, rows: Rows) -> None:
        count = len(rows.limits)
        self.beam, self.rows, self.trace = beam, rows, Trace()
        self.sentences: Ints = np.arange(count)  # of each living hypothesis
        self.tokens: Ints = np.full(count, BOS)
        self.totals: Floats = np.zeros(count)
        self.places: Ints = np.full(count, beam.size)  # of each sentence: places in its beam not yet finished
        self.finished: list[list[Hypothesis]] = [[] for _ in range(count)]
        self.cut: list[list[Hypothesis]] = [[] for _ in range(count)]  # those that met the limit

    def advance(self, candidates: Candidates, step: int) -> Ints:
        """Take one step's candidates; give, for each hypothesis that lives on, the row it continues."""
        kept = self._best(candidates)
        ended = kept.tokens == EOS
        self._finish(kept, np.flatnonzero(ended), step)
        lives = ~ended & (self.rows.limits[kept.sentences] > step)
        self._cut_short(kept.sentences[lives], kept.parents[ended], step)
        lives &= ~self._decided(kept, lives, step)
        self.trace.add(kept.parents[lives], kept.tokens[lives], kept.log_probs[lives])
        self.sentences, self.tokens, self.totals = kept.sentences[lives], kept.tokens[lives], kept.totals[lives]
        return kept.parents[lives]

    def results(self) -> list[list[Hypothesis]]:
        """Rank each sentence's hypotheses: the finished ones, then those that met the limit."""
        return [
            [*sorted(done, key=lambda h: -h.score), *sorted(cut, key=lambda h: -h.score)][: self.beam.nbest]
            for done, cut in zip(self.finished, self.cut, strict=True)
        ]

    def _best(self, candidates: Candidates) -> _Kept:
        """Keep as many candidates a sentence as it has places; of equal ones the lower token, then the better parent."""
        totals = (self.totals[:, None] + candidates.log_probs).ravel()
        parents = np.repeat(np.arange(len(self.totals)), candidates.tokens.shape[1])
        tokens, log_probs = candidates.tokens.ravel(), candidates.log_probs.ravel()
        sentences = self.sentences[parents]
        order = np.lexsort((parents, tokens, -totals, sentences))
        order = order[np.isfinite(totals[order])]
        grouped = sentences[order]
        rank = np.arange(order.size) - np.searchsorted(grouped, grouped)  # within the sentence
        chosen = order[rank < self.places[grouped]]
        return _Kept(parents[chosen], tokens[chosen], log_probs[chosen], totals[chosen], sentences[chosen])

    def _finish(self, kept: _Kept, ended: Ints, step: int) -> None:
        """Store the hypotheses that reached their end."""
        for each in ended:
            tokens, log_probs = self.trace.path(kept.parents[each])
            score = self.beam.penalty.score(float(kept.totals[each]), step + 1)
            hypothesis = Hypothesis(tokens, [*log_probs, float(kept.log_probs[each])], score, finished=True)
            self.finished[kept.sentences[each]].append(hypothesis)
            self.places[kept.sentences[each]] -= 1

    def _cut_short(self, living: Ints, ended: Ints, step: int) -> None:
        """Store, unfinished, what stands in sentences that can go no further: the limit met, or nothing possible."""
        stuck = ~np.isin(self.sentences, living)
        stuck[ended] = False
        for row in np.flatnonzero(stuck):
            tokens, log_probs = self.trace.path(int(row))
            score = self.beam.penalty.score(float(self.totals[row]), step)
            self.cut[self.sentences[row]].append(Hypothesis(tokens, log_probs, score, finished=False))

    def _decided(self, kept: _Kept, lives: Bools, step: int) -> Bools:
        """Say of each candidate whether its sentence's n best are settled: the best living one cannot overtake them."""
        decided = np.zeros(len(self.finished), dtype=np.bool_)
        sentences, first = np.unique(kept.sentences[lives], return_index=True)
        for sentence, best in zip(sentences, kept.totals[lives][first], strict=True):
            done = self.finished[sentence]
            if len(done) < self.beam.nbest:
                continue
            to_beat = sorted((h.score for h in done), reverse=True)[self.beam.nbest - 1]
            longest = int(self.rows.limits[sentence]) + 1  # the end counts
            decided[sentence] = self.beam.penalty.bound(float(best), step + 1, longest) <= to_beat
        return decided[kept.sentences]
