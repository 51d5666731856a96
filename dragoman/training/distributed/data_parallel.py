"""What each rank holds of the model: all of it, or (`sharded.py`) a share of every weight.

The rest of training sees four things. `shares` is a module whose parameters are what this rank trains, averages and saves;
in a replica it is the model itself. A pass over a batch leaves its gradients on them. `total` makes of a rank's gradients
those of the whole update. And `whole` lends the first rank the whole model, to validate.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dragoman.data.batches import Batch
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.task import Loss, Task

Gradients = list[Tensor | None]  # one for each trained parameter of the shares


class ReducedGradients(NamedTuple):
    """An update's gradients and figures, summed over all ranks."""

    gradient: Gradients
    sums: Tensor
    grad_norm: Tensor  # () of the gradient of the whole model, before any division


class ParallelStrategy(Protocol):
    """How the ranks hold a model."""

    local_module: nn.Module
    lockstep: bool  # whether ranks meet within a pass, so that all of them must make equally many
    accumulates_grad: (
        bool  # whether a pass adds to the gradients that it finds, or writes over them
    )
    file_suffix: str  # what the names of this rank's files end in, such as "-0-of-2"

    def loss(self, task: Task, batch: Batch) -> Loss:
        """Compute a batch's loss with the whole model's weights."""
        ...

    def backward(self, loss: Loss) -> None:
        """Leave the loss's gradients on the shares."""
        ...

    def total(self, gradient: Gradients, sums: Tensor, number: int) -> ReducedGradients:
        """Sum the gradients and figures of update `number` over the ranks."""
        ...

    def gathered_model(self) -> AbstractContextManager[None]:
        """Lend the first rank the whole model; every rank must come here, and no rank may train meanwhile."""
        ...

    def rows(self, name: str) -> slice | None:
        """Say which rows of a weight are this rank's; None for all of it."""
        ...


class ReplicatedDataParallel:
    """Every rank holds the whole model; an update needs one message, after its last micro-batch."""

    lockstep = False
    accumulates_grad = True
    file_suffix = ""

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        self.local_module, self._world = model, world
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        world.broadcast(named_weights(model).values())

    def loss(self, task: Task, batch: Batch) -> Loss:
        """Compute a batch's loss."""
        return task.loss(self.local_module, batch)

    def backward(self, loss: Loss) -> None:
        """Leave the loss's gradients on the parameters."""
        loss.total.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def total(self, gradient: Gradients, sums: Tensor, number: int) -> ReducedGradients:
        """Sum over the ranks in one message that carries everything: gradients, loss, counts and requests to stop."""
        if self._world.size > 1:
            parts = [
                (torch.zeros_like(parameter) if part is None else part).reshape(-1)
                for part, parameter in zip(gradient, self._parameters, strict=True)
            ]
            flat = torch.cat([*parts, sums])
            self._world.all_reduce(flat, f"summing the gradients of update {number}")
            *pieces, sums = flat.split([*(len(part) for part in parts), len(sums)])  # type: ignore[no-untyped-call]
            gradient = [
                piece.view_as(parameter)
                for piece, parameter in zip(pieces, self._parameters, strict=True)
            ]
        return ReducedGradients(
            gradient,
            sums,
            torch.nn.utils.get_total_norm([part for part in gradient if part is not None]),
        )

    def gathered_model(self) -> AbstractContextManager[None]:
        """Do nothing: the model is whole."""
        return nullcontext()

    def rows(self, name: str) -> slice | None:
        """Say that all rows are this rank's."""
        return None


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Name every tensor of a model once: parameters, a tied one by its first name, and the buffers that are saved."""
    parameters = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = {
        name: tensor for name, tensor in saved.items() if not isinstance(tensor, nn.Parameter)
    }
    return {name: tensor.detach() for name, tensor in {**parameters, **buffers}.items()}
