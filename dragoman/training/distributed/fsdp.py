"""Sharded data parallel with torch's `fully_shard` (FSDP2): weights, gradients, moments and EMA.

Each weight is sharded by rows. A block's weights are gathered before its forward and backward pass
and freed after it; its gradients are reduce-scattered in the backward pass. The ranks communicate
in every block, so all of them must run the same passes in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dragoman.config import TrainConfig
from dragoman.data.collate import TensorBatch
from dragoman.models.block_stack import Stack
from dragoman.training.bf16_mixed_precision import BF16DataParallel
from dragoman.training.distributed.data_parallel import ReplicatedDataParallel, named_weights
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.task_protocol import Loss, Task
from dragoman.training.train_step import (
    Gradients,
    ParallelStrategy,
    ReducedGradients,
    SingleProcess,
)

# Fraction of the GPU's memory for weights, gradients and moments; the rest is for activations.
MAX_REPLICA_FRACTION = 0.5


class FSDPDecision(NamedTuple):
    """Whether the model is sharded, and why."""

    enabled: bool
    reason: str


def choose_fsdp(
    config: TrainConfig, model: nn.Module, *, ranks: int, device: torch.device
) -> FSDPDecision:
    """Return the decision of `train.fsdp`.

    `auto` shards a model that fills over half of each GPU.
    """
    if ranks == 1:
        return FSDPDecision(False, "there is one process")
    if config.fsdp != "auto":
        return FSDPDecision(config.fsdp == "on", "as configured")
    if config.optimizer in ("adafactor", "muon"):
        return FSDPDecision(False, f"{config.optimizer} needs whole matrices")
    if device.type != "cuda":
        return FSDPDecision(False, f"on {device.type} it is slower")
    # Weights, gradients, the buffer of their all-reduce, two moments, and the EMA.
    copies = 5 + (1 if config.ema_decay else 0)
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
    """Return the strategy for a model; a sharded model has no bfloat16 copy."""
    if fsdp.enabled:
        return ShardedDataParallel(model, world, device)
    if bf16_weights:
        return BF16DataParallel(model, world)
    return SingleProcess(model) if world.size == 1 else ReplicatedDataParallel(model, world)


class ShardedDataParallel:
    """Every rank holds some rows of each weight."""

    lockstep = True
    accumulates_grad = True

    def __init__(self, model: nn.Module, world: ProcessGroup, device: torch.device) -> None:
        self.module, self._world = model, world
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
                # The same memory as a plain tensor: optimizer and EMA need no DTensor support.
                local_param = nn.Parameter(
                    parameter.to_local().detach(), requires_grad=parameter.requires_grad
                )
                rows = rank_rows(len(parameter), rank=world.rank, ranks=world.size)
                assert len(local_param) == rows.stop - rows.start, "rank_rows must agree with torch"
                self._sharded_params.append((parameter, local_param))
                self._rows[name] = rows
            _register_tensor(self.local_module, name, local_param)
        for name, tensor in buffers.items():
            _register_tensor(self.local_module, name, tensor)
        sharded = {id(local_param) for _, local_param in self._sharded_params}
        self._local_params = [
            local_param
            for local_param in self.local_module.parameters()
            if local_param.requires_grad
        ]
        self._replicated_indices = [
            index
            for index, local_param in enumerate(self._local_params)
            if id(local_param) not in sharded
        ]

    def wrap_task(self, task: Task) -> Task:
        """Return the task with FSDP's hooks around its forward pass."""
        return _ShardedTask(task, self._loss_module, self._world)

    def backward(self, loss: Loss) -> None:
        """Reduce-scatter the loss's gradients to the ranks' shards."""
        self._world.run_collective(loss.total.backward)
        for parameter, local_param in self._sharded_params:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is None or isinstance(gradient, DTensor), "FSDP shards gradients"
            local_param.grad = None if gradient is None else gradient.to_local()

    @torch.no_grad()
    def all_reduce_gradients(
        self, gradients: Gradients, sums: Tensor, step: int
    ) -> ReducedGradients:
        """Sum metrics, squared norms of the shards, and gradients of the replicated scalars."""
        replicated = [
            torch.zeros_like(self._local_params[index])
            if gradients[index] is None
            else gradients[index]
            for index in self._replicated_indices
        ]
        sharded = [
            gradient
            for index, gradient in enumerate(gradients)
            if gradient is not None and index not in self._replicated_indices
        ]
        squares = torch.nn.utils.get_total_norm(sharded).to(sums).square()
        flat = torch.cat(
            [
                sums,
                squares.reshape(1),
                *(gradient.reshape(-1) for gradient in replicated if gradient is not None),
            ]
        )
        self._world.all_reduce(flat, f"all-reduce of the metrics of step {step}")
        sizes = [len(sums), 1, len(flat) - len(sums) - 1]
        sums, squares, rest = flat.split(sizes)  # type: ignore[no-untyped-call]
        summed = list(gradients)
        for index, value in zip(self._replicated_indices, rest, strict=True):
            summed[index] = value.reshape(())
        return ReducedGradients(summed, sums, (squares.squeeze(0) + rest.square().sum()).sqrt())

    @contextmanager
    def gathered_model(self) -> Iterator[None]:
        """Gather all weights.

        Rank 0 keeps them until the end of the block, as an ordinary model.
        """
        try:
            self._world.run_collective(self._gather)
            if not self._world.is_rank_zero:
                self._scatter()
            with _forward_hooks_removed(self._units):
                yield
        finally:
            self._scatter()

    def local_rows(self, name: str) -> slice | None:
        """Return which rows of a weight this rank holds; None for a replicated one."""
        return self._rows.get(name)

    def _gather(self) -> None:
        for unit in self._units:
            unit.unshard()

    def _scatter(self) -> None:
        for unit in self._units:
            unit.reshard()


class _ShardedTask:
    """A task whose loss is computed within the FSDP root module."""

    def __init__(self, task: Task, loss_module: _LossModule, world: ProcessGroup) -> None:
        self._task, self._loss_module, self._world = task, loss_module, world

    def loss(self, model: nn.Module, batch: TensorBatch) -> Loss:
        """Compute the loss, gathering each block's weights for its forward pass."""
        self._world.set_activity("the forward pass of a batch", waits=True)
        return Loss(*self._world.run_collective(lambda: self._loss_module(self._task, batch)))


class _LossModule(nn.Module):
    """The FSDP root module, whose hooks surround the whole computation of the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, task: Task, batch: TensorBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss as a tuple: FSDP finds output tensors in no other type."""
        loss = task.loss(self.model, batch)
        return loss.total, loss.nll, loss.count


def find_fsdp_units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are sharded as units; none with layer drop or shared weights."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    blocks: list[nn.Module] = [block for stack in stacks for _, block in stack.blocks()]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    return (
        []
        if any(stack.layer_drop for stack in stacks) or len(set(weights)) < len(weights)
        else blocks
    )


def rank_rows(count: int, *, rank: int, ranks: int) -> slice:
    """Return the rows of a rank, split as torch does: ceil(count / ranks) for each."""
    each = -(-count // ranks)
    return slice(min(count, rank * each), min(count, (rank + 1) * each))


def _apply_fully_shard(
    root: _LossModule, blocks: list[nn.Module], device: torch.device, ranks: int
) -> list[FSDPModule]:
    """Shard the blocks, then the remaining weights; scalars are replicated."""
    mesh = init_device_mesh(device.type, (ranks,))
    scalars = {parameter for parameter in root.parameters() if parameter.ndim == 0}
    units = [
        fully_shard(
            module, mesh=mesh, reshard_after_forward=module is not root, ignored_params=scalars
        )
        for module in [*blocks, root]
    ]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # a sum: the step divides once
        unit.set_force_sum_reduction_for_comms(True)  # gloo supports no other
    return units


@contextmanager
def _forward_hooks_removed(units: list[FSDPModule]) -> Iterator[None]:
    """Call the units as ordinary modules, without the hooks that gather and free their weights.

    A forward pass of one rank alone must not communicate. FSDP would also record it and prefetch
    by that record in the next backward pass, on this rank only: all ranks would wait forever.
    """
    modules = [unit for unit in units if isinstance(unit, nn.Module)]
    hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
    for module in modules:
        module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for module, (before, after) in zip(modules, hooks, strict=True):
            module._forward_pre_hooks, module._forward_hooks = before, after


def _register_tensor(root: nn.Module, path: str, tensor: Tensor) -> None:
    """Register a parameter or a buffer under a dotted name, creating the modules of its path."""
    *modules, leaf = path.split(".")
    for name in modules:
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)
