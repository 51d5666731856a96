"""`dragoman verify`: read every byte of a model and its checkpoints and compare with what was written."""

from __future__ import annotations

from dragoman.cli.options import BundleArgument, JsonOption


def verify(model: BundleArgument, json: JsonOption = False) -> None:
    """Check every file of a model and of its checkpoints against the SHA-256 written when it was made."""
