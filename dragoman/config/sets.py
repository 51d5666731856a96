"""Settings of sets: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class SetsConfig:
    """Sets: the problem, its data and the set encoder."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = ("mae", "accuracy", "log_likelihood")

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        return iter(())
