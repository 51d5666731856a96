"""The work that all who translate get: the same ids in the same batches, and outputs whose lengths nobody may choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "width": 32,
        "heads": 2,
        "ffn_width": 64,
        "encoder": ["transformer*1"],
        "decoder": ["transformer*1"],
    },
    "small": {
        "width": 256,
        "heads": 4,
        "ffn_width": 1024,
        "encoder": ["transformer*4"],
        "decoder": ["transformer*4"],
    },
    "base": {
        "width": 512,
        "heads": 8,
        "ffn_width": 2048,
        "encoder": ["transformer*6"],
        "decoder": ["transformer*6"],
    },
}
VOCABULARIES = {"tiny": 500, "small": 8_000, "base": 32_000}
Batch = list[list[int]]
TranslateBatches = Callable[[Sequence[Batch]], None]
TranslateBatch = Callable[[Batch, int], Sequence[Sequence[int]]]
"""Translates one batch, and gives the best output of each sentence, as long as it is told."""


def layers(size: str) -> int:
    """Count the layers of each side."""
    return int(SHAPES[size]["encoder"][0].split("*")[1])


def sentences(count: int, vocabulary: int) -> Batch:
    """Draw sources, as long as those of a general corpus: 3 to 60 pieces, 14 on average."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = np.clip(np.round(rng.gamma(6.0, 2.4, count)), 3, 60).astype(int)
    return [rng.integers(8, vocabulary, int(length)).tolist() for length in lengths]


def batch_by_length(sources: Batch, rows: int) -> list[Batch]:
    """Put sentences of like lengths together, the longest first."""
    ordered = sorted(sources, key=len, reverse=True)
    return [ordered[at : at + rows] for at in range(0, len(ordered), rows)]


def output_length(batch: Batch) -> int:
    """Say how long every output of a batch is."""
    return max(map(len, batch)) + 2
