"""Convolution filters over words with a maximum over positions: Kim's TextCNN and seq-CNN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.ops.masked_pooling import max_pool

PADDING = 0  # the id of <pad>


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
