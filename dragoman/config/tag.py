"""Settings of tagging: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class TagConfig:
    """Tagging: columns, character features and the CRF."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1")

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        return iter(())
