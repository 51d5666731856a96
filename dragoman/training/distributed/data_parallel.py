"""Data parallel: every rank holds the whole model, and gradients are summed by one all-reduce.

`TrainStep` divides the sum by the target tokens of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.train_step import Gradients, ReducedGradients, SingleProcess


class ReplicatedDataParallel(SingleProcess):
    """Every rank holds the whole model; a step needs one all-reduce, after its last micro-batch."""

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        super().__init__(model)
        self._world = world
        self._parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        world.broadcast(named_weights(model).values())

    @torch.no_grad()
    def all_reduce_gradients(
        self, gradients: Gradients, sums: Tensor, step: int
    ) -> ReducedGradients:
        """Sum gradients, loss, counts and stop requests over the ranks in one all-reduce."""
        if self._world.size > 1:
            parts = [
                (torch.zeros_like(parameter) if part is None else part).reshape(-1)
                for part, parameter in zip(gradients, self._parameters, strict=True)
            ]
            flat = torch.cat([*parts, sums])
            self._world.all_reduce(flat, f"all-reduce of the gradients of step {step}")
            sizes = [*(len(part) for part in parts), len(sums)]
            *summed, sums = flat.split(sizes)  # type: ignore[no-untyped-call]
            gradients = [
                part.view_as(parameter)
                for part, parameter in zip(summed, self._parameters, strict=True)
            ]
        return super().all_reduce_gradients(gradients, sums, step)


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and saved buffers by name; a shared parameter by its first name only."""
    parameters = dict(model.named_parameters())
    saved = model.state_dict(keep_vars=True)
    buffers = {
        name: tensor for name, tensor in saved.items() if not isinstance(tensor, nn.Parameter)
    }
    return {name: tensor.detach() for name, tensor in {**parameters, **buffers}.items()}
