"""`dragoman average`: checkpoint averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.terminal_output import print_result
from dragoman.storage.disk_space_and_errors import require_parent_directory, require_parent_writable


def average(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model directory.", show_default=False)
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Directory for the averaged model.", show_default=False),
    ],
    last: Annotated[int, typer.Option(min=1, help="Number of checkpoints to average.")] = 3,
) -> None:
    """Average the latest checkpoints of a run into a new model.

    The run may be unfinished.
    """
    from dragoman.runs.output_directory_and_resume_checks import OutputDirectory

    require_parent_directory(out)
    require_parent_writable(out / "model")
    OutputDirectory(model).require_run()
    OutputDirectory(out).require_no_run()

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.runs.averaged_model_writer import average_checkpoints

    made = average_checkpoints(model, out, last=last)
    steps = ", ".join(f"{step:,}" for step in made.steps)
    print_result(
        f"{made.out}: the average of steps {steps}"
        if len(made.steps) > 1
        else f"{made.out}: the weights of step {steps} alone"
    )
