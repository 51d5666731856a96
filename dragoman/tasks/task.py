"""What a task is: how examples become a batch, a loss, and figures that say how good a model is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from dragoman.training.loss import Loss

__all__ = ["Loss", "Task"]


class Task(Protocol):
    """What the trainer and the commands need to know of a task; each is one module of this folder."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the sums that training minimises and reports, for one batch."""
        ...

    def validate(self, model: nn.Module) -> Mapping[str, float]:
        """Measure a model in evaluation mode: at least "loss", per target, without smoothing."""
        ...
