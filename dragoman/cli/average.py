"""`dragoman average`: one model from several checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.show import result
from dragoman.files.disk import require_parent_writable


def average(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's directory.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the averaged model.", show_default=False)],
    last: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints.")] = 3,
) -> None:
    """Average a run's newest checkpoints into a new model; the run need not have finished."""
    from dragoman.runs.place import Place

    require_parent_writable(out / "model")
    Place(model).require_run()
    Place(out).require_no_run()

    from dragoman.runs.averaging import average_run  # here, so that a mistake is found before torch is imported

    made = average_run(model, out, last=last)
    steps = ", ".join(f"{step:,}" for step in made.steps)
    result(f"{made.out}: the average of steps {steps}" if len(made.steps) > 1 else f"{made.out}: the weights of step {steps} alone")
