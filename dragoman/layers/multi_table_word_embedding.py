"""Word embeddings of several tables, trained or frozen, with dropout of whole words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F


class WordEmbedding(nn.Module):
    """One or several embedding tables, concatenated and projected to the model's width.

    `widths` are those of the trained tables, `frozen_widths` those of tables that training leaves
    as they are. In training each word is replaced by `unknown` with probability `word_dropout`, and
    all occurrences of a word in a batch are dropped with probability `embedding_dropout`, as in Gal
    and Ghahramani (2016).
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        *,
        widths: Sequence[int],
        frozen_widths: Sequence[int] = (),
        scale: float = 1.0,
        unknown: int = 3,
        word_dropout: float = 0.0,
        embedding_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale, self.unknown = scale, unknown
        self.word_dropout, self.embedding_dropout = word_dropout, embedding_dropout
        self.tables = nn.ParameterList(
            nn.Parameter(torch.empty(vocab_size, each)) for each in widths
        )
        self.frozen_tables = nn.ParameterList(
            nn.Parameter(torch.empty(vocab_size, each), requires_grad=False)
            for each in frozen_widths
        )
        for table in (*self.tables, *self.frozen_tables):
            nn.init.normal_(table, std=table.size(1) ** -0.5)
        total = sum(widths) + sum(frozen_widths)
        self.projection = None if total == width else nn.Linear(total, width, bias=False)

    @torch.no_grad()
    def load_vectors(self, vectors: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
        """Start the last trained tables and the frozen ones from word vectors.

        Each has the ids of the words that have a vector, (N,), and the vectors, (N, D). Other words
        get random vectors of the same standard deviation.
        """
        tables = [*self.tables, *self.frozen_tables][-len(vectors) :]
        for table, (ids, values) in zip(tables, vectors, strict=True):
            nn.init.normal_(table, std=float(values.std()))
            table[torch.from_numpy(ids)] = torch.from_numpy(values).to(table.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens (..., T): (..., T, D)."""
        if self.training and self.word_dropout:
            dropped = torch.rand(tokens.shape, device=tokens.device) < self.word_dropout
            tokens = tokens.masked_fill(dropped, self.unknown)
        tables = (*self.tables, *self.frozen_tables)
        embedded = torch.cat([F.embedding(tokens, table) for table in tables], dim=-1)
        if self.training and self.embedding_dropout:
            kept = torch.rand(tables[0].size(0), device=tokens.device) >= self.embedding_dropout
            factors = kept.to(embedded.dtype) / (1 - self.embedding_dropout)  # (V,)
            embedded = embedded * factors[tokens].unsqueeze(-1)
        if self.projection is not None:
            embedded = self.projection(embedded)
        return embedded * self.scale
