"""`dragoman average`: one model from several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.output import print_result
from dragoman.storage.disk import require_parent_writable


def average(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="The model's directory.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Directory for the averaged model.", show_default=False),
    ],
    last: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints.")] = 3,
) -> None:
    """Average a run's newest checkpoints into a new model; the run need not have finished."""
    from dragoman.runs.output_directory import OutputDirectory

    require_parent_writable(out / "model")
    OutputDirectory(model).require_run()
    OutputDirectory(out).require_no_run()

    from dragoman.runs.checkpoint_average import (
        average_checkpoints,
    )  # here, so that a mistake is found before torch is imported

    made = average_checkpoints(model, out, last=last)
    steps = ", ".join(f"{step:,}" for step in made.steps)
    print_result(
        f"{made.out}: the average of steps {steps}"
        if len(made.steps) > 1
        else f"{made.out}: the weights of step {steps} alone"
    )
