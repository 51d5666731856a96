"""Pad token ids to one tensor with its mask; group sequences of similar lengths, for inference.

Batches of training are planned in `batch_plan.py` and padded in `collate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.text.special_tokens import EOS, PAD


class PaddedBatch(NamedTuple):
    """Token ids of several rows, padded to the longest."""

    ids: Tensor  # (B, S), padding at the end
    mask: Tensor | None  # (B, S), True for a real token; None if nothing is padded


def pad_batch(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PaddedBatch:
    """Pad rows to the longest; the mask comes from their lengths, never from token values."""
    lengths = torch.tensor([len(row) for row in rows])
    longest = int(lengths.max())
    ids = torch.tensor([[*row, *([PAD] * (longest - len(row)))] for row in rows], dtype=torch.long)
    mask = None if int(lengths.min()) == longest else torch.arange(longest) < lengths[:, None]
    return PaddedBatch(ids.to(device), mask if mask is None else mask.to(device))


def pad_sources(rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> PaddedBatch:
    """Append EOS to every source, as in training, and pad."""
    return pad_batch([[*row, EOS] for row in rows], device)


def group_by_length(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    rows_per_sentence: int = 1,
    max_rows: int | None = None,
) -> list[list[int]]:
    """Group row indices into batches of similar lengths with at most `batch_tokens` padded tokens.

    Each row counts `rows_per_sentence` times, as a beam does. A row longer than `batch_tokens` is a
    batch of its own. `max_rows` limits the rows of a batch and replaces the token limit. The
    longest rows come first, so that a batch that does not fit in memory fails early.
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
