"""Rows of piece ids become one tensor, and many rows become batches that waste little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.text.special_tokens import EOS, PAD


class PaddedBatch(NamedTuple):
    """Rows of ids side by side."""

    ids: Tensor  # (B, S), padded at the end
    mask: Tensor | None  # (B, S), True where a row has a token; None when nothing is padded


def pad_batch(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PaddedBatch:
    """Pad rows to the longest; the mask comes from their lengths, never from their values."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    ids = torch.tensor([[*row, *([PAD] * (longest - len(row)))] for row in rows], dtype=torch.long)
    mask = None if int(lengths.min()) == longest else torch.arange(longest) < lengths[:, None]
    return PaddedBatch(ids.to(device), mask if mask is None else mask.to(device))


def pad_sources(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PaddedBatch:
    """Pack source pieces as encoders know them from training: each row closed by its end."""
    return pad_batch([[*row, EOS] for row in rows], device)


def group_by_length(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    rows_per_sentence: int = 1,
    max_rows: int | None = None,
) -> list[list[int]]:
    """Group numbers of rows so that rows of a group have like lengths and fill at most `slots` padded places.

    Each row counts `width` times, as a beam does. A row longer than all slots goes alone. `most` bounds the rows of a
    group and replaces the count of slots. Longest first: a batch that does not fit in memory shows at once.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        group = groups[-1] if groups else []
        capacity = (
            max_rows
            if max_rows is not None
            else max(1, batch_tokens // (rows_per_sentence * (lengths[group[0]] if group else 1)))
        )
        if group and len(group) < capacity:
            group.append(row)
        else:
            groups.append([row])
    return groups
