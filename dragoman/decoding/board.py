"""What a beam search on a device keeps there, and one step of its rule: that of `beam.py`, in tensors of fixed shapes.

Nothing here asks the device for anything, not even for the number of the step, so that a step can be recorded and replayed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.largest import largest
from dragoman.decoding.penalties import Penalty, WuPenalty
from dragoman.text.specials import BOS, EOS

SPARE = 4  # candidates a row beside those wanted, so that of equal ones the lower ids are among them
_SCORE, _STEPS, _ROW, _LOG_PROB = range(4)  # of an end; its steps lead there, its row is the hypothesis in the last of them


class Beams(NamedTuple):
    """The living hypotheses of N sentences, F each."""

    sentences: Tensor  # (N,) their numbers; that of no sentence where nothing is left to do
    tokens: Tensor  # (N, F) the newest of each
    totals: Tensor  # (N, F) log-probabilities in float64; minus infinity where nothing lives
    alive: Tensor  # (N,)

    def take(self, order: Tensor) -> Beams:
        """Take some sentences (M,)."""
        return Beams(*(each.index_select(0, order) for each in self))


class Advance(NamedTuple):
    """The beams after a step, and which hypothesis of its sentence each of them continues."""

    beams: Beams
    parents: Tensor  # (N, F)


class _Candidates(NamedTuple):
    """The best continuations of N sentences, (N, K) each."""

    parents: Tensor  # which hypothesis of its sentence each continues
    tokens: Tensor
    log_probs: Tensor
    totals: Tensor


class Board:
    """Up to so many sentences and steps; one more sentence than there are takes what is written for nobody."""

    def __init__(self, *, sentences: int, steps: int, size: int, nbest: int, penalty: Penalty, device: torch.device) -> None:
        self.sentences, self.steps = sentences, steps
        self.size, self.nbest, self.penalty, self.device = size, nbest, penalty, device
        rows = sentences + 1
        self.step = torch.zeros((), dtype=torch.long, device=device)
        self.sound = torch.ones((), dtype=torch.bool, device=device)  # whether every score was a number
        self.limits = torch.zeros(rows, dtype=torch.long, device=device)
        self.places = torch.zeros(rows, dtype=torch.long, device=device)  # of each beam, not yet finished
        # Twice the places: candidates that did not end need one to leave as it is.
        self.finished = torch.zeros(rows, 2 * size, 4, dtype=torch.float64, device=device)
        self.cut = torch.zeros(rows, size, dtype=torch.float64, device=device)  # scores of those that met the limit
        self.cut_after = torch.zeros(rows, dtype=torch.long, device=device)  # steps that lead to them
        self.parents = torch.zeros(steps, rows, size, dtype=torch.long, device=device)
        self.tokens = torch.zeros(steps, rows, size, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(steps, rows, size, dtype=torch.float64, device=device)
        self._numbers = torch.arange(size * (size + SPARE), device=device)
        self.divisors = self._divisors()  # of totals, by length; None where a penalty has none

    def begin(self, limits: NDArray[np.int64], *, fan: int, rows: int | None = None) -> Beams:
        """Clear the board for as many sentences as there are limits; of the fan's hypotheses the first lives, as all are alike."""
        count = len(limits)
        rows = count if rows is None else rows
        assert count <= self.sentences, f"a board for {self.sentences} sentences was given {count}"
        assert limits.max() < self.steps, f"a board for {self.steps} steps was given a limit of {limits.max()}"
        self.step.zero_()
        self.sound.fill_(True)
        self.limits.zero_()[:count].copy_(torch.from_numpy(limits))
        self.places.fill_(self.size)
        for scores in (self.finished[..., _SCORE], self.cut):
            scores.fill_(-torch.inf)  # none yet
        numbers = torch.arange(rows, device=self.device)
        totals = torch.full((rows, fan), -torch.inf, dtype=torch.float64, device=self.device)
        totals[:, 0] = 0.0
        tokens = torch.full((rows, fan), BOS, device=self.device)
        return Beams(numbers.clamp(max=self.sentences), tokens, totals, numbers < count)

    def advance(self, beams: Beams, logits: Tensor, less: Tensor) -> Advance:
        """Take one step by logits (N * F, V) and what `normaliser` gave of them; the beams after it have all places of a beam."""
        values, ids = largest(logits, min(self.size + SPARE, logits.size(1)))
        return self.choose(beams, values - less, ids)

    def choose(self, beams: Beams, log_probs: Tensor, ids: Tensor) -> Advance:
        """Take one step by the best candidates of each hypothesis, (N * F, C) each: C is a beam's size at least, if there are as many."""
        found = self._best(beams, log_probs, ids)
        places, limits, step = self.places[beams.sentences], self.limits[beams.sentences], self.step.double()
        valid = found.totals.isfinite() & (self._numbers[: found.totals.size(1)] < places.unsqueeze(1))
        ends = found.tokens == EOS
        ended = valid & ends
        self._finish(beams, found, ended & beams.alive.unsqueeze(1), places, step)
        lives = valid & ~ends & (limits > self.step).unsqueeze(1)
        any_lives = lives.any(dim=1)
        self._cut_short(beams, found.parents, ended, beams.alive & ~any_lives, step)
        # What ends or falls leaves an empty place: its total is such that no candidate survives it.
        totals = found.totals.masked_fill(~lives, -torch.inf)
        alive = beams.alive & any_lives & ~self._decided(beams.sentences, totals, limits)
        self._remember(beams.sentences, found.parents, found.tokens, found.log_probs)
        self.step.add_(1)
        return Advance(Beams(beams.sentences, found.tokens, totals, alive), found.parents)

    def _best(self, beams: Beams, log_probs: Tensor, ids: Tensor) -> _Candidates:
        """Choose as many candidates a sentence as a beam holds; of equal ones the lower token, then the better parent."""
        count, fan = beams.tokens.shape
        wide = ids.size(1)
        log_probs, tokens = log_probs.double().view(count, -1), ids.view(count, -1)  # (N, F * C)
        self.sound.logical_and_(~(log_probs.isnan() & beams.alive.unsqueeze(1)).any())
        totals = (beams.totals.unsqueeze(2) + log_probs.view(count, fan, wide)).view(count, -1)
        by_token = torch.sort(tokens * fan + self._numbers[: fan * wide] // wide, dim=1).indices
        by_total = torch.sort(totals.gather(1, by_token), dim=1, descending=True, stable=True).indices
        order = by_token.gather(1, by_total[:, : self.size])
        return _Candidates(order // wide, tokens.gather(1, order), log_probs.gather(1, order), totals.gather(1, order))

    def _finish(self, beams: Beams, found: _Candidates, ended: Tensor, places: Tensor, step: Tensor) -> None:
        """Store the hypotheses that reached their end; their places in the beam are taken."""
        so_far = ended.cumsum(dim=1)
        others = self._numbers[: ended.size(1)] + self.size  # all different, and no end's
        at = (beams.sentences.unsqueeze(1), torch.where(ended, so_far + (self.size - 1 - places).unsqueeze(1), others))
        scores = self._score(found.totals, step + 1)
        new = torch.stack([scores, step.expand_as(scores), found.parents.double(), found.log_probs], dim=-1)
        self.finished[at] = torch.where(ended.unsqueeze(-1), new, self.finished[at])
        self.places[beams.sentences] = places - so_far[:, -1]

    def _cut_short(self, beams: Beams, parents: Tensor, ended: Tensor, stuck: Tensor, step: Tensor) -> None:
        """Store, unfinished, what stands in sentences that can go no further: the limit met, or nothing possible."""
        fan = beams.tokens.size(1)
        gone = ((parents.unsqueeze(1) == self._numbers[:fan].unsqueeze(1)) & ended.unsqueeze(1)).any(dim=2)
        there = beams.totals.isfinite() & ~gone & stuck.unsqueeze(1)
        kept = self.cut[beams.sentences]
        kept[:, :fan] = torch.where(there, self._score(beams.totals, step), kept[:, :fan])
        self.cut[beams.sentences] = kept
        self.cut_after[beams.sentences] = torch.where(stuck, self.step, self.cut_after[beams.sentences])

    def _decided(self, sentences: Tensor, living: Tensor, limits: Tensor) -> Tensor:
        """Say which sentences' n best are settled: their best living hypothesis cannot overtake the last of them."""
        to_beat = self.finished[sentences, :, _SCORE].topk(self.nbest, dim=1).values[:, -1]
        return self._score(living.amax(dim=1), limits.double() + 1) <= to_beat  # the end counts

    def _score(self, totals: Tensor, length: Tensor) -> Tensor:
        """Rank by the penalty, which is written for numbers and does as well for tensors."""
        score: Any = self.penalty.score
        return score(totals, length)

    def _divisors(self) -> Tensor | None:
        """Compute them for every length that there can be, as `_score` computes one."""
        divisor: Any = self.penalty.divisor if isinstance(self.penalty, WuPenalty) else None
        lengths = torch.arange(self.steps + 2, dtype=torch.float64, device=self.device)
        return None if divisor is None else divisor(lengths)

    def _remember(self, sentences: Tensor, *chosen: Tensor) -> None:
        """Write down what this step chose, (N, K) each."""
        at = (self.step.expand_as(sentences), sentences)
        for table, new in zip((self.parents, self.tokens, self.log_probs), chosen, strict=True):
            table[at] = F.pad(new, (0, self.size - new.size(1))) if new.size(1) < self.size else new

    def results(self, count: int, taken: int) -> list[list[Hypothesis]]:
        """Read everything back after so many steps, and rank each sentence's hypotheses: the finished ones, then those cut short."""
        ends = torch.cat([self.finished[:count], self._unfinished(count)], dim=1).cpu().numpy()
        split = 2 * self.size
        # Stable, and no cut one before a finished one: among the finished ones the first found of equal ones comes first.
        order = np.concatenate(
            [np.argsort(-part[..., _SCORE], axis=1, kind="stable") for part in (ends[:, :split], ends[:, split:])], axis=1
        )
        order[:, split:] += split
        ranked = np.take_along_axis(ends, order[..., None], axis=1)
        there = np.isfinite(ranked[..., _SCORE])
        there &= np.cumsum(there, axis=1) <= self.nbest
        sentences, places = np.nonzero(there)
        chosen = ranked[sentences, places]
        steps, rows = chosen[:, _STEPS].astype(np.int64), chosen[:, _ROW].astype(np.int64)
        tokens, log_probs = self._paths(taken, count, sentences, rows, steps)
        found: list[list[Hypothesis]] = [[] for _ in range(count)]
        finished = (places < split).tolist()
        log_probs[np.arange(len(steps)), steps] = chosen[:, _LOG_PROB]
        lengths = zip(
            sentences.tolist(), steps.tolist(), chosen[:, _SCORE].tolist(), finished, tokens.tolist(), log_probs.tolist(), strict=True
        )
        for sentence, length, score, ends_well, words, numbers in lengths:
            found[sentence].append(Hypothesis(words[:length], numbers[: length + ends_well], score, ends_well))
        return found

    def _unfinished(self, count: int) -> Tensor:
        """Write those that were cut short as the finished ones are, (B, K, 4)."""
        scores = self.cut[:count]
        places = self._numbers[: self.size].double().expand_as(scores)
        return torch.stack([scores, self.cut_after[:count, None].double().expand_as(scores), places, torch.zeros_like(scores)], dim=-1)

    def _paths(self, taken: int, count: int, sentences: Any, rows: Any, steps: Any) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Read backwards the tokens and log-probabilities that lead, in so many steps, to rows: (M, steps taken) and one more."""
        tables = torch.stack([table[:taken, :count].double() for table in (self.parents, self.tokens, self.log_probs)])
        fetched = tables.to("cpu", non_blocking=True)  # into memory that the device writes by itself
        if tables.is_cuda:
            torch.cuda.current_stream(tables.device).synchronize()
        numbers = fetched.numpy()
        past = (numbers[0].astype(np.int64), numbers[1].astype(np.int64), numbers[2])  # ids are exact in float64
        tokens, log_probs = np.zeros((len(rows), taken), np.int64), np.zeros((len(rows), taken + 1))
        for step in range(taken - 1, -1, -1):
            on = np.flatnonzero(steps > step)
            at = (step, sentences[on], rows[on])
            rows[on], tokens[on, step], log_probs[on, step] = (table[at] for table in past)
        return tokens, log_probs
