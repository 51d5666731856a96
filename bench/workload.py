"""Workload of the CPU decoding benchmark: random sources and fixed output lengths."""

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
"""Translates a batch to a given output length; returns the best hypothesis of each sentence."""


def layers(size: str) -> int:
    """Return the number of layers per stack."""
    return int(SHAPES[size]["encoder"][0].split("*")[1])


def sentences(count: int, vocabulary: int) -> Batch:
    """Return random sources of 3 to 60 tokens, 14 on average."""
    import numpy as np

    rng = np.random.default_rng(0)
    lengths = np.clip(np.round(rng.gamma(6.0, 2.4, count)), 3, 60).astype(int)
    return [rng.integers(8, vocabulary, int(length)).tolist() for length in lengths]


def batch_by_length(sources: Batch, rows: int) -> list[Batch]:
    """Return batches of sentences of similar length, longest first."""
    ordered = sorted(sources, key=len, reverse=True)
    return [ordered[at : at + rows] for at in range(0, len(ordered), rows)]


def output_length(batch: Batch) -> int:
    """Return the length of every output of a batch."""
    return max(map(len, batch)) + 2
