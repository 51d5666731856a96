"""Beam state and the beam search step: selection, finished hypotheses, stopping, backpointers.

`BeamState.advance` is the reference of the step, in PyTorch on tensors of fixed shapes, so that it
runs on any device without synchronization. Two fast forms make the same decisions and are compared
with it by tests: `inference/cpu/csrc/beam_step.h` (C++) and `ops/triton/beam_step_kernel.py` (GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.text.special_tokens import BOS, EOS

# Candidates per row beyond the beam size where torch.topk ranks them: ties at the cut are broken by
# the lower token id.
EXTRA_CANDIDATES = 4
# Columns of `BeamState.finished`: the hypothesis has STEPS tokens before EOS, and ROW is its beam
# in the last of these steps. LOG_PROB is that of EOS.
_SCORE, _STEPS, _ROW, _LOG_PROB = range(4)


class ActiveBeams(NamedTuple):
    """The unfinished hypotheses of N sentences, F beams each."""

    sentences: (
        Tensor  # (N,) index of each sentence in the beam state; one past the last for padding
    )
    tokens: Tensor  # (N, F) last token of each hypothesis
    log_prob_sums: Tensor  # (N, F) float64; -inf for an empty beam slot
    alive: Tensor  # (N,) False once the n best of a sentence are known

    def take(self, order: Tensor) -> ActiveBeams:
        """Select sentences (M,)."""
        return ActiveBeams(*(each.index_select(0, order) for each in self))


class BeamStepOutput(NamedTuple):
    """The beams after a step, and the beam of the same sentence that each of them continues."""

    beams: ActiveBeams
    parents: Tensor  # (N, K)


class CompactedBeams(NamedTuple):
    """The beams that are still computed after finished ones were dropped."""

    beams: ActiveBeams
    parents: Tensor  # (M, F)
    kept: Tensor | None  # (M,) which of the N sentences remain; None if all


class _BeamCandidates(NamedTuple):
    """The best continuations of N sentences, (N, K) each."""

    parents: Tensor  # beam of its sentence that each continues
    tokens: Tensor
    log_probs: Tensor
    log_prob_sums: Tensor


class BeamDecisions(NamedTuple):
    """The decisions of a step about the K best continuations of N sentences, (N, K) each."""

    parents: Tensor  # beam of its sentence that each continues
    tokens: Tensor
    log_prob_sums: Tensor
    valid: Tensor  # whether it has a slot in the beam
    ended: Tensor  # whether it has one and ended with EOS
    survives: Tensor  # whether it has one and may continue
    bounds: Tensor  # the best score that a surviving beam can reach; -inf for the others
    active_beams: Tensor  # (N,) beam slots without a finished hypothesis, before the step
    alive: Tensor  # (N,) whether the search of the sentence continues
    step: Tensor  # ()


class BeamState:
    """All that a beam search stores: finished and truncated hypotheses, limits and backpointers.

    Buffers have a row for each sentence and one more, which takes what padding rows write.
    """

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
        rows, long, double = sentences + 1, torch.long, torch.float64
        self.step = torch.zeros((), dtype=long, device=device)
        self.all_finite = torch.ones(
            (), dtype=torch.bool, device=device
        )  # no log-probability is NaN
        self.limits = torch.zeros(rows, dtype=long, device=device)
        # Beam slots without a finished hypothesis.
        self.active_beams = torch.zeros(rows, dtype=long, device=device)
        # Twice the size: candidates that do not end are written to the second half, unchanged.
        self.finished = torch.zeros(rows, 2 * size, 4, dtype=double, device=device)
        self.truncated = torch.zeros(rows, size, dtype=double, device=device)  # scores at the limit
        self.truncated_at = torch.zeros(rows, dtype=long, device=device)  # their lengths
        self.parents = torch.zeros(steps, rows, size, dtype=long, device=device)
        self.tokens = torch.zeros(steps, rows, size, dtype=long, device=device)
        self.log_probs = torch.zeros(steps, rows, size, dtype=double, device=device)
        self.length_divisors = torch.tensor(
            [penalty.divisor(length) for length in range(steps + 2)], dtype=double, device=device
        )
        self._arange = torch.arange(size * (size + EXTRA_CANDIDATES), device=device)

    def reset(
        self, limits: NDArray[np.int64], *, beams_per_sentence: int, rows: int | None = None
    ) -> ActiveBeams:
        """Clear the state for as many sentences as there are limits; return their first beams.

        Of the F equal hypotheses of a sentence only the first is not empty. `rows` pads the batch.
        """
        count = len(limits)
        rows = count if rows is None else rows
        assert count <= self.sentences, (
            f"a beam state for {self.sentences} sentences was given {count}"
        )
        assert limits.max() < self.steps, (
            f"a beam state for {self.steps} steps was given a limit of {limits.max()}"
        )
        self.step.zero_()
        self.all_finite.fill_(True)
        self.limits.zero_()[:count].copy_(torch.from_numpy(limits))
        self.active_beams.fill_(self.size)
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

    def advance(
        self,
        beams: ActiveBeams,
        log_probs: Tensor,
        ids: Tensor,
        observe: Callable[[ActiveBeams, BeamDecisions], None] | None = None,
    ) -> BeamStepOutput:
        """Take one beam search step by the C best candidates of each hypothesis, (N * F, C).

        C is at least the size of the beam, or the vocabulary size if that is smaller. `observe` is
        called with the beams before the step and its decisions.
        """
        found = self._select_candidates(beams, log_probs, ids)
        active_beams = self.active_beams.index_select(0, beams.sentences)
        limits = self.limits.index_select(0, beams.sentences)
        valid = found.log_prob_sums.isfinite() & (
            self._arange[: found.log_prob_sums.size(1)] < active_beams.unsqueeze(1)
        )
        is_eos = found.tokens == EOS
        ended = valid & is_eos
        self._store_finished(beams, found, ended & beams.alive.unsqueeze(1), active_beams)
        survives = valid & ~is_eos & (limits > self.step).unsqueeze(1)
        any_survives = survives.any(dim=1)
        self._store_truncated(beams, found.parents, ended, beams.alive & ~any_survives)
        # A finished or dropped hypothesis leaves an empty beam slot: no candidate of it is finite.
        log_prob_sums = found.log_prob_sums.masked_fill(~survives, -torch.inf)
        bounds = self._upper_bounds(log_prob_sums, limits)
        alive = beams.alive & any_survives & ~self._can_stop_early(beams.sentences, bounds)
        self._store_backpointers(beams.sentences, found.parents, found.tokens, found.log_probs)
        if observe is not None:
            observe(
                beams,
                BeamDecisions(
                    found.parents,
                    found.tokens,
                    found.log_prob_sums,
                    valid,
                    ended,
                    survives,
                    bounds,
                    active_beams,
                    alive,
                    self.step,
                ),
            )
        self.step.add_(1)
        return BeamStepOutput(
            ActiveBeams(beams.sentences, found.tokens, log_prob_sums, alive), found.parents
        )

    def compact(self, beams: ActiveBeams, parents: Tensor, *, below: float) -> CompactedBeams:
        """Drop sentences that are done, and beam slots that are empty in all others.

        Sentences are dropped if less than the fraction `below` of them is alive. Waits for the
        device.
        """
        alive = beams.alive.nonzero().flatten()
        kept = alive if len(alive) < below * len(beams.alive) else None
        if kept is not None:
            beams, parents = beams.take(kept), parents.index_select(0, kept)
        is_open = beams.log_prob_sums.isfinite()
        width = int(is_open.sum(dim=1).max()) if len(is_open) else 0
        if 0 < width < is_open.size(1):
            # The order of the others stays, so that ties are broken as before.
            order = torch.sort((~is_open).byte(), dim=1, stable=True).indices[:, :width]
            parents = parents.gather(1, order)
            beams = beams._replace(
                tokens=beams.tokens.gather(1, order),
                log_prob_sums=beams.log_prob_sums.gather(1, order),
            )
            last = self.step - 1
            for table in (self.parents, self.tokens, self.log_probs):
                stored = table[last, beams.sentences]
                stored[:, :width] = stored.gather(1, order)
                table[last, beams.sentences] = stored
        return CompactedBeams(beams, parents, kept)

    def _select_candidates(
        self, beams: ActiveBeams, log_probs: Tensor, ids: Tensor
    ) -> _BeamCandidates:
        """Select the K best candidates of each sentence; ties: lower token, then parent."""
        count, beams_per_sentence = beams.tokens.shape
        wide = ids.size(1)
        log_probs, tokens = (
            log_probs.double().reshape(count, -1),
            ids.reshape(count, -1),
        )  # (N, F * C)
        self.all_finite.logical_and_(~(log_probs.isnan() & beams.alive.unsqueeze(1)).any())
        log_prob_sums = (
            beams.log_prob_sums.unsqueeze(2) + log_probs.view(count, beams_per_sentence, wide)
        ).view(count, -1)
        by_token = torch.sort(
            tokens * beams_per_sentence + self._arange[: beams_per_sentence * wide] // wide, dim=1
        ).indices
        by_sum = torch.sort(
            log_prob_sums.gather(1, by_token), dim=1, descending=True, stable=True
        ).indices
        order = by_token.gather(1, by_sum[:, : self.size])
        return _BeamCandidates(
            order // wide,
            tokens.gather(1, order),
            log_probs.gather(1, order),
            log_prob_sums.gather(1, order),
        )

    def _store_finished(
        self, beams: ActiveBeams, found: _BeamCandidates, ended: Tensor, active_beams: Tensor
    ) -> None:
        """Store the hypotheses that ended with EOS and close their beam slots."""
        so_far = ended.cumsum(dim=1)
        others = self._arange[: ended.size(1)] + self.size  # all different, in the second half
        at = (
            beams.sentences.unsqueeze(1),
            torch.where(ended, so_far + (self.size - 1 - active_beams).unsqueeze(1), others),
        )
        scores = found.log_prob_sums / self._divisor_after(1)
        steps = self.step.double().expand_as(scores)
        new = torch.stack([scores, steps, found.parents.double(), found.log_probs], dim=-1)
        self.finished[at] = torch.where(ended.unsqueeze(-1), new, self.finished[at])
        self.active_beams[beams.sentences] = active_beams - so_far[:, -1]

    def _store_truncated(
        self, beams: ActiveBeams, parents: Tensor, ended: Tensor, is_stuck: Tensor
    ) -> None:
        """Store the unfinished hypotheses of sentences that cannot continue: the length limit."""
        beams_per_sentence = beams.tokens.size(1)
        has_ended = (
            (parents.unsqueeze(1) == self._arange[:beams_per_sentence].unsqueeze(1))
            & ended.unsqueeze(1)
        ).any(dim=2)
        is_unfinished = beams.log_prob_sums.isfinite() & ~has_ended & is_stuck.unsqueeze(1)
        kept = self.truncated[beams.sentences]
        kept[:, :beams_per_sentence] = torch.where(
            is_unfinished,
            beams.log_prob_sums / self._divisor_after(0),
            kept[:, :beams_per_sentence],
        )
        self.truncated[beams.sentences] = kept
        self.truncated_at[beams.sentences] = torch.where(
            is_stuck, self.step, self.truncated_at[beams.sentences]
        )

    def _upper_bounds(self, log_prob_sums: Tensor, limits: Tensor) -> Tensor:
        """Return the best score that each unfinished hypothesis can reach, (N, K).

        Its log-probability only falls, and the divisor is largest at the limit (and EOS).
        """
        return log_prob_sums / self.length_divisors.index_select(0, limits + 1).unsqueeze(1)

    def _can_stop_early(self, sentences: Tensor, bounds: Tensor) -> Tensor:
        """Whether a sentence can stop, (N,): no unfinished hypothesis can enter the n best."""
        to_beat = self.finished[sentences, :, _SCORE].topk(self.nbest, dim=1).values[:, -1]
        return bounds.amax(dim=1) <= to_beat

    def _divisor_after(self, more: int) -> Tensor:
        """Return the length penalty's divisor for the tokens so far and `more`, (1,)."""
        return self.length_divisors.index_select(0, (self.step + more).view(1))

    def _store_backpointers(self, sentences: Tensor, *chosen: Tensor) -> None:
        """Store parents, tokens and log-probabilities of this step, (N, K) each."""
        at = (self.step.expand_as(sentences), sentences)
        for table, new in zip((self.parents, self.tokens, self.log_probs), chosen, strict=True):
            table[at] = F.pad(new, (0, self.size - new.size(1))) if new.size(1) < self.size else new

    def results(self, count: int, num_steps: int) -> list[list[Hypothesis]]:
        """Return the n best of each sentence after so many steps: finished ones, then truncated."""
        ends = (
            torch.cat([self.finished[:count], self._truncated_entries(count)], dim=1).cpu().numpy()
        )
        split = 2 * self.size
        # Stable: of equal finished hypotheses the first found comes first.
        order = np.concatenate(
            [
                np.argsort(-part[..., _SCORE], axis=1, kind="stable")
                for part in (ends[:, :split], ends[:, split:])
            ],
            axis=1,
        )
        order[:, split:] += split
        ranked = np.take_along_axis(ends, order[..., None], axis=1)
        exists = np.isfinite(ranked[..., _SCORE])
        exists &= np.cumsum(exists, axis=1) <= self.nbest
        sentences, ranks = np.nonzero(exists)
        chosen = ranked[sentences, ranks]
        steps, rows = chosen[:, _STEPS].astype(np.int64), chosen[:, _ROW].astype(np.int64)
        tokens, log_probs = self._backtrack(num_steps, count, sentences, rows, steps)
        log_probs[np.arange(len(steps)), steps] = chosen[:, _LOG_PROB]
        found: list[list[Hypothesis]] = [[] for _ in range(count)]
        for sentence, length, score, finished, path, path_log_probs in zip(
            sentences.tolist(),
            steps.tolist(),
            chosen[:, _SCORE].tolist(),
            (ranks < split).tolist(),
            tokens.tolist(),
            log_probs.tolist(),
            strict=True,
        ):
            found[sentence].append(
                Hypothesis(path[:length], path_log_probs[: length + finished], score, finished)
            )
        return found

    def _truncated_entries(self, count: int) -> Tensor:
        """Return the truncated hypotheses in the layout of the finished ones, (B, K, 4)."""
        scores = self.truncated[:count]
        beams = self._arange[: self.size].double().expand_as(scores)
        lengths = self.truncated_at[:count, None].double().expand_as(scores)
        return torch.stack([scores, lengths, beams, torch.zeros_like(scores)], dim=-1)

    def _backtrack(
        self, num_steps: int, count: int, sentences: Any, rows: Any, steps: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Follow the backpointers of M hypotheses: tokens (M, T), log-probabilities (M, T + 1)."""
        tables = torch.stack(
            [
                table[:num_steps, :count].double()  # ids are exact in float64
                for table in (self.parents, self.tokens, self.log_probs)
            ]
        )
        fetched = tables.to("cpu", non_blocking=True)  # into pinned memory, if from a GPU
        self.step.cpu()  # a blocking copy on the same stream: waits for the one before
        past = fetched.numpy()
        past_parents, past_tokens, past_log_probs = past[0].astype(np.int64), past[1], past[2]
        tokens = np.zeros((len(rows), num_steps), np.int64)
        log_probs = np.zeros((len(rows), num_steps + 1))
        for step in range(num_steps - 1, -1, -1):
            on = np.flatnonzero(steps > step)
            at = (step, sentences[on], rows[on])
            rows[on], tokens[on, step] = past_parents[at], past_tokens[at]
            log_probs[on, step] = past_log_probs[at]
        return tokens, log_probs
