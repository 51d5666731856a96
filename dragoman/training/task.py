"""What a loss hands to the trainer: sums, so that any split of a batch gives the same gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums over the valid targets of a batch; the trainer divides by the count of the whole update, over all ranks.

    A mean of means would weigh the tokens of a small micro-batch more than those of a large one.
    """

    total: Tensor  # (), what is minimised: smoothing and added terms included
    nll: Tensor  # (), negative log-likelihood of the targets alone, in nats
    count: Tensor  # (), valid targets


class Task(Protocol):
    """All that the trainer knows of a task."""

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Compute the sums for one batch; called inside autocast, gradients on."""
        ...

    def with_torch_compile(self) -> Task:
        """Make the same task with its forward pass compiled."""
        ...
