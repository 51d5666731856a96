"""`dragoman average`: one model from several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.options import BundleArgument


def average(
    model: BundleArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the averaged model.", show_default=False)],
    last: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints.")] = 5,
) -> None:
    """Average a model's newest checkpoints into a new model."""
