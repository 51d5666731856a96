"""Beam search that stays on the device: the rule of `beam.py`, step for step, in tensors.

A GPU that has to wait for the host after every step does nothing for most of the time. Here the host only launches; it asks
how many sentences are left every few steps, drops those that are done, and reads all paths at the end. Rows of sentences that
are done in between are computed for nothing, which costs less than asking.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.largest import largest
from dragoman.decoding.penalties import Penalty
from dragoman.decoding.stepping import Rows, Stepper, normaliser, not_finite, restrict
from dragoman.text.specials import BOS, EOS

ASKED_EVERY = 4  # steps
SPARE = 4  # candidates a row beside those wanted, so that of equal ones the lower ids are among them
FULL_ENOUGH = 0.8  # of the sentences that go on: above that, dropping the others costs more than it saves


class _Step(NamedTuple):
    """What one step chose, for the sentences that were there: all but `sentences` are (N, F)."""

    sentences: Tensor  # (N,)
    parents: Tensor  # which hypothesis of its sentence each continues
    tokens: Tensor
    log_probs: Tensor


class _Ends:
    """The hypotheses of every sentence that came to an end: (B, K) of them, each with four numbers in one tensor."""

    SCORE, STEPS, ROW, LOG_PROB = range(4)  # steps that lead there, the hypothesis in the last of them, and the end's own log-probability

    def __init__(self, sentences: int, places: int, device: torch.device) -> None:
        self.table = torch.zeros(sentences, places, 4, dtype=torch.float64, device=device)
        self.table[..., self.SCORE] = -torch.inf  # none yet

    def put(self, sentences: Tensor, places: Tensor, there: Tensor, *, scores: Tensor, steps: int, rows: Tensor, log_probs: Tensor) -> None:
        """Store at places (N, K) of sentences (N,), all different, what is `there`; the other places stay as they are."""
        at = (sentences.unsqueeze(1), places)
        new = torch.stack([scores, torch.full_like(scores, steps), rows.double(), log_probs], dim=-1)
        self.table[at] = torch.where(there.unsqueeze(-1), new, self.table[at])


class ResidentBeam:
    """One search: what lives on the device, and what is remembered of it."""

    def __init__(self, rows: Rows, *, size: int, nbest: int, penalty: Penalty, device: torch.device) -> None:
        count = len(rows.limits)
        self.rows, self.size, self.nbest, self.penalty, self.device = rows, size, nbest, penalty, device
        self.limits = torch.from_numpy(rows.limits).to(device)  # (B,)
        self.finished = _Ends(count, 2 * size, device)  # twice the places: candidates that did not end need one to leave as it is
        self.cut = _Ends(count, size, device)  # those that met the limit
        self.places = torch.full((count,), size, dtype=torch.long, device=device)  # (B,) of each beam, not yet finished
        self.sentences = torch.arange(count, device=device)  # (N,) those in the rectangle
        self.tokens = torch.full((count, 1), BOS, device=device)  # (N, F)
        self.totals = torch.zeros((count, 1), dtype=torch.float64, device=device)  # (N, F); minus infinity where nothing lives
        self.alive = torch.ones(count, dtype=torch.bool, device=device)  # (N,)
        self.sound = torch.ones((), dtype=torch.bool, device=device)  # whether every score was a number
        self.trace: list[_Step] = []

    def run(self, model: Stepper, state: Any) -> list[list[Hypothesis]]:
        """Search from a fresh state; give each row's hypotheses, best first."""
        going = len(self.sentences)
        while going:
            logits, state = model.step(self.tokens.flatten(), state)
            state = self._advance(logits.float(), state)
            if len(self.trace) % ASKED_EVERY == 0 or len(self.trace) > int(self.rows.limits.max()):
                going, state = self._drop_done(state)
        return self._results()

    def _advance(self, logits: Tensor, state: Any) -> Any:
        """Take one step; give the state of the hypotheses that live on."""
        count, fan = self.tokens.shape
        step = len(self.trace)
        less = normaliser(logits)
        forced = np.full(count * fan, -1, dtype=np.int64)
        if any(self.rows.prefixes):
            forced = np.repeat(self.rows.forced(self.sentences.cpu().numpy(), step), fan)
        logits = restrict(logits, forced=forced, step=step, at_least=self.rows.at_least)
        parents, tokens, log_probs, totals = self._best(logits, less)
        valid = totals.isfinite() & (torch.arange(totals.size(1), device=self.device) < self.places[self.sentences].unsqueeze(1))
        ended = valid & (tokens == EOS)
        self._finish(parents, log_probs, totals, ended)
        lives = valid & ~ended & (self.limits[self.sentences] > step).unsqueeze(1)
        self._cut_short(parents, ended, self.alive & ~lives.any(dim=1))
        self.alive = self.alive & lives.any(dim=1) & ~self._decided(torch.where(lives, totals, -torch.inf))
        lives = lives & self.alive.unsqueeze(1)
        order = torch.sort((~lives).long(), dim=1, stable=True).indices  # the living first
        there = lives.gather(1, order)
        order = torch.where(there, order, order[:, :1])  # an empty place repeats the first, which no candidate survives
        parents, tokens, log_probs = parents.gather(1, order), tokens.gather(1, order), log_probs.gather(1, order)
        self.tokens, self.totals = tokens, torch.where(there, totals.gather(1, order), -torch.inf)
        self.trace.append(_Step(self.sentences, parents, tokens, log_probs))
        return state.reorder((torch.arange(count, device=self.device).unsqueeze(1) * fan + parents).flatten())

    def _best(self, logits: Tensor, less: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Choose as many candidates a sentence as a beam holds; of equal ones the lower token, then the better parent."""
        count, fan = self.tokens.shape
        values, ids = _lower_first(*largest(logits, min(self.size + SPARE, logits.size(1))))
        values, ids = values[:, : self.size], ids[:, : self.size]
        self.sound = self.sound & ~(values.isnan() & self.alive.repeat_interleave(fan).unsqueeze(1)).any()
        log_probs, tokens = (values - less).double().reshape(count, -1), ids.reshape(count, -1)  # (N, F * C)
        totals = (self.totals.unsqueeze(2) + log_probs.view(count, fan, -1)).view(count, -1)
        parents = torch.arange(fan, device=self.device).repeat_interleave(values.size(1)).expand_as(tokens)
        by_token = torch.sort(tokens * fan + parents, dim=1).indices
        by_total = torch.sort(totals.gather(1, by_token), dim=1, descending=True, stable=True).indices
        order = by_token.gather(1, by_total)[:, : self.size]
        return parents.gather(1, order), tokens.gather(1, order), log_probs.gather(1, order), totals.gather(1, order)

    def _finish(self, parents: Tensor, log_probs: Tensor, totals: Tensor, ended: Tensor) -> None:
        """Store the hypotheses that reached their end; their places in the beam are taken."""
        ended = ended & self.alive.unsqueeze(1)
        step = len(self.trace)
        used = self.size - self.places[self.sentences].unsqueeze(1)
        order = torch.sort((~ended).long(), dim=1, stable=True).indices  # the ended first
        self.finished.put(
            self.sentences,
            used + torch.arange(order.size(1), device=self.device),
            ended.gather(1, order),
            scores=self._score(totals, step + 1).gather(1, order),
            steps=step,
            rows=parents.gather(1, order),
            log_probs=log_probs.gather(1, order),
        )
        self.places[self.sentences] -= ended.sum(dim=1)

    def _cut_short(self, parents: Tensor, ended: Tensor, stuck: Tensor) -> None:
        """Store, unfinished, what stands in sentences that can go no further: the limit met, or nothing possible."""
        fan = self.tokens.size(1)
        gone = torch.zeros(self.tokens.shape, dtype=torch.long, device=self.device).scatter_add_(1, parents, ended.long()) > 0
        there = self.totals.isfinite() & ~gone & stuck.unsqueeze(1)
        places = torch.arange(fan, device=self.device).expand_as(self.tokens)
        scores, nothing = self._score(self.totals, len(self.trace)), torch.zeros_like(self.totals)
        self.cut.put(self.sentences, places, there, scores=scores, steps=len(self.trace), rows=places, log_probs=nothing)

    def _decided(self, living: Tensor) -> Tensor:
        """Say which sentences' n best are settled: their best living hypothesis cannot overtake the last of them."""
        to_beat = self.finished.table[self.sentences, :, _Ends.SCORE].topk(self.nbest, dim=1).values[:, -1]
        longest = self.limits[self.sentences] + 1  # the end counts
        return self._score(living.amax(dim=1), longest) <= to_beat

    def _score(self, totals: Tensor, length: int | Tensor) -> Tensor:
        """Rank by the penalty, which is written for numbers and does as well for tensors."""
        score: Any = self.penalty.score
        return score(totals, length)

    def _drop_done(self, state: Any) -> tuple[int, Any]:
        """Ask which sentences go on, and drop the others where that pays."""
        alive = self.alive.nonzero().flatten()  # waits for the device
        if not self.sound:
            raise not_finite(len(self.trace) - 1)
        if 0 < len(alive) < FULL_ENOUGH * len(self.sentences):
            self.sentences, self.tokens, self.totals = self.sentences[alive], self.tokens[alive], self.totals[alive]
            self.alive = self.alive[alive]
            state = state.keep(alive)
        return len(alive), state

    def _results(self) -> list[list[Hypothesis]]:
        """Read everything back at once and rank each sentence's hypotheses: the finished ones, then those that met the limit."""
        count = len(self.rows.limits)
        past = _Past(self.trace, count, self.size)
        found: list[list[Hypothesis]] = [[] for _ in range(count)]
        for ends, finished in ((self.finished, True), (self.cut, False)):
            table = ends.table.cpu().numpy()
            order = np.argsort(-table[..., _Ends.SCORE], axis=1, kind="stable")
            for sentence in range(count):
                for score, steps, row, log_prob in table[sentence, order[sentence]]:
                    if len(found[sentence]) == self.nbest or not np.isfinite(score):
                        break
                    tokens, numbers = past.path(sentence, int(row), int(steps))
                    found[sentence].append(Hypothesis(tokens, [*numbers, float(log_prob)] if finished else numbers, float(score), finished))
        return found


def _lower_first(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Put (N, K) in falling order of values, the lower ids of equal ones first."""
    by_id = torch.sort(ids, dim=1).indices
    order = by_id.gather(1, torch.sort(values.gather(1, by_id), dim=1, descending=True, stable=True).indices)
    return values.gather(1, order), ids.gather(1, order)


class _Past:
    """The steps of all sentences on the host, read backwards."""

    def __init__(self, trace: list[_Step], sentences: int, size: int) -> None:
        shape = (len(trace), sentences, size)
        self._parents, self._tokens, self._log_probs = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
        for step, (numbers, *chosen) in enumerate(trace):
            at = numbers.cpu().numpy()
            for kept, new in zip((self._parents, self._tokens, self._log_probs), chosen, strict=True):
                kept[step, at, : new.size(1)] = new.cpu().numpy()

    def path(self, sentence: int, row: int, steps: int) -> tuple[list[int], list[float]]:
        """Read the tokens and log-probabilities of the first `steps` steps that lead to a hypothesis of the last of them."""
        tokens: list[int] = []
        log_probs: list[float] = []
        for step in range(steps - 1, -1, -1):
            tokens.append(int(self._tokens[step, sentence, row]))
            log_probs.append(float(self._log_probs[step, sentence, row]))
            row = int(self._parents[step, sentence, row])
        return tokens[::-1], log_probs[::-1]
