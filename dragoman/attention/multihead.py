"""Multi-head attention: several small attentions side by side, for a sequence to itself and to another one."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention import masks
from dragoman.attention.checks import check_heads, check_mask, check_sequence, check_together
from dragoman.attention.positions import Within
from dragoman.attention.recording import Note, Watched
from dragoman.attention.scores import ScaledDotScore, Score
from dragoman.attention.window import attend_near, pays
from dragoman.kernels import attend, attend_packed, masked_softmax, visibility

logger = logging.getLogger(__name__)


class Projected(NamedTuple):
    """What a sequence asks, and what it answers with."""

    query: Tensor  # (B, H, T, Dh)
    key_value: Tensor  # (B, 2, G, T, Dh), as a cache keeps them


class Reach(NamedTuple):
    """Where queries may look, what distance adds to their scores, and what they meet the keys with."""

    query: Tensor  # (B, H, T, Dh)
    mask: Tensor | None  # broadcastable to (B, T, S)
    bias: Tensor | None  # broadcastable to (B, H, T, S)


class MultiHead(Watched):
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
        talking: bool = False,
        score: Score | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_heads(width, heads, head_width=head_width, kv_heads=kv_heads)
        self.width, self.heads, self.head_width = width, heads, head_width or width // heads
        self.kv_heads = kv_heads or heads
        self.inner, self.kv_inner = heads * self.head_width, self.kv_heads * self.head_width
        self.score = ScaledDotScore(query_width=self.head_width, key_width=self.head_width) if score is None else score
        self.dropout = dropout
        self.output = nn.Linear(self.inner, width, bias=bias)  # W^O
        self.query_norm = None if norms is None else norms[0]
        self.key_norm = None if norms is None else norms[1]
        # The identity, with which heads start as if they did not talk; the paper's own first values are not given in its text.
        self.mix_scores = nn.Parameter(torch.eye(heads)) if talking else None  # P_l
        self.mix_weights = nn.Parameter(torch.eye(heads)) if talking else None  # P_w
        self.fused = self.score.fused and not talking
        if not self.score.fused:
            _say_plain(type(self.score).__name__)

    def look(
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
            key, value = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (key, value))
        dropout = self.dropout if self.training else 0.0
        if radius:
            context = attend_near(query, key, value, radius=radius, mask=mask, causal=causal, dropout=dropout)
        elif self.watch is None and self.fused:
            context = attend(query, key, value, mask=mask, causal=causal, dropout=dropout, bias=bias)
        else:
            context = self._look_plainly(query, key, value, mask, causal, dropout, bias)
        return self.output(context.transpose(1, 2).flatten(2))

    def _look_packed(self, asking: Tensor, told: Tensor | None, *, mask: Tensor | None, causal: bool = False) -> Tensor | None:
        """Attend straight from the products where nothing is done to heads one by one: (B, T, D), or None."""
        if self.watch is not None or not self.fused or self.kv_heads != self.heads or self.key_norm is not None:
            return None
        dropout = self.dropout if self.training else 0.0
        context = attend_packed(asking, told, heads=self.heads, mask=mask, causal=causal, dropout=dropout)
        return None if context is None else self.output(context)

    def _look_plainly(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, bias: Tensor | None
    ) -> Tensor:
        """Attend step by step, with any score, for whoever watches."""
        scores = self.score(query, self.score.prepare(key))  # (B, H, T, S)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        scores = _mixed(self.mix_scores, scores)  # before anything is hidden, which no head may tell another
        weights = masked_softmax(scores, visibility(query.size(-2), key.size(-2), mask, causal, query.device))
        weights = _mixed(self.mix_weights, weights)
        weights = F.dropout(self.edited(weights), dropout, training=dropout > 0)
        context = weights @ value
        self.noted(Note(weights, value, context))
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
        talking: bool = False,
        score: Score | None = None,
        within: Within | None = None,
        window: int = 0,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        shape: dict[str, Any] = {"head_width": head_width, "kv_heads": kv_heads, "norms": norms, "talking": talking, "score": score}
        super().__init__(width, heads, **shape, dropout=dropout, bias=bias)
        self.query_key_value = nn.Linear(width, self.inner + 2 * self.kv_inner, bias=bias)  # W^Q, W^K and W^V, one below the other
        self.within, self.window = within, window
        self.turns = within is not None and not within.biased
        self.measures = bool(window) or (within is not None and within.biased)  # whether it needs distances

    def project(self, x: Tensor, *, first: int = 0, places: Tensor | None = None) -> Projected:
        """Make queries, keys and values of (B, T, D), placed consecutively from `first`, or at places (B, T) below first + T."""
        query, key_value = self.query_key_value(x).split([self.inner, 2 * self.kv_inner], dim=-1)
        query, key_value = self.split(query, 1).squeeze(1), self.split(key_value, 2)
        if not self.turns and self.key_norm is None:
            return Projected(query, key_value)
        key, value = key_value.unbind(1)
        query, key = self._place(query, key, first, places)
        return Projected(query, torch.stack([key, value], dim=1))

    def reach(self, query: Tensor, mask: Tensor | None, query_places: Tensor, key_places: Tensor) -> Reach:
        """Add to a mask what places (..., T) and (..., S) hide, and give what they add to the scores of queries (B, H, T, Dh)."""
        distance = key_places.unsqueeze(-2) - query_places.unsqueeze(-1)
        mask = masks.both(mask, distance.abs() <= self.window) if self.window else mask
        if self.within is None or not self.within.biased:
            return Reach(query, mask, None)
        return Reach(self.within.ask(query), mask, self.within.bias(distance, query))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False, places: Tensor | None = None) -> Tensor:
        """Attend from (B, T, D) to itself; `mask` is broadcastable to (B, T, T); `places` (B, T) where they are not 0 to T - 1."""
        check_sequence(x, self.width, "a sequence")
        check_mask(mask, x.size(0), x.size(1), x.size(1))
        packed = self.query_key_value(x)
        found = None if self.turns or self.measures else self._look_packed(packed, None, mask=mask, causal=causal)
        if found is not None:
            return found
        parts = packed.split([self.inner, self.kv_inner, self.kv_inner], dim=-1)
        query, key, value = (self.split(part, 1).squeeze(1) for part in parts)
        query, key = self._place(query, key, 0, places)
        if self._goes_by_blocks(x.size(1), mask, places):
            return self.look(query, key, value, mask=mask, causal=causal, radius=self.window)
        bias = None
        if self.measures:
            places = torch.arange(x.size(1), device=x.device) if places is None else places
            query, mask, bias = self.reach(query, mask, places, places)
        return self.look(query, key, value, mask=mask, causal=causal, bias=bias)

    def _goes_by_blocks(self, length: int, mask: Tensor | None, places: Tensor | None) -> bool:
        """Say whether a window is worth cutting the sequence up, and nothing asks for all pairs of positions."""
        biased = self.within is not None and self.within.biased
        if not self.window or biased or self.watch is not None or not self.fused or places is not None:
            return False
        return pays(length, self.window) and (mask is None or mask.size(-2) == 1)  # sentences packed in a row have a mask for each pair

    def _place(self, query: Tensor, key: Tensor, first: int, places: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys, then turn them, where that is asked for."""
        if self.query_norm is not None and self.key_norm is not None:
            query, key = _normed(self.query_norm, query), _normed(self.key_norm, key)
        if self.turns and self.within is not None:
            query, key = (self.within.turn(part, places, first=first) for part in (query, key))
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
        talking: bool = False,
        score: Score | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        shape: dict[str, Any] = {"head_width": head_width, "kv_heads": kv_heads, "norms": norms, "talking": talking, "score": score}
        super().__init__(width, heads, **shape, dropout=dropout, bias=bias)
        self.query = nn.Linear(width, self.inner, bias=bias)  # W^Q
        self.key_value = nn.Linear(width if memory_width is None else memory_width, 2 * self.kv_inner, bias=bias)  # W^K above W^V

    def prepare(self, memory: Tensor) -> Tensor:
        """Make keys and values of (B, S, D): (B, 2, G, S, Dh)."""
        return self._prepared(self.key_value(memory))

    def _prepared(self, key_value: Tensor) -> Tensor:
        key_value = self.split(key_value, 2)
        if self.key_norm is None:
            return key_value
        key, value = key_value.unbind(1)
        return torch.stack([_normed(self.key_norm, key), value], dim=1)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend from (B, T, D) to (B, S, D); `mask` is broadcastable to (B, T, S)."""
        check_sequence(x, self.width, "a sequence")
        check_sequence(memory, self.key_value.in_features, "a memory", f"build the attention with memory_width={memory.size(-1)}")
        check_together(x, memory, 1, "a sequence and its memory")
        check_mask(mask, memory.size(0), x.size(1), memory.size(1))
        asking, told = self.query(x), self.key_value(memory)
        found = self._look_packed(asking, told, mask=mask)
        return self._read(asking, self._prepared(told), mask=mask) if found is None else found

    def read(self, x: Tensor, prepared: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend to what `prepare` made; several rows may share a sentence: (B * K, T, D) to (B, 2, G, S, Dh).

        Rows that share one are a longer query to it, so its keys and values are neither copied nor read K times.
        """
        return self._read(self.query(x), prepared, mask=mask)

    def _read(self, asking: Tensor, prepared: Tensor, *, mask: Tensor | None) -> Tensor:
        sentences, shape = prepared.size(0), asking.shape
        if self.watch is not None and sentences != shape[0]:  # notes are by row
            prepared = prepared.repeat_interleave(shape[0] // sentences, dim=0)
            mask = mask if mask is None or mask.size(0) == 1 else mask.repeat_interleave(shape[0] // sentences, dim=0)
            sentences = shape[0]
        query = self.split(asking.view(sentences, -1, self.inner), 1)[:, 0]
        query = query if self.query_norm is None else _normed(self.query_norm, query)
        key, value = prepared.unbind(1)
        return self.look(query, key, value, mask=mask).view(shape[0], shape[1], self.width)


def _normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise heads in the type of the norm's weights: under autocast, queries and keys come in half of it."""
    return norm(x.to(next(norm.parameters()).dtype)).to(x.dtype)


def _mixed(matrix: Tensor | None, x: Tensor) -> Tensor:
    """Let heads of (B, H, T, S) talk, by a matrix (H, H)."""
    return x if matrix is None else torch.einsum("gh,bhts->bgts", matrix.to(x.dtype), x)


@functools.cache
def _say_plain(score: str) -> None:
    """Tell once a score that it has no fused kernel."""
    logger.warning("%s has no fused kernel inside multi-head attention: it is slower; use scaled_dot to be rid of this", score)
