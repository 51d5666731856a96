"""A bundle: the self-contained model directory that training writes and every other command takes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.bundle.bundle import Bundle
    from dragoman.bundle.card import Card, CardScore
    from dragoman.bundle.writer import write_bundle

__all__ = ["Bundle", "Card", "CardScore", "write_bundle"]

_MODULES = {"Bundle": "bundle", "Card": "card", "CardScore": "card", "write_bundle": "writer"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: whether a path is a model is answered without torch."""
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
