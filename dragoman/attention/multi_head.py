"""Multi-head attention: self-attention and cross-attention.

The keys and values of a memory are projected by `CrossAttention.prepare`; `TransformerLayer.start`
in `models/transformer_blocks.py` keeps them for a sentence.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention import masks
from dragoman.attention.absolute_position_encodings import RelativePosition
from dragoman.attention.argument_checks import (
    check_heads,
    check_mask,
    check_same_batch,
    check_sequence,
)
from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.attention.score_functions import ScaledDotScore, Score
from dragoman.ops import (
    attend,
    attend_packed,
    build_attention_mask,
    masked_softmax,
    shift_causal,
)

logger = logging.getLogger(__name__)


class ProjectedQKV(NamedTuple):
    """The projections of a sequence, split into heads."""

    query: Tensor  # (B, H, T, Dh)
    key_value: Tensor  # (B, 2, G, T, Dc), the layout of the KV cache


class RelativeTerms(NamedTuple):
    """The query, the mask, and the terms of relative positions in the scores: one of two forms."""

    query: Tensor  # (B, H, T, Dh)
    mask: Tensor | None  # broadcastable to (B, T, S)
    bias: Tensor | None = None  # by key, broadcastable to (B, H, T, S)
    distance_scores: Tensor | None = None  # by distance, (B, H, T, S)


class MultiHead(RecordableAttention):
    r"""Base of multi-head self- and cross-attention.

    .. math:: \mathrm{MultiHead} = [\mathrm{head}_1; \dots; \mathrm{head}_H]\, W^O

    Vaswani et al. (2017), section 3.2.2. A head is width / heads wide, or `head_width`
    (Bhojanapalli et al. 2020). With fewer `kv_heads`, G, groups of heads share keys and values
    (grouped-query attention, Ainslie et al. 2023). `norms` normalize queries and keys (Henry et al.
    2020, Dehghani et al. 2023). Values may have another width than queries and keys, `value_width`,
    the paper's d_v apart from d_k. The KV cache then has the larger of the two, Dc, and zeros fill
    the other.

    With `talking_heads` the heads mix their scores before the softmax and their weights after it,
    by trained H x H matrices:

    .. math:: W = P_w\, \mathrm{softmax}(P_l\, Q K^\top / \sqrt{d_h})

    Shazeer et al. (2020). Recorded weights are the mixed ones, so a row need not sum to one.
    """

    cuda_graphs = False  # whether CUDA graphs replay this layer; set by the trainer

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int = 0,
        value_width: int = 0,
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
        self.value_width = value_width or self.head_width
        self.cache_width = max(self.head_width, self.value_width)
        self.kv_heads = kv_heads or heads
        self.inner = heads * self.head_width  # of all queries
        # Of all keys and of all values: columns of their projections.
        self.kv_inner, self.value_inner = (
            self.kv_heads * self.head_width,
            self.kv_heads * self.value_width,
        )
        self.score = (
            ScaledDotScore(query_width=self.head_width, key_width=self.head_width)
            if score is None
            else score
        )
        self.dropout = dropout
        self.output = nn.Linear(heads * self.value_width, width, bias=bias)  # W^O
        self.query_norm = None if norms is None else norms[0]
        self.key_norm = None if norms is None else norms[1]
        # Identity at first, as if heads did not mix; the paper does not state its initialization.
        self.mix_scores = nn.Parameter(torch.eye(heads)) if talking_heads else None  # P_l
        self.mix_weights = nn.Parameter(torch.eye(heads)) if talking_heads else None  # P_w
        self.fused = self.score.fused and not talking_heads
        # Whether nothing but scaled dot products happens between the projections.
        self.is_plain = (
            self.fused
            and self.kv_heads == self.heads
            and self.value_width == self.head_width
            and norms is None
        )
        if not self.score.fused:
            _warn_not_fused(type(self.score).__name__)

    @property
    def active_dropout(self) -> float:
        """The dropout probability of the attention weights; 0 in evaluation."""
        return self.dropout if self.training else 0.0

    def attend_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        bias: Tensor | None = None,
        distance_scores: Tensor | None = None,
        window: int = 0,
    ) -> Tensor:
        """Attend from (B, H, T, Dh) to (B, G, S, Dh), concatenate the heads and project: (B, T, D).

        The arguments are those of `ops.attend`. Keys and values may have the width of the cache.
        """
        return self.output(
            self._concat_contexts(
                query,
                key,
                value,
                mask=mask,
                causal=causal,
                bias=bias,
                distance_scores=distance_scores,
                window=window,
            )
        )

    def _concat_contexts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        bias: Tensor | None = None,
        distance_scores: Tensor | None = None,
        window: int = 0,
    ) -> Tensor:
        """Attend as `attend_heads` does; return the concatenated heads: (B, T, H Dv)."""
        if self.value_width != self.head_width:
            key, value = key[..., : self.head_width], value[..., : self.value_width]
        if self.kv_heads != self.heads:
            key, value = (
                part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (key, value)
            )
        if self.hooks is None and self.fused:
            context = attend(
                query,
                key,
                value,
                mask=mask,
                causal=causal,
                dropout=self.active_dropout,
                bias=bias,
                distance_scores=distance_scores,
                window=window,
                cuda_graphs=self.cuda_graphs,
            )
        else:
            if distance_scores is not None:
                bias = shift_causal(distance_scores)
            if window:
                near = masks.local(query.size(-2), radius=window, device=query.device)
                mask = masks.combine(mask, near)
            context = self._attend_with_weights(query, key, value, mask, causal, bias)
        return context.transpose(1, 2).flatten(2)

    def _attend_with_weights(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        bias: Tensor | None,
    ) -> Tensor:
        """Attend step by step, for any score, with weights that can be recorded and edited."""
        scores = self.score(query, self.score.prepare(key))  # (B, H, T, S)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        scores = _mix_heads(self.mix_scores, scores)  # before masking: masked scores must not mix
        weights = masked_softmax(
            scores, build_attention_mask(query.size(-2), key.size(-2), mask, causal, query.device)
        )
        weights = self.apply_edits(_mix_heads(self.mix_weights, weights))
        weights = F.dropout(weights, self.active_dropout, training=self.active_dropout > 0)
        context = weights @ value
        self.emit_record(AttentionRecord(weights, value, context))
        return context

    def split(self, x: Tensor, parts: int) -> Tensor:
        """Split projections (B, T, parts * n * Dh) into heads: (B, parts, n, T, Dh)."""
        return x.view(x.size(0), x.size(1), parts, -1, self.head_width).permute(0, 2, 3, 1, 4)

    def split_key_value(self, x: Tensor) -> Tensor:
        """Split projected keys and values (B, T, G (Dh + Dv)) into heads: (B, 2, G, T, Dc)."""
        if self.value_width == self.head_width:
            return self.split(x, 2)
        parts = torch.split(x, [self.kv_inner, self.value_inner], dim=-1)
        return self.stack_key_value(
            *(part.view(*x.shape[:2], self.kv_heads, -1).transpose(1, 2) for part in parts)
        )

    def stack_key_value(self, key: Tensor, value: Tensor) -> Tensor:
        """Return keys (B, G, T, Dh) and values (B, G, T, Dv) as in the cache: (B, 2, G, T, Dc)."""
        if self.value_width != self.head_width:
            key, value = (
                F.pad(part, (0, self.cache_width - part.size(-1))) for part in (key, value)
            )
        return torch.stack([key, value], dim=1)


class SelfAttention(MultiHead):
    """Multi-head self-attention; one linear layer projects queries, keys and values.

    `relative_position` encodes positions inside attention, by rotating queries and keys or by a
    bias on the scores. A `window` restricts each position to those at most so far away (Vaswani et
    al. 2017, section 4).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int = 0,
        value_width: int = 0,
        kv_heads: int = 0,
        norms: tuple[nn.Module, nn.Module] | None = None,
        talking_heads: bool = False,
        score: Score | None = None,
        relative_position: RelativePosition | None = None,
        window: int = 0,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        shape: dict[str, Any] = {
            "head_width": head_width,
            "value_width": value_width,
            "kv_heads": kv_heads,
            "norms": norms,
            "talking_heads": talking_heads,
            "score": score,
        }
        super().__init__(width, heads, **shape, dropout=dropout, bias=bias)
        # W^Q, W^K and W^V, one below the other.
        self.query_key_value = nn.Linear(
            width, self.inner + self.kv_inner + self.value_inner, bias=bias
        )
        self.relative_position, self.window = relative_position, window
        self.has_bias = relative_position is not None and relative_position.has_bias
        self.rotates = relative_position is not None and not relative_position.has_bias
        self.needs_distances = bool(window) or self.has_bias
        self.is_plain = self.is_plain and relative_position is None and not window

    def project(self, x: Tensor, *, first: int = 0) -> ProjectedQKV:
        """Return queries, keys and values of (B, T, D) at positions first to first + T - 1."""
        sizes = [self.inner, self.kv_inner + self.value_inner]
        query, key_value = self.query_key_value(x).split(sizes, dim=-1)
        query, key_value = self.split(query, 1).squeeze(1), self.split_key_value(key_value)
        if not self.rotates and self.key_norm is None:
            return ProjectedQKV(query, key_value)
        key, value = key_value.unbind(1)
        query, key = self._normalize_and_rotate(query, key[..., : self.head_width], first)
        return ProjectedQKV(query, self.stack_key_value(key, value))

    def relative_terms(
        self, query: Tensor, mask: Tensor | None, query_positions: Tensor, key_positions: Tensor
    ) -> RelativeTerms:
        """Return query, mask and bias for queries (B, H, T, Dh) at positions (..., T)."""
        distance = key_positions.unsqueeze(-2) - query_positions.unsqueeze(-1)
        mask = masks.combine(mask, distance.abs() <= self.window) if self.window else mask
        if self.relative_position is None or not self.relative_position.has_bias:
            return RelativeTerms(query, mask)
        return RelativeTerms(
            self.relative_position.shift_query(query),
            mask,
            self.relative_position.bias(distance, query),
        )

    def causal_terms(self, query: Tensor, mask: Tensor | None, keys: int) -> RelativeTerms:
        """Return the terms for queries (B, H, T, Dh), the last T of `keys` positions."""
        if self.window:
            positions = torch.arange(keys, device=query.device)
            back = positions[keys - query.size(-2) :].unsqueeze(-1) - positions
            mask = masks.combine(mask, back <= self.window)
        if self.relative_position is None or not self.relative_position.has_bias:
            return RelativeTerms(query, mask)
        shifted = self.relative_position.shift_query(query)
        if self.relative_position.scores_distances:
            scores = self.relative_position.distance_scores(query, keys)
            return RelativeTerms(shifted, mask, distance_scores=scores)
        return RelativeTerms(shifted, mask, self.relative_position.causal_bias(query, keys))

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        prefix: int = 0,
        previous: Tensor | None = None,
    ) -> Tensor:
        """Attend from (B, T, D) to itself; `mask` is broadcastable to (B, T, T).

        With `causal` the first `prefix` positions are visible to all: see `masks.prefix`. Then the
        mask hides keys, (B, 1, T). With `previous`, hidden states (B, M, D) of earlier segments,
        attend to them too; the mask then covers M + T positions.
        """
        check_sequence(x, self.width, "a sequence")
        if previous is not None:
            return self._attend_segment(x, previous, mask=mask, causal=causal)
        check_mask(mask, x.size(0), x.size(1), x.size(1))
        packed = self.query_key_value(x)
        if self.is_plain and self.hooks is None and not prefix:
            context = attend_packed(
                packed,
                None,
                heads=self.heads,
                mask=mask,
                causal=causal,
                dropout=self.active_dropout,
                cuda_graphs=self.cuda_graphs,
            )
            return self.output(context)
        parts = packed.split([self.inner, self.kv_inner, self.value_inner], dim=-1)
        query, key = (self.split(part, 1).squeeze(1) for part in parts[:2])
        value = parts[2].view(*x.shape[:2], self.kv_heads, -1).transpose(1, 2)
        query, key = self._normalize_and_rotate(query, key, 0)
        if prefix:
            return self._attend_with_prefix(query, key, value, mask, prefix)
        if not self.has_bias:
            return self.attend_heads(
                query, key, value, mask=mask, causal=causal, window=self.window
            )
        if causal:
            terms = self.causal_terms(query, mask, x.size(1))
        else:
            positions = torch.arange(x.size(1), device=x.device)
            terms = self.relative_terms(query, mask, positions, positions)
        return self.attend_with_terms(terms, key, value, causal=causal)

    def _attend_segment(
        self, x: Tensor, previous: Tensor, *, mask: Tensor | None, causal: bool
    ) -> Tensor:
        """Attend from (B, T, D) to hidden states (B, M, D) of earlier segments and to itself."""
        assert causal, "only a causal layer continues earlier segments"
        memory, keys = previous.size(1), previous.size(1) + x.size(1)
        check_mask(mask, x.size(0), x.size(1), keys)
        weight, bias = self.query_key_value.weight, self.query_key_value.bias
        biases = (None, None) if bias is None else (bias[: self.inner], bias[self.inner :])
        query = self.split(F.linear(x, weight[: self.inner], biases[0]), 1).squeeze(1)
        # Concatenated before the projection, which is twice as wide.
        both = torch.cat([previous, x], dim=1)
        key_value = self.split_key_value(F.linear(both, weight[self.inner :], biases[1]))
        key, value = key_value.unbind(1)
        key = key[..., : self.head_width]
        if self.query_norm is not None and self.key_norm is not None:
            query = _normalize_heads(self.query_norm, query)
            key = _normalize_heads(self.key_norm, key)
        if self.rotates and self.relative_position is not None:
            query = self.relative_position.rotate(query, None, first=memory)
            key = self.relative_position.rotate(key, None)
        return self.attend_with_terms(self.causal_terms(query, mask, keys), key, value, causal=True)

    def attend_with_terms(
        self, terms: RelativeTerms, key: Tensor, value: Tensor, *, causal: bool
    ) -> Tensor:
        """Attend with the terms of relative positions and project: (B, T, D)."""
        return self.attend_heads(
            terms.query,
            key,
            value,
            mask=terms.mask,
            causal=causal,
            bias=terms.bias,
            distance_scores=terms.distance_scores,
        )

    def _attend_with_prefix(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, prefix: int
    ) -> Tensor:
        """Attend under `masks.prefix` from (B, H, T, Dh), `mask` hiding keys: (B, T, D).

        As two attentions without a mask of T x T, which have faster kernels: from the prefix to
        itself, and causally from the rest to all.
        """
        if self.hooks is not None or not self.fused:
            visible = masks.prefix(prefix, query.size(2), device=query.device)
            return self.attend_heads(query, key, value, mask=masks.combine(mask, visible))
        before, after = torch.split(query, [prefix, query.size(2) - prefix], dim=2)
        contexts = [
            self._concat_contexts(
                before,
                key[:, :, :prefix],
                value[:, :, :prefix],
                mask=None if mask is None else mask[..., :prefix],
                causal=False,
            ),
            self._concat_contexts(after, key, value, mask=mask, causal=True),
        ]
        return self.output(torch.cat(contexts, dim=1))

    def _normalize_and_rotate(
        self, query: Tensor, key: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """Apply query and key norms and the rotary embedding, if there are any."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key = (
                _normalize_heads(self.query_norm, query),
                _normalize_heads(self.key_norm, key),
            )
        if self.rotates and self.relative_position is not None:
            query, key = (
                self.relative_position.rotate(part, None, first=first) for part in (query, key)
            )
        return query, key


class CrossAttention(MultiHead):
    """Multi-head cross-attention; keys and values of the memory are projected once."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        memory_width: int | None = None,
        head_width: int = 0,
        value_width: int = 0,
        kv_heads: int = 0,
        norms: tuple[nn.Module, nn.Module] | None = None,
        talking_heads: bool = False,
        score: Score | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        shape: dict[str, Any] = {
            "head_width": head_width,
            "value_width": value_width,
            "kv_heads": kv_heads,
            "norms": norms,
            "talking_heads": talking_heads,
            "score": score,
        }
        super().__init__(width, heads, **shape, dropout=dropout, bias=bias)
        memory_width = width if memory_width is None else memory_width
        self.query = nn.Linear(width, self.inner, bias=bias)  # W^Q
        # W^K above W^V
        self.key_value = nn.Linear(memory_width, self.kv_inner + self.value_inner, bias=bias)

    def prepare(self, memory: Tensor) -> Tensor:
        """Project the memory (B, S, D) to keys and values: (B, 2, G, S, Dc)."""
        return self._split_key_value(self.key_value(memory))

    def _split_key_value(self, packed_key_value: Tensor) -> Tensor:
        """Split (B, S, G (Dh + Dv)) into heads and normalize the keys: (B, 2, G, S, Dc)."""
        key_value = self.split_key_value(packed_key_value)
        if self.key_norm is None:
            return key_value
        key, value = key_value.unbind(1)
        return self.stack_key_value(
            _normalize_heads(self.key_norm, key[..., : self.head_width]), value
        )

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
        if self.is_plain and self.hooks is None:
            context = attend_packed(
                packed_query,
                packed_key_value,
                heads=self.heads,
                mask=mask,
                dropout=self.active_dropout,
                cuda_graphs=self.cuda_graphs,
            )
            return self.output(context)
        key_value = self._split_key_value(packed_key_value)
        return self._attend_projected(packed_query, key_value, mask=mask)

    def attend_prepared(self, x: Tensor, prepared: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend from (B, T, D) to what `prepare` returned, (B, 2, G, S, Dc).

        Several rows may share a sentence, as beams do: (B * K, T, D). They become a longer query,
        so that keys and values are neither copied nor read K times.
        """
        return self._attend_projected(self.query(x), prepared, mask=mask)

    def _attend_projected(
        self, packed_query: Tensor, prepared: Tensor, *, mask: Tensor | None
    ) -> Tensor:
        """Attend from projected queries (B, T, H Dh) to (B, 2, G, S, Dc)."""
        sentences, shape = prepared.size(0), packed_query.shape
        if self.hooks is not None and sentences != shape[0]:  # records have one row each
            prepared = prepared.repeat_interleave(shape[0] // sentences, dim=0)
            if mask is not None and mask.size(0) != 1:
                mask = mask.repeat_interleave(shape[0] // sentences, dim=0)
            sentences = shape[0]
        query = self.split(packed_query.view(sentences, -1, self.inner), 1)[:, 0]
        query = query if self.query_norm is None else _normalize_heads(self.query_norm, query)
        key, value = prepared.unbind(1)
        return self.attend_heads(query, key, value, mask=mask).view(shape[0], shape[1], self.width)


def _normalize_heads(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalize heads in the dtype of the norm's weights: autocast projects to half precision."""
    return norm(x.to(next(norm.parameters()).dtype)).to(x.dtype)


def _mix_heads(matrix: Tensor | None, x: Tensor) -> Tensor:
    """Mix the heads of (B, H, T, S) by a matrix (H, H)."""
    return x if matrix is None else torch.einsum("gh,bhts->bgts", matrix.to(x.dtype), x)


@functools.cache
def _warn_not_fused(score: str) -> None:
    """Warn once for each score that it has no fused kernel."""
    logger.warning(
        "%s has no fused kernel in multi-head attention and is slower; use scaled_dot instead",
        score,
    )
