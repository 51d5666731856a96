"""Settings of language modeling: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageConfig:
    """Language modeling: segments, memory and objective."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = ("perplexity", "bits_per_byte")
    # Largest sizes of a miniature (`dragoman train --mini`), by setting.
    mini: ClassVar[dict[str, object]] = {}

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        return iter(())
