"""A model shared out over the ranks with torch's `fully_shard` (FSDP2): weights, gradients, moments and running average.

Each weight is cut by rows. A block's weights are gathered when a pass comes to it and given back behind it; its gradients are
summed into the ranks' shares on the way back. The ranks meet in every block, so all must make the same passes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dragoman.config import TrainConfig
from dragoman.data.batches import Batch
from dragoman.models.stack import Stack
from dragoman.training.distributed.data_parallel import (
    Gradients,
    ParallelStrategy,
    ReducedGradients,
    ReplicatedDataParallel,
    named_weights,
)
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.mixed_precision import BF16DataParallel
from dragoman.training.task import Loss, Task

MAX_REPLICA_FRACTION = 0.5  # share of the memory that weights, gradients and moments may take; the rest is for activations


class FSDPDecision(NamedTuple):
    """Whether the model is shared out, and why."""

    enabled: bool
    reason: str


def choose_fsdp(
    config: TrainConfig, model: nn.Module, *, ranks: int, device: torch.device
) -> FSDPDecision:
    """Follow `train.fsdp`; `auto` shares out what would fill more than half of a GPU on every rank."""
    if ranks == 1:
        return FSDPDecision(False, "there is one process")
    if config.fsdp != "auto":
        return FSDPDecision(config.fsdp == "on", "as configured")
    if device.type != "cuda":
        return FSDPDecision(False, f"on {device.type} it is slower")
    copies = 5 + (
        1 if config.ema_decay else 0
    )  # weights, gradients, the message that sums them, two moments, the running average
    needed = copies * sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )
    gpu_memory = torch.cuda.get_device_properties(device).total_memory
    found = f"{copies} copies of the weights take {100 * needed / gpu_memory:.0f} % of the GPU"
    return FSDPDecision(needed > MAX_REPLICA_FRACTION * gpu_memory, found)


def build_parallel_strategy(
    model: nn.Module,
    world: ProcessGroup,
    device: torch.device,
    fsdp: FSDPDecision,
    *,
    bf16_weights: bool = False,
) -> ParallelStrategy:
    """Hold a model as was chosen; one that is shared out is never rounded."""
    if fsdp.enabled:
        return ShardedDataParallel(model, world, device)
    return BF16DataParallel(model, world) if bf16_weights else ReplicatedDataParallel(model, world)


class ShardedDataParallel:
    """Every rank holds some rows of each weight."""

    lockstep = True
    accumulates_grad = True

    def __init__(self, model: nn.Module, world: ProcessGroup, device: torch.device) -> None:
        self._world = world
        self.file_suffix = f"-{world.rank}-of-{world.size}"
        world.broadcast(named_weights(model).values())
        buffers = {
            name: tensor
            for name, tensor in named_weights(model).items()
            if name not in dict(model.named_parameters())
        }
        self._loss_module = _LossModule(model)
        self._units = _apply_fully_shard(
            self._loss_module, find_fsdp_units(model), device, world.size
        )
        self.local_module = nn.Module()
        self._sharded_params: list[tuple[DTensor, nn.Parameter]] = []
        self._rows: dict[str, slice] = {}
        for name, parameter in model.named_parameters():
            local_param = parameter
            if isinstance(parameter, DTensor):
                # The same memory, without the wrapper: optimiser and average need not know of it.
                local_param = nn.Parameter(
                    parameter.to_local().detach(), requires_grad=parameter.requires_grad
                )
                rows = rank_rows(len(parameter), rank=world.rank, ranks=world.size)
                assert len(local_param) == rows.stop - rows.start, "torch must cut weights as we do"
                self._sharded_params.append((parameter, local_param))
                self._rows[name] = rows
            _register_tensor(self.local_module, name, local_param)
        for name, tensor in buffers.items():
            _register_tensor(self.local_module, name, tensor)
        cut = {id(local_param) for _, local_param in self._sharded_params}
        self._local_params = [
            local_param
            for local_param in self.local_module.parameters()
            if local_param.requires_grad
        ]
        self._replicated_indices = [
            number
            for number, local_param in enumerate(self._local_params)
            if id(local_param) not in cut
        ]  # held by every rank

    def loss(self, task: Task, batch: Batch) -> Loss:
        """Compute a batch's loss, gathering each block's weights on the way."""
        self._world.doing("a pass over a batch", waits=True)
        return Loss(*self._world.run_collective(lambda: self._loss_module(task, batch)))

    def backward(self, loss: Loss) -> None:
        """Sum the loss's gradients over the ranks, each into its share."""
        self._world.run_collective(loss.total.backward)
        for parameter, local_param in self._sharded_params:
            gradient, parameter.grad = parameter.grad, None
            local_param.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]

    @torch.no_grad()
    def total(self, gradient: Gradients, sums: Tensor, number: int) -> ReducedGradients:
        """Sum what is left: figures, squares of the shares' gradients, and gradients of the numbers that are not cut."""
        common = [
            torch.zeros_like(self._local_params[place])
            if gradient[place] is None
            else gradient[place]
            for place in self._replicated_indices
        ]
        cut = [
            part
            for place, part in enumerate(gradient)
            if part is not None and place not in self._replicated_indices
        ]
        squares = torch.nn.utils.get_total_norm(cut).to(sums).square()
        flat = torch.cat(
            [sums, squares.reshape(1), *(part.reshape(-1) for part in common if part is not None)]
        )
        self._world.all_reduce(flat, f"summing the figures of update {number}")
        sums, squares, rest = flat.split([len(sums), 1, len(flat) - len(sums) - 1])  # type: ignore[no-untyped-call]
        summed = list(gradient)
        for place, value in zip(self._replicated_indices, rest, strict=True):
            summed[place] = value.reshape(())
        return ReducedGradients(summed, sums, (squares.squeeze(0) + rest.square().sum()).sqrt())

    @contextmanager
    def gathered_model(self) -> Iterator[None]:
        """Gather all weights; the first rank keeps them until the end, and its model is then like any other."""
        try:
            self._world.run_collective(self._gather)
            if not self._world.is_rank_zero:
                self._scatter()
            yield
        finally:
            self._scatter()

    def rows(self, name: str) -> slice | None:
        """Say which rows of a weight are this rank's."""
        return self._rows.get(name)

    def _gather(self) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()

    def _scatter(self) -> None:
        for unit in self._units:
            unit.reshard()
            unit.set_reshard_after_forward(not isinstance(unit, _LossModule), recurse=False)


class _LossModule(nn.Module):
    """The call that torch's hooks stand around: a model is used through several methods, and a loss reads its output matrix."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, task: Task, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss; a tuple, for torch looks for tensors in nothing else."""
        loss = task.loss(self.model, batch)
        return loss.total, loss.nll, loss.count


def find_fsdp_units(model: nn.Module) -> list[nn.Module]:
    """Find the blocks whose weights are gathered one block at a time; none where a block may be left out or lends a weight."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    blocks: list[nn.Module] = [block for stack in stacks for _, block in stack.blocks()]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    return (
        []
        if any(stack.layer_drop for stack in stacks) or len(set(weights)) < len(weights)
        else blocks
    )


def rank_rows(count: int, *, rank: int, ranks: int) -> slice:
    """Cut rows as torch does: equally many for every rank, as far as they go."""
    each = -(-count // ranks)
    return slice(min(count, rank * each), min(count, (rank + 1) * each))


def _apply_fully_shard(
    root: _LossModule, blocks: list[nn.Module], device: torch.device, ranks: int
) -> list[FSDPModule]:
    """Cut the blocks, then what is left; numbers that are no row of anything are held by every rank."""
    mesh = init_device_mesh(device.type, (ranks,))
    scalars = {parameter for parameter in root.parameters() if parameter.ndim == 0}
    units = [
        fully_shard(
            module, mesh=mesh, reshard_after_forward=module is not root, ignored_params=scalars
        )
        for module in [*blocks, root]
    ]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # a sum: the update divides once, by its targets
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return units


def _register_tensor(root: nn.Module, path: str, tensor: Tensor) -> None:
    """Register a parameter or a buffer under a dotted path, making the modules on the way."""
    *places, leaf = path.split(".")
    for place in places:
        if place not in dict(root.named_children()):
            root.add_module(place, nn.Module())
        root = root.get_submodule(place)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)
