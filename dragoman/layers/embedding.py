"""Embeddings: from ids to vectors, and from vectors back to scores of ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.positions import Positions
from dragoman.ops import dropout


class Embedding(nn.Module):
    r"""A vector for each piece, times a factor.

    The factor is the root of the width where one matrix is also the output projection: that wants small numbers,
    the stack wants numbers of the size of the positions (Vaswani et al. 2017, section 3.4).

    With an `inner` width E the table is V x E, and a matrix E x D widens what is looked up: V E + E D weights for V D, as in ALBERT
    (Lan et al. 2020). With `fixed` every vector has length one, and the factor is trained:

    .. math:: g\, w / \lVert w \rVert

    FixNorm, Nguyen and Salazar (2019). Their released code keeps g at the root of the width, where ours starts; on the way out
    vectors have length one there and here, and what scales the logits is the last norm (ScaleNorm's one number, in the paper).
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        scale: float = 1.0,
        inner: int = 0,
        fix_norm: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, inner or width))
        nn.init.normal_(self.weight, std=(inner or width) ** -0.5)
        self.wide = nn.Linear(inner, width, bias=False) if inner else None
        self.length = nn.Parameter(torch.full((1,), scale)) if fix_norm else None  # g
        self.scale = 1.0 if fix_norm else scale

    @property
    def matrix(self) -> Tensor:
        """Give the table (V, E) as the output projection may use it."""
        return self.weight if self.length is None else _unit_norm(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up (B, T) ids: (B, T, D)."""
        found = F.embedding(ids, self.weight)
        if self.length is not None:
            found = _unit_norm(found) * self.length
        return (found if self.wide is None else self.wide(found)) * self.scale


class StackInput(nn.Module):
    """What stands before a stack: positions and dropout on the embeddings."""

    def __init__(self, positions: Positions, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.positions = positions
        self.dropout = dropout

    def forward(
        self, embedded: Tensor, *, first: int = 0, position_ids: Tensor | None = None
    ) -> Tensor:
        """Place embeddings (B, T, D): consecutively from `first`, or at places (B, T)."""
        placed = self.positions(embedded, first=first, position_ids=position_ids)
        return dropout(placed, self.dropout) if self.training and self.dropout else placed


class OutputProjection(nn.Module):
    """The projection to the vocabulary; a tied one takes its matrix from an embedding at each call.

    With an `inner` width E it has two steps, D x E and E x V, as the embeddings have; with `fixed` the vectors of the pieces have
    length one, as theirs have.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        tied: bool,
        bias: bool = False,
        inner: int = 0,
        fix_norm: bool = False,
    ) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, inner or width))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None
        self.narrow = nn.Linear(width, inner, bias=False) if inner else None
        self.fix_norm = fix_norm
        if self.weight is not None:
            nn.init.normal_(self.weight, std=(inner or width) ** -0.5)

    @property
    def matrix(self) -> Tensor | None:
        """Give the matrix (V, E) that scores the pieces, None where it is an embedding's."""
        return _unit_norm(self.weight) if self.fix_norm and self.weight is not None else self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Make (..., D) ready to be multiplied by the matrix: (..., E)."""
        return hidden if self.narrow is None else self.narrow(hidden)


def _unit_norm(x: Tensor) -> Tensor:
    """Scale each vector of (..., E) to length one."""
    return F.normalize(x, dim=-1, eps=1e-6)
