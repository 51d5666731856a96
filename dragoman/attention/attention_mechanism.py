"""Attention as a score function plus an alignment function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention import masks
from dragoman.attention.argument_checks import (
    check_key_mask,
    check_mask,
    check_same_batch,
    check_sequence,
)
from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.attention.score_functions import Score
from dragoman.attention.softmax_and_gumbel_alignment import Alignment, AlignmentState
from dragoman.errors import DragomanError
from dragoman.ops import build_attention_mask, masked_softmax

MIN_SCANNED_KEYS = 256  # with fewer, scoring all keys in one call is faster


class Attended(NamedTuple):
    """Context vectors and attention weights."""

    context: Tensor  # (B, T, D)
    weights: Tensor  # (B, T, S); rows sum to 1, to 0 if all is masked, or as the alignment defines


class PreparedKeys(NamedTuple):
    """Projected keys and values of a sentence, computed once and used at every step."""

    key: Tensor  # (B, S, A): the score's projection, then the alignment's
    value: Tensor  # (B, S, D)
    mask: Tensor  # (B, S)


class Mechanism(RecordableAttention):
    """A score, an alignment and optionally a projection of the values."""

    def __init__(self, score: Score, alignment: Alignment, value: nn.Module | None = None) -> None:
        super().__init__()
        if alignment.has_score_features and not score.accepts_features:
            raise DragomanError(
                "an alignment with features needs a score that accepts them",
                found=f"{type(alignment).__name__} with {type(score).__name__}",
                fix="use score additive or normed_additive",
            )
        self.score, self.alignment = score, alignment
        self.value = nn.Identity() if value is None else value

    def prepare(self, *, key: Tensor, value: Tensor, mask: Tensor | None = None) -> PreparedKeys:
        """Project keys and values (B, S, D) once per sentence; `mask` is (B, S) or None."""
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
        """Attend from all positions (B, T, D) to (B, S, D)."""
        prepared = self.prepare(key=key, value=value, mask=mask)
        check_sequence(
            query,
            self.score.query_width,
            "queries",
            f"build the score with query_width={query.size(-1)}",
        )
        check_same_batch(query, key, 1, "queries and keys")
        if not self.alignment.has_score_features:  # all scores in one call
            key, own = self._split_prepared(prepared)
            scores = self.score(query, key)
            return self._weighted_sum(
                self.alignment(scores, prepared.mask, query, own), scores, prepared
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
        """Return the initial state of the alignment."""
        return self.alignment.start(prepared.mask)

    def step(
        self, query: Tensor, prepared: PreparedKeys, state: AlignmentState
    ) -> tuple[Attended, AlignmentState]:
        """Attend from one more position (B, 1, D).

        Several rows may share a sentence, as beams do: (B * K, 1, D) to (B, S, A). The score treats
        them as positions, so that keys and values are not copied.
        """
        rows, sentences = query.size(0), prepared.value.size(0)
        if self.hooks is not None and rows != sentences:  # records have one row each
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
            weights.view(sentences, -1, weights.size(1)), scores, prepared
        )
        return Attended(context.view(rows, 1, -1), weights.view(rows, 1, -1)), state

    def can_scan(self, prepared: PreparedKeys) -> bool:
        """Whether `scan` may replace `step`: on a CPU, in evaluation, many keys, no hooks."""
        return (
            self.alignment.scans_keys
            and not self.alignment.training
            and not self.score.is_positional
            and self.hooks is None
            # A GPU scores all keys in one launch; one by one, each key would synchronize.
            and prepared.value.device.type == "cpu"
            and prepared.value.size(1) >= MIN_SCANNED_KEYS
        )

    @torch.no_grad()
    def scan(
        self, query: Tensor, prepared: PreparedKeys, state: AlignmentState
    ) -> tuple[Tensor, AlignmentState]:
        """Return the context (B, 1, D) of one more position (B, 1, D), reading keys one by one.

        The same as `step`, in time that does not depend on the number of keys. Several rows may
        share a sentence, as beams do.
        """
        rows_per_sentence = query.size(0) // prepared.value.size(0)
        key, _ = self._split_prepared(prepared)

        def score_keys(rows: Tensor, positions: Tensor) -> Tensor:
            one = key[rows // rows_per_sentence, positions].unsqueeze(1)  # (N, 1, A)
            return self.score(query[rows], one).flatten()

        stopped, state = self.alignment.scan(score_keys, state)
        sentences = torch.arange(query.size(0), device=query.device) // rows_per_sentence
        positions = state["position"].clamp(max=prepared.value.size(1) - 1)
        context = prepared.value[sentences, positions].masked_fill(~stopped.unsqueeze(1), 0.0)
        return context.unsqueeze(1), state

    def _split_prepared(self, prepared: PreparedKeys) -> tuple[Tensor, Tensor]:
        """Split prepared keys into the score's and the alignment's part."""
        edge = prepared.key.size(-1) - self.alignment.prepared_width
        return prepared.key[..., :edge], prepared.key[..., edge:]

    def _weighted_sum(self, weights: Tensor, scores: Tensor, prepared: PreparedKeys) -> Attended:
        """Return the weighted sum of the values; records have an axis for the one head."""
        if self.hooks is not None:
            weights = self.apply_edits(weights.unsqueeze(1)).squeeze(1)
        context = weights @ prepared.value
        if self.hooks is not None:
            self.emit_record(
                AttentionRecord(
                    weights.unsqueeze(1),
                    prepared.value.unsqueeze(1),
                    context.unsqueeze(1),
                    scores.unsqueeze(1),
                )
            )
        return Attended(context, weights)


class SequenceSelfAttention(RecordableAttention):
    r"""Single-head self-attention with any score.

    .. math:: \alpha_t = \mathrm{softmax}_{|s - t| \le r}(e(x_t, x_s)), \quad
        y_t = \textstyle\sum_s \alpha_{ts} x_s

    With `AdditiveScore` or `NormedAdditiveScore` this is the additive, with `GeneralScore` the
    multiplicative attention of the Keras layer SeqSelfAttention. A `window` of r restricts each
    position to r neighbors on either side, that layer's attention_width=2r+1; 0 is no limit. The
    window is a mask and saves no time. `overlap_penalty` regularizes the weights.
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
                "self-attention needs equal query_width and key_width",
                found=found,
                fix="make them equal",
            )
        if window < 0:
            raise DragomanError(
                "window must be at least 0, which is no limit",
                found=f"window={window}",
                fix="use 0 or a positive number",
            )
        self.score, self.window = score, window

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Attended:
        """Attend from (B, T, D) to itself; `mask` is (B, T), or broadcastable to (B, T, T)."""
        check_sequence(x, self.score.query_width, "a sequence")
        rows, length = x.shape[:2]
        if mask is not None and mask.dim() == 2:  # a key mask
            mask = mask.unsqueeze(1)
        check_mask(mask, rows, length, length)
        near = masks.local(length, radius=self.window, device=x.device) if self.window else None
        visible = build_attention_mask(length, length, masks.combine(mask, near), causal, x.device)
        weights = masked_softmax(self.score(x, self.score.prepare(x)).unsqueeze(1), visible)
        weights = self.apply_edits(weights)  # (B, 1, T, T): an axis for the one head
        context = weights @ x.unsqueeze(1)
        self.emit_record(AttentionRecord(weights, x.unsqueeze(1), context))
        return Attended(context.squeeze(1), weights.squeeze(1))
