"""TensorBoard scalars of a run; needs `pip install "dragoman[board]"`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.errors import ConfigError

STEP_SCALARS = ("loss", "nll", "lr", "grad_norm", "tokens", "padding", "seconds")


class TensorBoardWriter:
    """Writes the records of the training log as TensorBoard scalars.

    Purges those after step `done`.
    """

    def __init__(self, folder: Path, *, done: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                [
                    f"train.tensorboard needs the package tensorboard; found none ({error}); "
                    'install it with pip install "dragoman[board]", or set train.tensorboard=false'
                ]
            ) from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Write the record of a step or a validation."""
        group = "valid" if record.get("event") == "validation" else "train"
        names = (
            STEP_SCALARS
            if group == "train"
            else [name for name in record if name not in ("event", "step")]
        )
        for name in names:
            value = record.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{group}/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()
