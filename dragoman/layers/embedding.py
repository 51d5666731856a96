"""Embeddings: from ids to vectors, and from vectors back to scores of ids."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.positions import Positions
from dragoman.kernels import dropout


class Embedding(nn.Module):
    """A vector for each piece, times a factor.

    The factor is the root of the width where one matrix is also the output projection: that wants small numbers,
    the stack wants numbers of the size of the positions (Vaswani et al. 2017, section 3.4).
    """

    def __init__(self, vocabulary: int, width: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        nn.init.normal_(self.weight, std=width**-0.5)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        """Look up (B, T) ids: (B, T, D)."""
        return F.embedding(ids, self.weight) * self.scale


class Entrance(nn.Module):
    """What stands before a stack: positions and dropout on the embeddings."""

    def __init__(self, positions: Positions, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.positions = positions
        self.dropout = dropout

    def forward(self, embedded: Tensor, *, first: int = 0, places: Tensor | None = None) -> Tensor:
        """Place embeddings (B, T, D): consecutively from `first`, or at places (B, T)."""
        placed = self.positions(embedded, first=first, places=places)
        return dropout(placed, self.dropout) if self.training and self.dropout else placed


class Output(nn.Module):
    """The projection to the vocabulary; a tied one takes its matrix from an embedding at each call."""

    def __init__(self, vocabulary: int, width: int, *, tied: bool, bias: bool = False) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if bias else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=width**-0.5)
