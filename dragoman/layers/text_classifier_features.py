"""Inputs and features of text classifiers: word embeddings, filters over words, n-gram weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops
from dragoman.ops.masked_pooling import max_pool

PADDING = 0  # the id of <pad>, and of padding among n-grams


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


class FilterBank(nn.Module):
    """Convolution filters of several widths over embeddings, ReLU, maximum over positions.

    Kim (2014), equations 1 to 3. Every window that holds a word counts: sequences are extended by
    zeros on both sides (wide convolution, Kalchbrenner et al. 2014).
    """

    def __init__(self, width: int, *, widths: Sequence[int], filters: int) -> None:
        super().__init__()
        self.widths = tuple(widths)
        self.output_width = filters * len(self.widths)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, filters, each) for each in self.widths)
        for convolution in self.convolutions:
            nn.init.xavier_uniform_(convolution.weight)  # type: ignore[arg-type]
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]

    def forward(self, embedded: Tensor, mask: Tensor | None) -> Tensor:
        """Return the features (B, widths * filters) of embeddings (B, T, D), mask (B, T)."""
        if mask is not None:
            embedded = embedded.masked_fill(~mask.unsqueeze(2), 0.0)
        columns = embedded.transpose(1, 2)  # (B, D, T)
        pooled = []
        for width, convolution in zip(self.widths, self.convolutions, strict=True):
            responses = convolution(F.pad(columns, (width - 1, width - 1)))
            pooled.append(max_pool(responses.transpose(1, 2), _widen_mask(mask, width)))
        # The maximum commutes with ReLU and is smaller.
        return torch.cat(pooled, dim=-1).relu()


class OneHotFilterBank(nn.Module):
    """Convolution filters over one-hot words: each filter has a weight per word and offset.

    Johnson and Zhang (2015), "seq-CNN": no embedding between the words and the filters. The sum of
    rows of a table replaces the matmul with one-hot vectors.
    """

    def __init__(self, vocab_size: int, *, widths: Sequence[int], filters: int) -> None:
        super().__init__()
        self.widths, self.filters = tuple(widths), filters
        self.output_width = filters * len(self.widths)
        self.tables = nn.ParameterList(
            nn.Parameter(torch.empty(vocab_size, each * filters)) for each in self.widths
        )
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(filters)) for _ in self.widths)
        for table in self.tables:
            nn.init.normal_(table, std=0.01)  # the paper: Gaussian with a standard deviation of .01
            with torch.no_grad():
                table[PADDING] = 0.0

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Return the features (B, widths * filters) of tokens (B, T) with a mask (B, T)."""
        if mask is not None:
            tokens = tokens.masked_fill(~mask, PADDING)
        pooled = []
        for width, table, bias in zip(self.widths, self.tables, self.biases, strict=True):
            ends = F.pad(tokens, (width - 1, width - 1), value=PADDING)
            count = tokens.size(1) + width - 1  # windows
            rows = F.embedding(ends, table, padding_idx=PADDING)
            parts = rows.view(*ends.shape, width, self.filters)  # (B, T + 2 (width - 1), width, F)
            responses = sum(
                (parts[:, offset : offset + count, offset] for offset in range(1, width)),
                parts[:, :count, 0],
            )
            pooled.append(max_pool(responses + bias, _widen_mask(mask, width)))
        return torch.cat(pooled, dim=-1).relu()


def _widen_mask(mask: Tensor | None, width: int) -> Tensor | None:
    """Return the mask (B, T + width - 1) of the windows that hold a real position of (B, T)."""
    if mask is None:
        return None
    positions = torch.arange(mask.size(1) + width - 1, device=mask.device)
    lengths = mask.sum(dim=1, keepdim=True)  # padding comes last
    return (positions < lengths + width - 1) & (lengths > 0)


class NgramBag(nn.Module):
    r"""A linear classifier of n-grams, each weighted by a fixed factor per class.

    .. math:: z_c = b_c + \sum_{i \in d} x_i\, r_{ic}\, w_{ic}

    With the naive-Bayes log-count ratios r and x = 1 these are the features of Wang and Manning
    (2012), section 2.3; with r = 1 and tf-idf values x it is a linear tf-idf classifier. Feature 0
    is padding. The sum is multiplied by `scale`: it needs large weights, which Adam reaches sooner
    so.
    """

    ratios: Tensor

    def __init__(
        self, features: int, labels: int, *, dropout: float = 0.0, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.dropout, self.scale = dropout, scale
        self.weight = nn.Parameter(torch.zeros(features, labels))
        self.bias = nn.Parameter(torch.zeros(labels))
        ratios = torch.ones(features, labels)
        ratios[PADDING : PADDING + 1] = 0.0  # a table may be empty
        self.register_buffer("ratios", ratios)

    def forward(self, features: Tensor, values: Tensor | None = None) -> Tensor:
        """Return logits (B, C) of feature ids (B, K) with their values (B, K), by default 1."""
        real = (features != PADDING).float()
        amounts = ops.dropout(
            real if values is None else values * real, self.dropout, training=self.training
        )
        rows = F.embedding(features, self.weight * self.ratios)  # (B, K, C)
        return (amounts.unsqueeze(2) * rows).sum(dim=1) * self.scale + self.bias
