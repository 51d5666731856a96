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
from dragoman.training.distributed import World
from dragoman.training.halved import Halved
from dragoman.training.holding import Gradient, Holding, Replicated, Total, weights_of
from dragoman.training.loss import Loss, Trainable

MOST_OF_A_GPU = 0.5  # share of the memory that weights, gradients and moments may take; the rest is for activations


class Sharding(NamedTuple):
    """Whether the model is shared out, and why."""

    wanted: bool
    reason: str


def choose_sharding(config: TrainConfig, model: nn.Module, *, ranks: int, device: torch.device) -> Sharding:
    """Follow `train.shard`; `auto` shares out what would fill more than half of a GPU on every rank."""
    if ranks == 1:
        return Sharding(False, "there is one process")
    if config.shard != "auto":
        return Sharding(config.shard == "on", "as configured")
    if device.type != "cuda":
        return Sharding(False, f"on {device.type} it is slower")
    copies = 5 + (1 if config.ema else 0)  # weights, gradients, the message that sums them, two moments, the running average
    needed = copies * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    room = torch.cuda.get_device_properties(device).total_memory
    found = f"{copies} copies of the weights take {100 * needed / room:.0f} % of the GPU"
    return Sharding(needed > MOST_OF_A_GPU * room, found)


def hold(model: nn.Module, world: World, device: torch.device, sharding: Sharding, *, halved: bool = False) -> Holding:
    """Hold a model as was chosen; one that is shared out is never rounded."""
    if sharding.wanted:
        return Sharded(model, world, device)
    return Halved(model, world) if halved else Replicated(model, world)


class Sharded:
    """Every rank holds some rows of each weight."""

    lockstep = True
    adds = True

    def __init__(self, model: nn.Module, world: World, device: torch.device) -> None:
        self._world = world
        self.label = f"-{world.rank}-of-{world.size}"
        world.broadcast(weights_of(model).values())
        buffers = {name: tensor for name, tensor in weights_of(model).items() if name not in dict(model.named_parameters())}
        self._pass = _Pass(model)
        self._units = _shard(self._pass, units_of(model), device, world.size)
        self.shares = nn.Module()
        self._cut: list[tuple[DTensor, nn.Parameter]] = []
        self._rows: dict[str, slice] = {}
        for name, parameter in model.named_parameters():
            share = parameter
            if isinstance(parameter, DTensor):
                # The same memory, without the wrapper: optimiser and average need not know of it.
                share = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
                rows = rows_of_rank(len(parameter), rank=world.rank, ranks=world.size)
                assert len(share) == rows.stop - rows.start, "torch must cut weights as we do"
                self._cut.append((parameter, share))
                self._rows[name] = rows
            _put(self.shares, name, share)
        for name, tensor in buffers.items():
            _put(self.shares, name, tensor)
        cut = {id(share) for _, share in self._cut}
        self._trained = [share for share in self.shares.parameters() if share.requires_grad]
        self._common = [number for number, share in enumerate(self._trained) if id(share) not in cut]  # held by every rank

    def loss(self, task: Trainable, batch: Batch) -> Loss:
        """Compute a batch's loss, gathering each block's weights on the way."""
        self._world.doing("a pass over a batch", waits=True)
        return Loss(*self._world.together(lambda: self._pass(task, batch)))

    def backward(self, loss: Loss) -> None:
        """Sum the loss's gradients over the ranks, each into its share."""
        self._world.together(loss.total.backward)
        for parameter, share in self._cut:
            gradient, parameter.grad = parameter.grad, None
            share.grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]

    @torch.no_grad()
    def total(self, gradient: Gradient, sums: Tensor, number: int) -> Total:
        """Sum what is left: figures, squares of the shares' gradients, and gradients of the numbers that are not cut."""
        common = [torch.zeros_like(self._trained[place]) if gradient[place] is None else gradient[place] for place in self._common]
        cut = [part for place, part in enumerate(gradient) if part is not None and place not in self._common]
        squares = torch.nn.utils.get_total_norm(cut).to(sums).square()
        flat = torch.cat([sums, squares.reshape(1), *(part.reshape(-1) for part in common if part is not None)])
        self._world.all_reduce(flat, f"summing the figures of update {number}")
        sums, squares, rest = flat.split([len(sums), 1, len(flat) - len(sums) - 1])  # type: ignore[no-untyped-call]
        summed = list(gradient)
        for place, value in zip(self._common, rest, strict=True):
            summed[place] = value.reshape(())
        return Total(summed, sums, (squares.squeeze(0) + rest.square().sum()).sqrt())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights; the first rank keeps them until the end, and its model is then like any other."""
        try:
            self._world.together(self._gather)
            if not self._world.leads:
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
            unit.set_reshard_after_forward(not isinstance(unit, _Pass), recurse=False)


class _Pass(nn.Module):
    """The call that torch's hooks stand around: a model is used through several methods, and a loss reads its output matrix."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, task: Trainable, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the loss; a tuple, for torch looks for tensors in nothing else."""
        loss = task.loss(self.model, batch)
        return loss.total, loss.nll, loss.count


def units_of(model: nn.Module) -> list[nn.Module]:
    """Find the blocks whose weights are gathered one block at a time; none where a block may be left out or lends a weight."""
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    blocks: list[nn.Module] = [block for stack in stacks for _, block in stack.blocks()]
    weights = [parameter for block in blocks for parameter in block.parameters()]
    return [] if any(stack.layer_drop for stack in stacks) or len(set(weights)) < len(weights) else blocks


def rows_of_rank(count: int, *, rank: int, ranks: int) -> slice:
    """Cut rows as torch does: equally many for every rank, as far as they go."""
    each = -(-count // ranks)
    return slice(min(count, rank * each), min(count, (rank + 1) * each))


def _shard(root: _Pass, blocks: list[nn.Module], device: torch.device, ranks: int) -> list[FSDPModule]:
    """Cut the blocks, then what is left; numbers that are no row of anything are held by every rank."""
    mesh = init_device_mesh(device.type, (ranks,))
    numbers = {parameter for parameter in root.parameters() if parameter.ndim == 0}
    units = [fully_shard(module, mesh=mesh, reshard_after_forward=module is not root, ignored_params=numbers) for module in [*blocks, root]]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)  # a sum: the update divides once, by its targets
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return units


def _put(root: nn.Module, path: str, tensor: Tensor) -> None:
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
