"""The interface of a task to the trainer: a loss as sums over the target tokens of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

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
    """What a model is trained to do."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the loss of a batch; called within autocast, with gradients enabled."""
        ...
