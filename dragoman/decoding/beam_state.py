"""Beam search state on the device and one beam search step, in tensors of fixed shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.ops.topk import blocked_topk
from dragoman.text.special_tokens import BOS, EOS

EXTRA_CANDIDATES = (
    4  # candidates a row beside those wanted, so that of equal ones the lower ids are among them
)
_SCORE, _STEPS, _ROW, _LOG_PROB = range(
    4
)  # of an end; its steps lead there, its row is the hypothesis in the last of them


class ActiveBeams(NamedTuple):
    """The living hypotheses of N sentences, F each."""

    sentences: Tensor  # (N,) their numbers; that of no sentence where nothing is left to do
    tokens: Tensor  # (N, F) the newest of each
    log_prob_sums: Tensor  # (N, F) log-probabilities in float64; minus infinity where nothing lives
    alive: Tensor  # (N,)

    def take(self, order: Tensor) -> ActiveBeams:
        """Take some sentences (M,)."""
        return ActiveBeams(*(each.index_select(0, order) for each in self))


class BeamStepOutput(NamedTuple):
    """The beams after a step, and which hypothesis of its sentence each of them continues."""

    beams: ActiveBeams
    parents: Tensor  # (N, F)


class _BeamCandidates(NamedTuple):
    """The best continuations of N sentences, (N, K) each."""

    parents: Tensor  # which hypothesis of its sentence each continues
    tokens: Tensor
    log_probs: Tensor
    log_prob_sums: Tensor


class BeamState:
    """Up to so many sentences and steps; one more sentence than there are takes what is written for nobody."""

    def __init__(
        self,
        *,
        sentences: int,
        steps: int,
        size: int,
        nbest: int,
        penalty: LengthPenalty,
        device: torch.device,
    ) -> None:
        self.sentences, self.steps = sentences, steps
        self.size, self.nbest, self.penalty, self.device = size, nbest, penalty, device
        rows = sentences + 1
        self.step = torch.zeros((), dtype=torch.long, device=device)
        self.all_finite = torch.ones(
            (), dtype=torch.bool, device=device
        )  # whether every score was a number
        self.limits = torch.zeros(rows, dtype=torch.long, device=device)
        self.open_beams = torch.zeros(
            rows, dtype=torch.long, device=device
        )  # of each beam, not yet finished
        # Twice the places: candidates that did not end need one to leave as it is.
        self.finished = torch.zeros(rows, 2 * size, 4, dtype=torch.float64, device=device)
        self.truncated = torch.zeros(
            rows, size, dtype=torch.float64, device=device
        )  # scores of those that met the limit
        self.truncated_at = torch.zeros(
            rows, dtype=torch.long, device=device
        )  # steps that lead to them
        self.parents = torch.zeros(steps, rows, size, dtype=torch.long, device=device)
        self.tokens = torch.zeros(steps, rows, size, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(steps, rows, size, dtype=torch.float64, device=device)
        self._arange = torch.arange(size * (size + EXTRA_CANDIDATES), device=device)
        self.length_divisors = (
            self._length_divisors()
        )  # of totals, by length; None where a penalty has none

    def reset(
        self, limits: NDArray[np.int64], *, beams_per_sentence: int, rows: int | None = None
    ) -> ActiveBeams:
        """Clear the board for as many sentences as there are limits; of the fan's hypotheses the first lives, as all are alike."""
        count = len(limits)
        rows = count if rows is None else rows
        assert count <= self.sentences, f"a board for {self.sentences} sentences was given {count}"
        assert limits.max() < self.steps, (
            f"a board for {self.steps} steps was given a limit of {limits.max()}"
        )
        self.step.zero_()
        self.all_finite.fill_(True)
        self.limits.zero_()[:count].copy_(torch.from_numpy(limits))
        self.open_beams.fill_(self.size)
        for scores in (self.finished[..., _SCORE], self.truncated):
            scores.fill_(-torch.inf)  # none yet
        numbers = torch.arange(rows, device=self.device)
        log_prob_sums = torch.full(
            (rows, beams_per_sentence), -torch.inf, dtype=torch.float64, device=self.device
        )
        log_prob_sums[:, 0] = 0.0
        tokens = torch.full((rows, beams_per_sentence), BOS, device=self.device)
        return ActiveBeams(
            numbers.clamp(max=self.sentences), tokens, log_prob_sums, numbers < count
        )

    def advance(self, beams: ActiveBeams, logits: Tensor, log_normalizer: Tensor) -> BeamStepOutput:
        """Take one step by logits (N * F, V) and what `normaliser` gave of them; the beams after it have all places of a beam."""
        values, ids = blocked_topk(logits, min(self.size + EXTRA_CANDIDATES, logits.size(1)))
        return self.apply_candidates(beams, values - log_normalizer, ids)

    def apply_candidates(
        self, beams: ActiveBeams, log_probs: Tensor, ids: Tensor
    ) -> BeamStepOutput:
        """Take one step by the best candidates of each hypothesis, (N * F, C) each: C is a beam's size at least, if there are as many."""
        found = self._select_candidates(beams, log_probs, ids)
        open_beams, limits, step = (
            self.open_beams[beams.sentences],
            self.limits[beams.sentences],
            self.step.double(),
        )
        valid = found.log_prob_sums.isfinite() & (
            self._arange[: found.log_prob_sums.size(1)] < open_beams.unsqueeze(1)
        )
        ends = found.tokens == EOS
        ended = valid & ends
        self._store_finished(beams, found, ended & beams.alive.unsqueeze(1), open_beams, step)
        survives = valid & ~ends & (limits > self.step).unsqueeze(1)
        any_survives = survives.any(dim=1)
        self._store_truncated(beams, found.parents, ended, beams.alive & ~any_survives, step)
        # What ends or falls leaves an empty place: its total is such that no candidate survives it.
        log_prob_sums = found.log_prob_sums.masked_fill(~survives, -torch.inf)
        alive = (
            beams.alive & any_survives & ~self._is_decided(beams.sentences, log_prob_sums, limits)
        )
        self._store_step(beams.sentences, found.parents, found.tokens, found.log_probs)
        self.step.add_(1)
        return BeamStepOutput(
            ActiveBeams(beams.sentences, found.tokens, log_prob_sums, alive), found.parents
        )

    def _select_candidates(
        self, beams: ActiveBeams, log_probs: Tensor, ids: Tensor
    ) -> _BeamCandidates:
        """Choose as many candidates a sentence as a beam holds; of equal ones the lower token, then the better parent."""
        count, beams_per_sentence = beams.tokens.shape
        wide = ids.size(1)
        log_probs, tokens = log_probs.double().view(count, -1), ids.view(count, -1)  # (N, F * C)
        self.all_finite.logical_and_(~(log_probs.isnan() & beams.alive.unsqueeze(1)).any())
        log_prob_sums = (
            beams.log_prob_sums.unsqueeze(2) + log_probs.view(count, beams_per_sentence, wide)
        ).view(count, -1)
        by_token = torch.sort(
            tokens * beams_per_sentence + self._arange[: beams_per_sentence * wide] // wide, dim=1
        ).indices
        by_total = torch.sort(
            log_prob_sums.gather(1, by_token), dim=1, descending=True, stable=True
        ).indices
        order = by_token.gather(1, by_total[:, : self.size])
        return _BeamCandidates(
            order // wide,
            tokens.gather(1, order),
            log_probs.gather(1, order),
            log_prob_sums.gather(1, order),
        )

    def _store_finished(
        self,
        beams: ActiveBeams,
        found: _BeamCandidates,
        ended: Tensor,
        open_beams: Tensor,
        step: Tensor,
    ) -> None:
        """Store the hypotheses that reached their end; their places in the beam are taken."""
        so_far = ended.cumsum(dim=1)
        others = self._arange[: ended.size(1)] + self.size  # all different, and no end's
        at = (
            beams.sentences.unsqueeze(1),
            torch.where(ended, so_far + (self.size - 1 - open_beams).unsqueeze(1), others),
        )
        scores = self._score(found.log_prob_sums, step + 1)
        new = torch.stack(
            [scores, step.expand_as(scores), found.parents.double(), found.log_probs], dim=-1
        )
        self.finished[at] = torch.where(ended.unsqueeze(-1), new, self.finished[at])
        self.open_beams[beams.sentences] = open_beams - so_far[:, -1]

    def _store_truncated(
        self, beams: ActiveBeams, parents: Tensor, ended: Tensor, is_stuck: Tensor, step: Tensor
    ) -> None:
        """Store, unfinished, what stands in sentences that can go no further: the limit met, or nothing possible."""
        beams_per_sentence = beams.tokens.size(1)
        has_ended = (
            (parents.unsqueeze(1) == self._arange[:beams_per_sentence].unsqueeze(1))
            & ended.unsqueeze(1)
        ).any(dim=2)
        there = beams.log_prob_sums.isfinite() & ~has_ended & is_stuck.unsqueeze(1)
        kept = self.truncated[beams.sentences]
        kept[:, :beams_per_sentence] = torch.where(
            there, self._score(beams.log_prob_sums, step), kept[:, :beams_per_sentence]
        )
        self.truncated[beams.sentences] = kept
        self.truncated_at[beams.sentences] = torch.where(
            is_stuck, self.step, self.truncated_at[beams.sentences]
        )

    def _is_decided(self, sentences: Tensor, living: Tensor, limits: Tensor) -> Tensor:
        """Say which sentences' n best are settled: their best living hypothesis cannot overtake the last of them."""
        to_beat = self.finished[sentences, :, _SCORE].topk(self.nbest, dim=1).values[:, -1]
        return self._score(living.amax(dim=1), limits.double() + 1) <= to_beat  # the end counts

    def _score(self, log_prob_sums: Tensor, length: Tensor) -> Tensor:
        """Rank by the penalty, which is written for numbers and does as well for tensors."""
        score: Any = self.penalty.score
        return score(log_prob_sums, length)

    def _length_divisors(self) -> Tensor | None:
        """Compute them for every length that there can be, as `_score` computes one."""
        divisor: Any = self.penalty.divisor if isinstance(self.penalty, WuLengthPenalty) else None
        lengths = torch.arange(self.steps + 2, dtype=torch.float64, device=self.device)
        return None if divisor is None else divisor(lengths)

    def _store_step(self, sentences: Tensor, *chosen: Tensor) -> None:
        """Write down what this step chose, (N, K) each."""
        at = (self.step.expand_as(sentences), sentences)
        for table, new in zip((self.parents, self.tokens, self.log_probs), chosen, strict=True):
            table[at] = F.pad(new, (0, self.size - new.size(1))) if new.size(1) < self.size else new

    def results(self, count: int, num_steps: int) -> list[list[Hypothesis]]:
        """Read everything back after so many steps, and rank each sentence's hypotheses: the finished ones, then those cut short."""
        ends = (
            torch.cat([self.finished[:count], self._truncated_entries(count)], dim=1).cpu().numpy()
        )
        split = 2 * self.size
        # Stable, and no cut one before a finished one: among the finished ones the first found of equal ones comes first.
        order = np.concatenate(
            [
                np.argsort(-part[..., _SCORE], axis=1, kind="stable")
                for part in (ends[:, :split], ends[:, split:])
            ],
            axis=1,
        )
        order[:, split:] += split
        ranked = np.take_along_axis(ends, order[..., None], axis=1)
        there = np.isfinite(ranked[..., _SCORE])
        there &= np.cumsum(there, axis=1) <= self.nbest
        sentences, ranks = np.nonzero(there)
        chosen = ranked[sentences, ranks]
        steps, rows = chosen[:, _STEPS].astype(np.int64), chosen[:, _ROW].astype(np.int64)
        tokens, log_probs = self._backtrack(num_steps, count, sentences, rows, steps)
        found: list[list[Hypothesis]] = [[] for _ in range(count)]
        finished = (ranks < split).tolist()
        log_probs[np.arange(len(steps)), steps] = chosen[:, _LOG_PROB]
        lengths = zip(
            sentences.tolist(),
            steps.tolist(),
            chosen[:, _SCORE].tolist(),
            finished,
            tokens.tolist(),
            log_probs.tolist(),
            strict=True,
        )
        for sentence, length, score, ends_well, words, numbers in lengths:
            found[sentence].append(
                Hypothesis(words[:length], numbers[: length + ends_well], score, ends_well)
            )
        return found

    def _truncated_entries(self, count: int) -> Tensor:
        """Write those that were cut short as the finished ones are, (B, K, 4)."""
        scores = self.truncated[:count]
        beams = self._arange[: self.size].double().expand_as(scores)
        return torch.stack(
            [
                scores,
                self.truncated_at[:count, None].double().expand_as(scores),
                beams,
                torch.zeros_like(scores),
            ],
            dim=-1,
        )

    def _backtrack(
        self, num_steps: int, count: int, sentences: Any, rows: Any, steps: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Read backwards the tokens and log-probabilities that lead, in so many steps, to rows: (M, steps taken) and one more."""
        tables = torch.stack(
            [
                table[:num_steps, :count].double()
                for table in (self.parents, self.tokens, self.log_probs)
            ]
        )
        fetched = tables.to(
            "cpu", non_blocking=True
        )  # into memory that the device writes by itself
        if tables.is_cuda:
            torch.cuda.current_stream(tables.device).synchronize()
        numbers = fetched.numpy()
        past = (
            numbers[0].astype(np.int64),
            numbers[1].astype(np.int64),
            numbers[2],
        )  # ids are exact in float64
        tokens, log_probs = (
            np.zeros((len(rows), num_steps), np.int64),
            np.zeros((len(rows), num_steps + 1)),
        )
        for step in range(num_steps - 1, -1, -1):
            on = np.flatnonzero(steps > step)
            at = (step, sentences[on], rows[on])
            rows[on], tokens[on, step], log_probs[on, step] = (table[at] for table in past)
        return tokens, log_probs
