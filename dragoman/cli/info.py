"""`dragoman info`: what a model directory holds."""

from __future__ import annotations

from dragoman.cli.options import BundleArgument, JsonOption


def info(model: BundleArgument, json: JsonOption = False) -> None:
    """Show what a model is, how it was trained, and what differs from its recipe."""
