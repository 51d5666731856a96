"""Attention as a family: a score says how well each key fits, an alignment what to make of that."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention import masks
from dragoman.attention.alignments import Alignment, AlignmentState
from dragoman.attention.argument_checks import (
    check_key_mask,
    check_mask,
    check_same_batch,
    check_sequence,
)
from dragoman.attention.recorder import AttentionRecord, RecordableAttention
from dragoman.attention.scores import Score
from dragoman.errors import DragomanError
from dragoman.ops import build_attention_mask, masked_softmax


class Attended(NamedTuple):
    """What attention found, and where it looked."""

    context: Tensor  # (B, T, D)
    weights: Tensor  # (B, T, S); a row sums to 1, to 0 where nothing may be attended, or to what its alignment says


class PreparedKeys(NamedTuple):
    """What a mechanism needs of a sentence: computed once, read at every step."""

    key: Tensor  # what the score made of the keys, (B, S, A), and behind it what the alignment made of them
    value: Tensor  # (B, S, D)
    mask: Tensor  # (B, S)


class Mechanism(RecordableAttention):
    """A score, an alignment and, where the paper has one, a projection of the values."""

    def __init__(self, score: Score, alignment: Alignment, value: nn.Module | None = None) -> None:
        super().__init__()
        if alignment.has_score_features and not score.accepts_features:
            raise DragomanError(
                "an alignment with features needs a score that has room for them",
                found=f"{type(alignment).__name__} with {type(score).__name__}",
                fix="use score additive or normed_additive",
            )
        self.score, self.alignment = score, alignment
        self.value = nn.Identity() if value is None else value

    def prepare(self, *, key: Tensor, value: Tensor, mask: Tensor | None = None) -> PreparedKeys:
        """Do once a sentence what needs no query: keys and values (B, S, D), mask (B, S) or None for all."""
        check_sequence(
            key, self.score.key_width, "keys", f"build the score with key_width={key.size(-1)}"
        )
        check_same_batch(key, value, 2, "keys and values")
        check_key_mask(mask, key.size(0), key.size(1))
        if mask is None:
            mask = torch.ones(key.shape[:2], dtype=torch.bool, device=key.device)
        prepared_key = self.score.prepare(key)
        if self.alignment.prepared_width:
            prepared_key = torch.cat([prepared_key, self.alignment.prepare(key)], dim=-1)
        return PreparedKeys(prepared_key, self.value(value), mask)

    def forward(
        self, *, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Attended:
        """Attend from every position at once: (B, T, D) to (B, S, D)."""
        prepared = self.prepare(key=key, value=value, mask=mask)
        check_sequence(
            query,
            self.score.query_width,
            "queries",
            f"build the score with query_width={query.size(-1)}",
        )
        check_same_batch(query, key, 1, "queries and keys")
        if not self.alignment.has_score_features:  # the scores wait for nobody
            key, own = self._split_prepared(prepared)
            return self._weighted_sum(
                self.alignment(self.score(query, key), prepared.mask, query, own), prepared
            )
        state = self.alignment.start(prepared.mask)
        found = []
        for position in query.unsqueeze(2).unbind(dim=1):
            attended, state = self.step(position, prepared, state)
            found.append(attended)
        return Attended(
            torch.cat([each.context for each in found], dim=1),
            torch.cat([each.weights for each in found], dim=1),
        )

    def start(self, prepared: PreparedKeys) -> AlignmentState:
        """Begin a sentence."""
        return self.alignment.start(prepared.mask)

    def step(
        self, query: Tensor, prepared: PreparedKeys, state: AlignmentState
    ) -> tuple[Attended, AlignmentState]:
        """Attend from one more position, (B, 1, D); several rows may share a sentence, as beams do: (B * K, 1, D) to (B, S, A).

        Rows that share one are to its score like positions, so its keys and values are not copied.
        """
        rows, sentences = query.size(0), prepared.value.size(0)
        if self.hooks is not None and rows != sentences:  # notes are by row
            prepared = PreparedKeys(
                *(each.repeat_interleave(rows // sentences, dim=0) for each in prepared)
            )
            sentences = rows
        key, own = self._split_prepared(prepared)
        features = self.alignment.features(state)
        if features is not None:
            features = features.view(sentences, -1, *features.shape[2:])  # (B, K, S, A)
        scores = self.score(query.view(sentences, -1, query.size(2)), key, features)  # (B, K, S)
        weights, state = self.alignment.step(scores.view(rows, -1), state, query.squeeze(1), own)
        context, weights = self._weighted_sum(
            weights.view(sentences, -1, weights.size(1)), prepared
        )
        return Attended(context.view(rows, 1, -1), weights.view(rows, 1, -1)), state

    def _split_prepared(self, prepared: PreparedKeys) -> tuple[Tensor, Tensor]:
        """Tell the score's part of the prepared keys from the alignment's."""
        edge = prepared.key.size(-1) - self.alignment.prepared_width
        return prepared.key[..., :edge], prepared.key[..., edge:]

    def _weighted_sum(self, weights: Tensor, prepared: PreparedKeys) -> Attended:
        """Take the weighted sum, for whoever watches with an axis for the one head."""
        if self.hooks is not None:
            weights = self.apply_edits(weights.unsqueeze(1)).squeeze(1)
        context = weights @ prepared.value
        if self.hooks is not None:
            self.emit_record(
                AttentionRecord(
                    weights.unsqueeze(1), prepared.value.unsqueeze(1), context.unsqueeze(1)
                )
            )
        return Attended(context, weights)


class SequenceSelfAttention(RecordableAttention):
    r"""Every position of a sequence becomes a weighted sum of those around it, by any score.

    .. math:: \alpha_t = \mathrm{softmax}_{|s - t| \le r}(e(x_t, x_s)), \quad y_t = \textstyle\sum_s \alpha_{ts} x_s

    With `NormedAdditiveScore` or `AdditiveScore` this is the additive, with `GeneralScore` the multiplicative attention of the Keras
    layer SeqSelfAttention. A `window` of r keeps each position to r neighbours on either side, which is that layer's
    attention_width=2r+1; 0 is no limit. It hides the others and saves no time. `overlap_penalty` regularises the weights.
    """

    def __init__(self, score: Score, *, window: int = 0) -> None:
        super().__init__()
        if not isinstance(score, Score):
            raise DragomanError(
                "a score must be a Score",
                found=repr(score),
                fix="build one: AdditiveScore(query_width=..., ...)",
            )
        if score.query_width != score.key_width:
            found = f"{score.query_width} and {score.key_width}"
            raise DragomanError(
                "a sequence that asks itself needs one width for queries and keys",
                found=found,
                fix="make them equal",
            )
        if window < 0:
            raise DragomanError(
                "a window must be at least 0, which is no limit",
                found=f"window={window}",
                fix="raise it",
            )
        self.score, self.window = score, window

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Attended:
        """Attend from (B, T, D) to itself; `mask` is (B, T), or broadcastable to (B, T, T) with three axes."""
        check_sequence(x, self.score.query_width, "a sequence")
        rows, length = x.shape[:2]
        if mask is not None and mask.dim() == 2:  # of keys, for all that ask
            mask = mask.unsqueeze(1)
        check_mask(mask, rows, length, length)
        near = masks.local(length, radius=self.window, device=x.device) if self.window else None
        visible = build_attention_mask(length, length, masks.combine(mask, near), causal, x.device)
        weights = masked_softmax(self.score(x, self.score.prepare(x)).unsqueeze(1), visible)
        weights = self.apply_edits(weights)  # (B, 1, T, T): an axis for the one head
        context = weights @ x.unsqueeze(1)
        self.emit_record(AttentionRecord(weights, x.unsqueeze(1), context))
        return Attended(context.squeeze(1), weights.squeeze(1))
