"""The trainer on a small model, as a process to be killed: it validates, saves and resumes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from training_kit import tiny_trainer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import DragomanError, StoppedError


def run(directory: str, *, pause: float = 0.0, **settings: Any) -> int:
    """Train, or resume a run, and return the command's exit code."""

    def validate(model: Any) -> dict[str, float]:
        time.sleep(pause)
        return {"loss": float(model.output_weight.abs().mean())}

    try:
        with RunDirectory(Path(directory), keep_checkpoints=2) as place:
            parts = {"validate": validate, "on_record": lambda record: time.sleep(pause)}
            result = tiny_trainer(place, parts=parts, **settings).fit(resume=True)
    except DragomanError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return StoppedError.exit_code if result.stopped else 0
