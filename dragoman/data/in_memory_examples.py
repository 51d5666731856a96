"""Examples of a task in memory: named sequences of different lengths, and one value per example."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class InMemoryExamples:
    """Encoded examples: ragged integer arrays (flat values and offsets) and dense arrays.

    `sequences` maps a name to one sequence of integers per example, `values` to one row per
    example, such as a label. `skipped` counts what was left out, by reason.
    """

    def __init__(
        self,
        *,
        sequences: Mapping[str, Iterable[Sequence[int] | NDArray[Any]]] | None = None,
        values: Mapping[str, NDArray[Any] | Sequence[Any]] | None = None,
        skipped: Mapping[str, int] | None = None,
    ) -> None:
        self._flat: dict[str, NDArray[np.int32]] = {}
        self._offsets: dict[str, NDArray[np.int64]] = {}
        self.values = {name: np.asarray(rows) for name, rows in (values or {}).items()}
        self.skipped = dict(skipped or {})
        sizes = {name: len(rows) for name, rows in self.values.items()}
        for name, rows in (sequences or {}).items():
            parts = [np.asarray(row, np.int32) for row in rows]
            lengths = np.fromiter((len(part) for part in parts), np.int64, len(parts))
            self._offsets[name] = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            self._flat[name] = np.concatenate(parts) if parts else np.zeros(0, np.int32)
            sizes[name] = len(parts)
        assert len(set(sizes.values())) <= 1, f"every field needs one row per example: {sizes}"
        self._size = next(iter(sizes.values()), 0)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._size

    def lengths(self, name: str) -> NDArray[np.int64]:
        """Return the length of each example's sequence."""
        return np.diff(self._offsets[name])

    def sequence(self, name: str, example: int) -> NDArray[np.int32]:
        """Return the sequence of one example."""
        start, end = self._offsets[name][example : example + 2]
        return self._flat[name][start:end]

    def padded(
        self, name: str, examples: NDArray[np.int64], width: int, *, padding: int = 0
    ) -> NDArray[np.int64]:
        """Return the sequences of some examples as rows (B, width), padded and cut at the end."""
        starts = self._offsets[name][examples]
        lengths = np.minimum(self._offsets[name][np.asarray(examples) + 1] - starts, width)
        columns = np.arange(width)
        inside = columns < lengths[:, None]
        flat = self._flat[name]
        if not len(flat):
            return np.full((len(examples), width), padding, np.int64)
        index = np.where(inside, starts[:, None] + columns, 0)
        return np.where(inside, flat[index], padding).astype(np.int64)

    def select(self, examples: NDArray[np.int64] | Sequence[int]) -> InMemoryExamples:
        """Return a store of some examples, in the given order."""
        chosen = np.asarray(examples, np.int64)
        return InMemoryExamples(
            sequences={
                name: [self.sequence(name, int(each)) for each in chosen] for name in self._flat
            },
            values={name: rows[chosen] for name, rows in self.values.items()},
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, compared on resume."""
        hashed = hashlib.sha256()
        for name in sorted(self._flat):
            hashed.update(f"sequence {name}".encode())
            hashed.update(self._offsets[name].tobytes())
            hashed.update(self._flat[name].tobytes())
        for name in sorted(self.values):
            rows = self.values[name]
            hashed.update(f"values {name} {rows.dtype} {rows.shape}".encode())
            hashed.update(np.ascontiguousarray(rows).tobytes())
        return hashed.hexdigest()
