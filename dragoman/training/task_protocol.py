"""The interface of a task to the trainer: a loss as sums over the target tokens of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums over the target tokens of a batch; the trainer divides by the count of the whole step.

    Sums give the same gradient however a step is split into micro-batches and ranks. A mean of
    means would give the tokens of a small micro-batch more weight than those of a large one.
    """

    total: Tensor  # (), the training objective: label smoothing and auxiliary losses included
    nll: Tensor  # (), negative log-likelihood of the targets, in nats
    count: Tensor  # (), number of target tokens


class Task(Protocol):
    """A training objective: the loss of a model on a batch."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch; called within autocast, with gradients enabled."""
        ...


@runtime_checkable
class StatefulTask(Protocol):
    """A task with a state that each batch leaves to the next, such as Transformer-XL's memory.

    It is saved in checkpoints.
    """

    def carried_state(self) -> dict[str, Tensor]:
        """Return the tensors that the next batch continues from; may be empty."""
        ...

    def load_carried_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `carried_state`; with an empty mapping, start from zero."""
        ...
