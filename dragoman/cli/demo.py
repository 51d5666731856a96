"""`dragoman demo`: the whole road in two minutes, on dates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the model.")] = Path("demo-model"),
) -> None:
    """Make a corpus of dates in many languages, train on it, translate new ones, and show where the model looked."""
