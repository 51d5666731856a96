"""Beam search: the loop of decoder step, beam step and cache reorder, on any device.

The beam search step itself (candidates to new beams) is `beam_step.py`: finished hypotheses leave
the beam in `BeamState.advance`, which also decides when a sentence is done; finished sentences
leave the batch in `BeamState.compact`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dragoman.decoding.beam_step import ActiveBeams, BeamState
from dragoman.decoding.constrained_logits import ConstrainedRows
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty, WuLengthPenalty
from dragoman.decoding.search_interface import (
    IncrementalDecoder,
    SearchBackend,
    SearchRequest,
    mask_invalid_tokens,
    non_finite_error,
)
from dragoman.errors import ConfigError
from dragoman.ops.topk import TopK


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keep the `size` best hypotheses at each step; the slot of a finished one stays empty.

    So a beam of one is greedy search, and a sentence ends after at most `size` finished hypotheses.
    It ends earlier once `nbest` are finished and no unfinished one can still score better than the
    last of them. Its rows then leave the batch. No sentence depends on another.
    """

    size: int = 4
    nbest: int = 1
    penalty: LengthPenalty = field(default_factory=WuLengthPenalty)

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes out of range."""
        if self.size < 1:
            raise ConfigError(
                [f"the beam must keep at least 1 hypothesis; found {self.size}; 4 is usual"]
            )
        if not 1 <= self.nbest <= self.size:
            raise ConfigError(
                [
                    f"nbest must be 1 to the size of the beam, {self.size}; found {self.nbest}; "
                    "raise the beam or lower nbest"
                ]
            )

    @property
    def name(self) -> str:
        """The strategy's name in messages."""
        return "beam search"

    @property
    def beam_size(self) -> int:
        """Hypotheses in the beam."""
        return self.size

    @property
    def rows_per_sentence(self) -> int:
        """Rows of a batch that each sentence takes in the decoder."""
        return self.size

    def run(
        self, model: IncrementalDecoder, state: Any, request: SearchRequest, backend: SearchBackend
    ) -> list[list[Hypothesis]]:
        """Search from a fresh state; return up to `nbest` hypotheses per row, best first."""
        max_lengths = request.max_lengths
        max_length, step = int(max_lengths.max()), 0
        beam_state = BeamState(
            sentences=len(max_lengths),
            steps=max_length + 1,
            size=self.size,
            nbest=self.nbest,
            penalty=self.penalty,
            device=state.device,
        )
        beams = beam_state.reset(max_lengths, beams_per_sentence=1)
        constrained = _ConstrainedBeams(request) if request.constraints else None
        observer = request.observer
        if observer is not None:
            observer.start(len(max_lengths), self.size, backend.topk)
        while beams.sentences.numel():
            logits, state = model.step(beams.tokens.flatten(), state)
            logits = logits.float()
            log_sum_exp = backend.log_sum_exp(logits)
            if observer is not None:
                observer.observe_scores(logits - log_sum_exp)
            if constrained:
                logits = constrained.mask(logits, step)
                if observer is not None:
                    observer.observe_forbidden(logits, constrained.reason)
            logits = mask_invalid_tokens(
                logits,
                forced=self._forced_tokens(request, beams.sentences, beams.tokens.size(1), step),
                step=step,
                min_length=request.min_length,
            )
            values, ids = backend.topk(logits, self.size)
            while constrained and constrained.reject(logits, TopK(values, ids), step):
                values, ids = backend.topk(logits, self.size)
            num_rows = beams.tokens.size(1)
            if observer is None:
                beams, parents = backend.beam_step(beam_state, beams, values - log_sum_exp, ids)
            else:
                observer.observe_forbidden(logits)
                beams, parents = beam_state.advance(
                    beams, values - log_sum_exp, ids, observer.observe_decisions
                )
            step, kept = step + 1, None
            if step % backend.sync_every_steps == 0 or step > max_length:
                if not beam_state.all_finite:
                    raise non_finite_error(step - 1)
                beams, parents, kept = beam_state.compact(
                    beams, parents, below=backend.compact_below
                )
                if kept is not None and len(kept):
                    state = state.keep(kept)
            if constrained:
                constrained.advance(beams, parents, kept)
            if observer is not None:
                observer.observe_beams(beams, parents)
            if beams.sentences.numel():
                state = _reorder(state, parents, num_rows)
        found = beam_state.results(len(max_lengths), step)
        if observer is not None:
            observer.finish(found)
        return found

    @staticmethod
    def _forced_tokens(
        request: SearchRequest, sentences: torch.Tensor, beams_per_sentence: int, step: int
    ) -> Any:
        """Return the token that a prefix forces on each row of the batch; -1 for none."""
        if not any(request.prefixes):  # nothing to read from the device
            return np.full(sentences.numel() * beams_per_sentence, -1, dtype=np.int64)
        forced = request.forced_tokens(sentences.cpu().numpy(), step)
        return np.repeat(forced, beams_per_sentence)


class _ConstrainedBeams:
    """The state of every hypothesis in the automaton of its sentence, on the host."""

    def __init__(self, request: SearchRequest) -> None:
        self._rows = ConstrainedRows(request.constraints, request.max_lengths.tolist())
        self.reason = self._rows.reason
        self._sentences = list(range(len(request.constraints)))  # (N,)
        # (N, F); None for an empty beam slot and for a sentence that is done
        self._states: list[list[Any | None]] = [
            [self._rows.start(sentence)] for sentence in self._sentences
        ]

    def _flat(self) -> tuple[list[int], list[Any | None]]:
        return (
            [sentence for sentence in self._sentences for _ in self._states[0]],
            [state for states in self._states for state in states],
        )

    def mask(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Set the logits of tokens that leave no completion to -inf, in place."""
        return self._rows.mask(logits, *self._flat(), step)

    def reject(self, logits: torch.Tensor, candidates: TopK, step: int) -> bool:
        """Set the logits of candidates without a completion to -inf; whether there are any."""
        return bool(self._rows.reject(logits, *self._flat(), candidates, step))

    def advance(self, beams: ActiveBeams, parents: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Follow the hypotheses that a step selected."""
        if kept is not None:
            self._states = [self._states[at] for at in kept.tolist()]
        self._sentences = beams.sentences.tolist()
        is_open = beams.log_prob_sums.isfinite() & beams.alive.unsqueeze(1)
        rows = zip(
            self._sentences,
            self._states,
            parents.tolist(),
            beams.tokens.tolist(),
            is_open.tolist(),
            strict=True,
        )
        self._states = [
            [
                self._follow(sentence, states[parent], token) if is_live else None
                for parent, token, is_live in zip(row_parents, tokens, live, strict=True)
            ]
            for sentence, states, row_parents, tokens, live in rows
        ]

    def _follow(self, sentence: int, state: Any | None, token: int) -> Any:
        assert state is not None, "a live hypothesis continues a live one"
        return self._rows.advance(sentence, state, token)


def _reorder(state: Any, parents: torch.Tensor, beams_per_sentence: int) -> Any:
    """Reorder the KV cache: every beam continues its parent (N, F), a beam of the same sentence."""
    first_rows = torch.arange(len(parents), device=parents.device) * beams_per_sentence
    return state.reorder((first_rows.unsqueeze(1) + parents).flatten())
