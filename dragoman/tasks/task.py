"""What a task is to the trainer and the commands; each is one module of this folder, with a validation beside it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from dragoman.training.task import Loss

__all__ = ["Loss", "Task"]


class Task(Protocol):
    """How a batch becomes a loss."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the sums that training minimises and reports, for one batch."""
        ...

    def with_torch_compile(self) -> Task:
        """Make the same task with its forward pass compiled."""
        ...
