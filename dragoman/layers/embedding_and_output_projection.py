"""Token embeddings, the input of a stack, and the output projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops
from dragoman.attention.absolute_position_encodings import Positions


class Embedding(nn.Module):
    r"""Token embeddings, multiplied by a scale.

    The scale is the square root of the width if the matrix is also the output projection: that
    needs small weights, the stack needs inputs as large as the positions (Vaswani et al. 2017,
    section 3.4).

    With an `embedding_width` E the table is (V, E), followed by a projection to D: V E + E D
    parameters instead of V D, as in ALBERT (Lan et al. 2020). With `fix_norm` every vector has
    length one, and the scale is trained:

    .. math:: g\, w / \lVert w \rVert

    FixNorm, Nguyen and Salazar (2019). Their released code fixes g at the square root of the width,
    where ours starts. In the output projection vectors have length one in both, and the last norm
    scales the logits (ScaleNorm's parameter, in the paper).
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        scale: float = 1.0,
        embedding_width: int = 0,
        fix_norm: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, embedding_width or width))
        nn.init.normal_(self.weight, std=(embedding_width or width) ** -0.5)
        self.up_proj = nn.Linear(embedding_width, width, bias=False) if embedding_width else None
        self.length = nn.Parameter(torch.full((1,), scale)) if fix_norm else None  # g
        self.scale = 1.0 if fix_norm else scale

    @property
    def matrix(self) -> Tensor:
        """Return the table (V, E) that a tied output projection uses."""
        return self.weight if self.length is None else _unit_norm(self.weight)

    def forward(self, ids: Tensor, *, drop: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Embed token ids (B, T): (B, T, D); `drop` acts on their vectors (B, T, E)."""
        embedded = F.embedding(ids, self.weight)
        if self.length is not None:
            embedded = _unit_norm(embedded) * self.length
        if drop is not None:
            embedded = drop(embedded)
        return (embedded if self.up_proj is None else self.up_proj(embedded)) * self.scale


class StackInput(nn.Module):
    """The input of a stack: embeddings with positions and dropout."""

    def __init__(self, positions: Positions, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.positions = positions
        self.dropout = dropout

    def forward(
        self, embedded: Tensor, *, first: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Add positions to embeddings (B, T, D): from `first` on, or `position_ids` (B, T)."""
        x = self.positions(embedded, first=first, position_ids=position_ids)
        return ops.dropout(x, self.dropout, training=self.training)


class SegmentInput(StackInput):
    """The input of a stack that reads several segments: its segment's embedding is added.

    Devlin et al. (2019), figure 2.
    """

    def __init__(
        self, positions: Positions, *, width: int, scale: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__(positions, dropout=dropout)
        self.segment = nn.Parameter(torch.empty(width))
        self.scale = scale  # of the token embeddings, so that both are as large
        nn.init.normal_(self.segment, std=width**-0.5)

    def forward(
        self, embedded: Tensor, *, first: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Add the segment and positions to embeddings (B, T, D)."""
        embedded = embedded + (self.segment * self.scale).to(embedded.dtype)
        return super().forward(embedded, first=first, position_ids=position_ids)


class OutputProjection(nn.Module):
    """The projection to the vocabulary; a tied one uses the matrix of an embedding.

    With an `embedding_width` E it has two steps, D x E and E x V; with `fix_norm` the vectors of
    the tokens have length one: see `Embedding`.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        tied: bool,
        bias: bool = False,
        embedding_width: int = 0,
        fix_norm: bool = False,
    ) -> None:
        super().__init__()
        self.weight = (
            None if tied else nn.Parameter(torch.empty(vocab_size, embedding_width or width))
        )
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.down_proj = nn.Linear(width, embedding_width, bias=False) if embedding_width else None
        self.fix_norm = fix_norm
        if self.weight is not None:
            nn.init.normal_(self.weight, std=(embedding_width or width) ** -0.5)

    @property
    def matrix(self) -> Tensor | None:
        """Return the matrix (V, E) of the logits, or None if it is an embedding's."""
        return _unit_norm(self.weight) if self.fix_norm and self.weight is not None else self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Project (..., D) to the width of the matrix: (..., E)."""
        return hidden if self.down_proj is None else self.down_proj(hidden)


def _unit_norm(x: Tensor) -> Tensor:
    """Scale each vector of (..., E) to length one."""
    return F.normalize(x, dim=-1, eps=1e-6)
