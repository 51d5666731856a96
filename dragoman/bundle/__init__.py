"""Bundles: the self-contained model directories that training writes and other commands load."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.bundle.card import Card, CardScore
    from dragoman.bundle.non_translation_bundle_loader import TaskBundle
    from dragoman.bundle.translation_bundle_loader import Bundle
    from dragoman.bundle.writer import write_bundle, write_task_bundle

__all__ = ["Bundle", "Card", "CardScore", "TaskBundle", "write_bundle", "write_task_bundle"]

_MODULES = {
    "Bundle": "translation_bundle_loader",
    "Card": "card",
    "CardScore": "card",
    "TaskBundle": "non_translation_bundle_loader",
    "write_bundle": "writer",
    "write_task_bundle": "writer",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that paths can be checked without importing torch."""
    if name not in _MODULES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
