"""Multi-head attention: several small attentions side by side, for a sequence to itself and to another one."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention import masks
from dragoman.attention.argument_checks import (
    check_heads,
    check_mask,
    check_same_batch,
    check_sequence,
)
from dragoman.attention.positions import RelativePosition
from dragoman.attention.recorder import AttentionRecord, RecordableAttention
from dragoman.attention.scores import ScaledDotScore, Score
from dragoman.ops import attend, attend_packed, build_attention_mask, masked_softmax
from dragoman.ops.windowed_attention import attend_windowed, is_faster_windowed

logger = logging.getLogger(__name__)


class ProjectedQKV(NamedTuple):
    """What a sequence asks, and what it answers with."""

    query: Tensor  # (B, H, T, Dh)
    key_value: Tensor  # (B, 2, G, T, Dh), as a cache keeps them


class RelativeTerms(NamedTuple):
    """Where queries may look, what distance adds to their scores, and what they meet the keys with."""

    query: Tensor  # (B, H, T, Dh)
    mask: Tensor | None  # broadcastable to (B, T, S)
    bias: Tensor | None  # broadcastable to (B, H, T, S)


class MultiHead(RecordableAttention):
    r"""What attention with heads has in common: looking, and joining what the heads found.

    .. math:: \mathrm{MultiHead} = [\mathrm{head}_1; \dots; \mathrm{head}_H]\, W^O

    Vaswani et al. (2017), section 3.2.2. A head is width / heads wide, or `head_width`: narrow heads cannot hold every pattern of
    weights (Bhojanapalli et al. 2020). With fewer `kv_heads`, G, each group of heads shares keys and values, and a cache is
    smaller by as much (Ainslie et al. 2023). `norms` put queries and keys on a common scale, so that scores stay small (Henry et
    al. 2020, Dehghani et al. 2023).

    With `talking` the heads mix their scores before the softmax and their weights after it, by trained H x H matrices:

    .. math:: W = P_w\, \mathrm{softmax}(P_l\, Q K^\top / \sqrt{d_h})

    Shazeer et al. (2020). Weights are recorded as mixed, so a row may sum to something else than one; no fused kernel serves it.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int = 0,
        kv_heads: int = 0,
        norms: tuple[nn.Module, nn.Module] | None = None,
        talking_heads: bool = False,
        score: Score | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_heads(width, heads, head_width=head_width, kv_heads=kv_heads)
        self.width, self.heads, self.head_width = width, heads, head_width or width // heads
        self.kv_heads = kv_heads or heads
        self.inner, self.kv_inner = heads * self.head_width, self.kv_heads * self.head_width
        self.score = (
            ScaledDotScore(query_width=self.head_width, key_width=self.head_width)
            if score is None
            else score
        )
        self.dropout = dropout
        self.output = nn.Linear(self.inner, width, bias=bias)  # W^O
        self.query_norm = None if norms is None else norms[0]
        self.key_norm = None if norms is None else norms[1]
        # The identity, with which heads start as if they did not talk; the paper's own first values are not given in its text.
        self.mix_scores = nn.Parameter(torch.eye(heads)) if talking_heads else None  # P_l
        self.mix_weights = nn.Parameter(torch.eye(heads)) if talking_heads else None  # P_w
        self.fused = self.score.fused and not talking_heads
        if not self.score.fused:
            _warn_not_fused(type(self.score).__name__)

    def attend_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        bias: Tensor | None = None,
        radius: int = 0,
    ) -> Tensor:
        """Attend from (B, H, T, Dh) to (B, G, S, Dh) and join the heads: (B, T, D).

        `bias`, broadcastable to (B, H, T, S), is added to the scores. A `radius` takes the way of `attend_near`.
        """
        if self.kv_heads != self.heads:
            key, value = (
                part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (key, value)
            )
        dropout = self.dropout if self.training else 0.0
        if radius:
            context = attend_windowed(
                query, key, value, radius=radius, mask=mask, causal=causal, dropout=dropout
            )
        elif self.hooks is None and self.fused:
            context = attend(
                query, key, value, mask=mask, causal=causal, dropout=dropout, bias=bias
            )
        else:
            context = self._attend_reference(query, key, value, mask, causal, dropout, bias)
        return self.output(context.transpose(1, 2).flatten(2))

    def _attend_packed(
        self,
        packed_query: Tensor,
        packed_key_value: Tensor | None,
        *,
        mask: Tensor | None,
        causal: bool = False,
    ) -> Tensor | None:
        """Attend straight from the products where nothing is done to heads one by one: (B, T, D), or None."""
        if (
            self.hooks is not None
            or not self.fused
            or self.kv_heads != self.heads
            or self.key_norm is not None
        ):
            return None
        dropout = self.dropout if self.training else 0.0
        context = attend_packed(
            packed_query,
            packed_key_value,
            heads=self.heads,
            mask=mask,
            causal=causal,
            dropout=dropout,
        )
        return None if context is None else self.output(context)

    def _attend_reference(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        bias: Tensor | None,
    ) -> Tensor:
        """Attend step by step, with any score, for whoever watches."""
        scores = self.score(query, self.score.prepare(key))  # (B, H, T, S)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        scores = _mix_heads(
            self.mix_scores, scores
        )  # before anything is hidden, which no head may tell another
        weights = masked_softmax(
            scores, build_attention_mask(query.size(-2), key.size(-2), mask, causal, query.device)
        )
        weights = _mix_heads(self.mix_weights, weights)
        weights = F.dropout(self.apply_edits(weights), dropout, training=dropout > 0)
        context = weights @ value
        self.noted(AttentionRecord(weights, value, context))
        return context

    def split(self, x: Tensor, parts: int) -> Tensor:
        """Cut projections (B, T, parts * n * Dh) into heads: (B, parts, n, T, Dh)."""
        return x.view(x.size(0), x.size(1), parts, -1, self.head_width).permute(0, 2, 3, 1, 4)


class SelfAttention(MultiHead):
    """A sequence attends to itself; one product makes queries, keys and values.

    `within` tells places inside attention: by turning queries and keys, or by a term added to the scores. A `window` keeps each
    position to those at most so far away, as Vaswani et al. (2017, section 4) propose: in time and memory that grow with the
    length and not with its square, but where `within` measures distances, heads talk, or somebody watches.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int = 0,
        kv_heads: int = 0,
        norms: tuple[nn.Module, nn.Module] | None = None,
        talking_heads: bool = False,
        score: Score | None = None,
        within: RelativePosition | None = None,
        window: int = 0,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        shape: dict[str, Any] = {
            "head_width": head_width,
            "kv_heads": kv_heads,
            "norms": norms,
            "talking_heads": talking_heads,
            "score": score,
        }
        super().__init__(width, heads, **shape, dropout=dropout, bias=bias)
        self.query_key_value = nn.Linear(
            width, self.inner + 2 * self.kv_inner, bias=bias
        )  # W^Q, W^K and W^V, one below the other
        self.within, self.window = within, window
        self.rotates = within is not None and not within.has_bias
        self.needs_distances = bool(window) or (
            within is not None and within.has_bias
        )  # whether it needs distances

    def project(self, x: Tensor, *, first: int = 0) -> ProjectedQKV:
        """Return queries, keys and values of (B, T, D) at positions first to first + T - 1."""
        query, key_value = self.query_key_value(x).split([self.inner, 2 * self.kv_inner], dim=-1)
        query, key_value = self.split(query, 1).squeeze(1), self.split(key_value, 2)
        if not self.rotates and self.key_norm is None:
            return ProjectedQKV(query, key_value)
        key, value = key_value.unbind(1)
        query, key = self._apply_positions(query, key, first)
        return ProjectedQKV(query, torch.stack([key, value], dim=1))

    def relative_terms(
        self, query: Tensor, mask: Tensor | None, query_positions: Tensor, key_positions: Tensor
    ) -> RelativeTerms:
        """Add to a mask what places (..., T) and (..., S) hide, and give what they add to the scores of queries (B, H, T, Dh)."""
        distance = key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)
        mask = masks.combine(mask, distance.abs() <= self.window) if self.window else mask
        if self.within is None or not self.within.has_bias:
            return RelativeTerms(query, mask, None)
        return RelativeTerms(
            self.within.shift_query(query), mask, self.within.bias(distance, query)
        )

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attend from (B, T, D) to itself; `mask` is broadcastable to (B, T, T)."""
        check_sequence(x, self.width, "a sequence")
        check_mask(mask, x.size(0), x.size(1), x.size(1))
        packed = self.query_key_value(x)
        found = (
            None
            if self.rotates or self.needs_distances
            else self._attend_packed(packed, None, mask=mask, causal=causal)
        )
        if found is not None:
            return found
        parts = packed.split([self.inner, self.kv_inner, self.kv_inner], dim=-1)
        query, key, value = (self.split(part, 1).squeeze(1) for part in parts)
        query, key = self._apply_positions(query, key, 0)
        if self._uses_windowed_attention(x.size(1), mask):
            return self.attend_heads(
                query, key, value, mask=mask, causal=causal, radius=self.window
            )
        bias = None
        if self.needs_distances:
            positions = torch.arange(x.size(1), device=x.device)
            query, mask, bias = self.relative_terms(query, mask, positions, positions)
        return self.attend_heads(query, key, value, mask=mask, causal=causal, bias=bias)

    def _uses_windowed_attention(self, length: int, mask: Tensor | None) -> bool:
        """Whether windowed attention is faster here and nothing needs the full score matrix."""
        has_bias = self.within is not None and self.within.has_bias
        if not self.window or has_bias or self.hooks is not None or not self.fused:
            return False
        return is_faster_windowed(length, self.window) and (mask is None or mask.size(-2) == 1)

    def _apply_positions(self, query: Tensor, key: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys, then turn them, where that is asked for."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key = (
                _normalize_heads(self.query_norm, query),
                _normalize_heads(self.key_norm, key),
            )
        if self.rotates and self.within is not None:
            query, key = (self.within.rotate(part, None, first=first) for part in (query, key))
        return query, key


class CrossAttention(MultiHead):
    """A sequence attends to another, whose keys and values are made once."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        memory_width: int | None = None,
        head_width: int = 0,
        kv_heads: int = 0,
        norms: tuple[nn.Module, nn.Module] | None = None,
        talking_heads: bool = False,
        score: Score | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        shape: dict[str, Any] = {
            "head_width": head_width,
            "kv_heads": kv_heads,
            "norms": norms,
            "talking_heads": talking_heads,
            "score": score,
        }
        super().__init__(width, heads, **shape, dropout=dropout, bias=bias)
        self.query = nn.Linear(width, self.inner, bias=bias)  # W^Q
        self.key_value = nn.Linear(
            width if memory_width is None else memory_width, 2 * self.kv_inner, bias=bias
        )  # W^K above W^V

    def prepare(self, memory: Tensor) -> Tensor:
        """Make keys and values of (B, S, D): (B, 2, G, S, Dh)."""
        return self._prepared(self.key_value(memory))

    def _prepared(self, key_value: Tensor) -> Tensor:
        key_value = self.split(key_value, 2)
        if self.key_norm is None:
            return key_value
        key, value = key_value.unbind(1)
        return torch.stack([_normalize_heads(self.key_norm, key), value], dim=1)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend from (B, T, D) to (B, S, D); `mask` is broadcastable to (B, T, S)."""
        check_sequence(x, self.width, "a sequence")
        check_sequence(
            memory,
            self.key_value.in_features,
            "a memory",
            f"build the attention with memory_width={memory.size(-1)}",
        )
        check_same_batch(x, memory, 1, "a sequence and its memory")
        check_mask(mask, memory.size(0), x.size(1), memory.size(1))
        packed_query, packed_key_value = self.query(x), self.key_value(memory)
        found = self._attend_packed(packed_query, packed_key_value, mask=mask)
        return (
            self._attend_projected(packed_query, self._prepared(packed_key_value), mask=mask)
            if found is None
            else found
        )

    def read(self, x: Tensor, prepared: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend to what `prepare` made; several rows may share a sentence: (B * K, T, D) to (B, 2, G, S, Dh).

        Rows that share one are a longer query to it, so its keys and values are neither copied nor read K times.
        """
        return self._attend_projected(self.query(x), prepared, mask=mask)

    def _attend_projected(
        self, packed_query: Tensor, prepared: Tensor, *, mask: Tensor | None
    ) -> Tensor:
        sentences, shape = prepared.size(0), packed_query.shape
        if self.hooks is not None and sentences != shape[0]:  # notes are by row
            prepared = prepared.repeat_interleave(shape[0] // sentences, dim=0)
            mask = (
                mask
                if mask is None or mask.size(0) == 1
                else mask.repeat_interleave(shape[0] // sentences, dim=0)
            )
            sentences = shape[0]
        query = self.split(packed_query.view(sentences, -1, self.inner), 1)[:, 0]
        query = query if self.query_norm is None else _normalize_heads(self.query_norm, query)
        key, value = prepared.unbind(1)
        return self.attend_heads(query, key, value, mask=mask).view(shape[0], shape[1], self.width)


def _normalize_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise heads in the type of the norm's weights: under autocast, queries and keys come in half of it."""
    return norm(x.to(next(norm.parameters()).dtype)).to(x.dtype)


def _mix_heads(matrix: Tensor | None, x: Tensor) -> Tensor:
    """Let heads of (B, H, T, S) talk, by a matrix (H, H)."""
    return x if matrix is None else torch.einsum("gh,bhts->bgts", matrix.to(x.dtype), x)


@functools.cache
def _warn_not_fused(score: str) -> None:
    """Tell once a score that it has no fused kernel."""
    logger.warning(
        "%s has no fused kernel inside multi-head attention: it is slower; use scaled_dot to be rid of this",
        score,
    )
