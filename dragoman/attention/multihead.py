"""Multi-head attention: several small attentions side by side, for a sequence to itself and to another one."""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.positions import Within
from dragoman.attention.recording import Note, Watched
from dragoman.attention.scores import ScaledDotScore, Score
from dragoman.errors import DragomanError
from dragoman.kernels import attend, masked_softmax, visibility

logger = logging.getLogger(__name__)


class Projected(NamedTuple):
    """What a sequence asks, and what it answers with."""

    query: Tensor  # (B, H, T, Dh)
    key_value: Tensor  # (B, 2, H, T, Dh), as a cache keeps them


class MultiHead(Watched):
    r"""What attention with heads has in common: looking, and joining what the heads found.

    .. math:: \mathrm{MultiHead} = [\mathrm{head}_1; \dots; \mathrm{head}_H]\, W^O

    Vaswani et al. (2017), section 3.2.2.
    """

    def __init__(self, width: int, heads: int, *, score: Score | None = None, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise DragomanError("heads must divide the width", found=f"{heads} heads and width {width}", fix="change one of them")
        self.width, self.heads, self.head_width = width, heads, width // heads
        self.score = ScaledDotScore(query_width=self.head_width, key_width=self.head_width) if score is None else score
        self.dropout = dropout
        self.output = nn.Linear(width, width, bias=bias)  # W^O
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
    ) -> Tensor:
        """Attend from (B, H, T, Dh) to (B, H, S, Dh) and join the heads: (B, T, D).

        `bias`, broadcastable to (B, H, T, S), is added to the scores.
        """
        dropout = self.dropout if self.training else 0.0
        if self.watch is None and self.score.fused:
            context = attend(query, key, value, mask=mask, causal=causal, dropout=dropout, bias=bias)
        else:
            context = self._look_plainly(query, key, value, mask, causal, dropout, bias)
        return self.output(context.transpose(1, 2).flatten(2))

    def _look_plainly(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, dropout: float, bias: Tensor | None
    ) -> Tensor:
        """Attend step by step, with any score, for whoever watches."""
        scores = self.score(query, self.score.prepare(key))  # (B, H, T, S)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        weights = masked_softmax(scores, visibility(query.size(-2), key.size(-2), mask, causal, query.device))
        weights = F.dropout(self.edited(weights), dropout, training=dropout > 0)
        context = weights @ value
        self.noted(Note(weights, value, context))
        return context

    def split(self, x: Tensor, parts: int) -> Tensor:
        """Cut projections (B, T, parts * D) into heads: (B, parts, H, T, Dh)."""
        return x.view(x.size(0), x.size(1), parts, self.heads, self.head_width).permute(0, 2, 3, 1, 4)


class SelfAttention(MultiHead):
    """A sequence attends to itself; one product makes queries, keys and values.

    `within` tells places inside attention: by turning queries and keys, or by a term added to the scores.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        score: Score | None = None,
        within: Within | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width, heads, score=score, dropout=dropout, bias=bias)
        self.query_key_value = nn.Linear(width, 3 * width, bias=bias)  # W^Q, W^K and W^V, one below the other
        self.within = within

    def project(self, x: Tensor, *, first: int = 0, places: Tensor | None = None) -> Projected:
        """Make queries, keys and values of (B, T, D), placed consecutively from `first`, or at places (B, T) below first + T."""
        heads = self.split(self.query_key_value(x), 3)  # (B, 3, H, T, Dh)
        query, key_value = heads[:, 0], heads[:, 1:]
        if self.within is None or self.within.biased:
            return Projected(query, key_value)
        key, value = key_value.unbind(1)
        query, key = (self.within.turn(part, places, first=first) for part in (query, key))
        return Projected(query, torch.stack([key, value], dim=1))

    def bias(self, query_places: Tensor, key_places: Tensor) -> Tensor | None:
        """Give what places (..., T) and (..., S) add to the scores, broadcastable to (B, H, T, S); None for nothing."""
        if self.within is None or not self.within.biased:
            return None
        return self.within.bias(key_places.unsqueeze(-2) - query_places.unsqueeze(-1))

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False, places: Tensor | None = None) -> Tensor:
        """Attend from (B, T, D) to itself; `mask` is broadcastable to (B, T, T); `places` (B, T) where they are not 0 to T - 1."""
        query, key_value = self.project(x, places=places)
        key, value = key_value.unbind(1)
        bias = None
        if self.within is not None:
            places = torch.arange(x.size(1), device=x.device) if places is None else places
            bias = self.bias(places, places)
        return self.look(query, key, value, mask=mask, causal=causal, bias=bias)


class CrossAttention(MultiHead):
    """A sequence attends to another, whose keys and values are made once."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        memory_width: int | None = None,
        score: Score | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(width, heads, score=score, dropout=dropout, bias=bias)
        self.query = nn.Linear(width, width, bias=bias)  # W^Q
        self.key_value = nn.Linear(width if memory_width is None else memory_width, 2 * width, bias=bias)  # W^K above W^V

    def prepare(self, memory: Tensor) -> Tensor:
        """Make keys and values of (B, S, D): (B, 2, H, S, Dh)."""
        return self.split(self.key_value(memory), 2)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend from (B, T, D) to (B, S, D); `mask` is broadcastable to (B, T, S)."""
        return self.read(x, self.prepare(memory), mask=mask)

    def read(self, x: Tensor, prepared: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Attend to what `prepare` made; several rows may share a sentence: (B * K, T, D) to (B, 2, H, S, Dh).

        Rows that share one are a longer query to it, so its keys and values are neither copied nor read K times.
        """
        sentences, shape = prepared.size(0), x.shape
        if self.watch is not None and sentences != shape[0]:  # notes are by row
            prepared = prepared.repeat_interleave(shape[0] // sentences, dim=0)
            mask = mask if mask is None or mask.size(0) == 1 else mask.repeat_interleave(shape[0] // sentences, dim=0)
            sentences = shape[0]
        query = self.split(self.query(x).view(sentences, -1, self.width), 1)[:, 0]
        key, value = prepared.unbind(1)
        return self.look(query, key, value, mask=mask).view(shape)


@functools.cache
def _say_plain(score: str) -> None:
    """Tell once a score that it has no fused kernel."""
    logger.warning("%s has no fused kernel inside multi-head attention: it is slower; use scaled_dot to be rid of this", score)
