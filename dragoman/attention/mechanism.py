"""Attention as a family: a score says how well each key fits, an alignment what to make of that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.alignments import Alignment, AlignmentState
from dragoman.attention.checks import check_padding, check_sequence, check_together
from dragoman.attention.recording import Note, Watched
from dragoman.attention.scores import Score
from dragoman.errors import DragomanError


class Attended(NamedTuple):
    """What attention found, and where it looked."""

    context: Tensor  # (B, T, D)
    weights: Tensor  # (B, T, S); a row sums to 1, to 0 where nothing may be attended, or to what its alignment says


class Prepared(NamedTuple):
    """What a mechanism needs of a sentence: computed once, read at every step."""

    key: Tensor  # what the score made of the keys, (B, S, A), and behind it what the alignment made of them
    value: Tensor  # (B, S, D)
    mask: Tensor  # (B, S)


class Mechanism(Watched):
    """A score, an alignment and, where the paper has one, a projection of the values."""

    def __init__(self, score: Score, alignment: Alignment, value: nn.Module | None = None) -> None:
        super().__init__()
        if alignment.gives_features and not score.takes_features:
            raise DragomanError(
                "an alignment with features needs a score that has room for them",
                found=f"{type(alignment).__name__} with {type(score).__name__}",
                fix="use score additive or normed_additive",
            )
        self.score, self.alignment = score, alignment
        self.value = nn.Identity() if value is None else value

    def prepare(self, *, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Prepared:
        """Do once a sentence what needs no query: keys and values (B, S, D), mask (B, S) or None for all."""
        check_sequence(key, self.score.key_width, "keys", f"build the score with key_width={key.size(-1)}")
        check_together(key, value, 2, "keys and values")
        check_padding(mask, key.size(0), key.size(1))
        if mask is None:
            mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
        made = self.score.prepare(key)
        if self.alignment.prepared_width:
            made = torch.cat([made, self.alignment.prepare(key)], dim=-1)
        return Prepared(made, self.value(value), mask)

    def forward(self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Attended:
        """Attend from every position at once: (B, T, D) to (B, S, D)."""
        prepared = self.prepare(key=key, value=value, mask=mask)
        check_sequence(query, self.score.query_width, "queries", f"build the score with query_width={query.size(-1)}")
        check_together(query, key, 1, "queries and keys")
        if not self.alignment.gives_features:  # the scores wait for nobody
            key, own = self._parts(prepared)
            return self._look(self.alignment(self.score(query, key), prepared.mask, query, own), prepared)
        state = self.alignment.start(prepared.mask)
        found = []
        for position in query.unsqueeze(2).unbind(dim=1):
            attended, state = self.step(position, prepared, state)
            found.append(attended)
        return Attended(torch.cat([each.context for each in found], dim=1), torch.cat([each.weights for each in found], dim=1))

    def start(self, prepared: Prepared) -> AlignmentState:
        """Begin a sentence."""
        return self.alignment.start(prepared.mask)

    def step(self, query: Tensor, prepared: Prepared, state: AlignmentState) -> tuple[Attended, AlignmentState]:
        """Attend from one more position, (B, 1, D); several rows may share a sentence, as beams do: (B * K, 1, D) to (B, S, A).

        Rows that share one are to its score like positions, so its keys and values are not copied.
        """
        rows, sentences = query.size(0), prepared.value.size(0)
        if self.watch is not None and rows != sentences:  # notes are by row
            prepared = Prepared(*(each.repeat_interleave(rows // sentences, dim=0) for each in prepared))
            sentences = rows
        key, own = self._parts(prepared)
        features = self.alignment.features(state)
        if features is not None:
            features = features.view(sentences, -1, *features.shape[2:])  # (B, K, S, A)
        scores = self.score(query.view(sentences, -1, query.size(2)), key, features)  # (B, K, S)
        weights, state = self.alignment.step(scores.view(rows, -1), state, query.squeeze(1), own)
        context, weights = self._look(weights.view(sentences, -1, weights.size(1)), prepared)
        return Attended(context.view(rows, 1, -1), weights.view(rows, 1, -1)), state

    def _parts(self, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """Tell the score's part of the prepared keys from the alignment's."""
        edge = prepared.key.size(-1) - self.alignment.prepared_width
        return prepared.key[..., :edge], prepared.key[..., edge:]

    def _look(self, weights: Tensor, prepared: Prepared) -> Attended:
        """Take the weighted sum, for whoever watches with an axis for the one head."""
        if self.watch is not None:
            weights = self.edited(weights.unsqueeze(1)).squeeze(1)
        context = weights @ prepared.value
        if self.watch is not None:
            self.noted(Note(weights.unsqueeze(1), prepared.value.unsqueeze(1), context.unsqueeze(1)))
        return Attended(context, weights)
