"""Mixed precision: autocast, and a bfloat16 compute copy of float32 master weights.

Only bfloat16 is used, so there is no GradScaler; `TrainStep` skips steps with non-finite gradients.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config import TrainConfig
from dragoman.data.collate import TensorBatch
from dragoman.models.block_interface import Block
from dragoman.training.distributed.data_parallel import ReplicatedDataParallel, named_weights
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.task_protocol import Loss, Task

# With either, matrix multiplications ran 1.3 to 1.7 times as fast as in float32 (docs/log.md).
_CPU_FLAGS = ("amx_bf16", "avx512_bf16")


class Precision(NamedTuple):
    """The dtype of matrix multiplications, and why it was chosen."""

    dtype: torch.dtype
    reason: str

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of a forward pass; it can be entered again."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    @property
    def name(self) -> str:
        """The dtype's name, as in `train.precision`."""
        return str(self.dtype).removeprefix("torch.")


def choose_precision(wanted: str, device: torch.device) -> Precision:
    """Return the precision of `train.precision`.

    `auto` depends on the hardware alone, not on timing.
    """
    if wanted == "float32":
        return Precision(torch.float32, "as configured")
    if device.type == "cuda":
        # Emulated bfloat16 would be slower than float32.
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
        if supported and wanted == "bfloat16":
            return Precision(torch.bfloat16, "as configured")
        gpu = torch.cuda.get_device_name(device)
        if supported:
            return Precision(torch.bfloat16, f"{gpu} supports it")
        return Precision(torch.float32, f"{gpu} does not support bfloat16")
    if wanted == "bfloat16":
        return Precision(torch.bfloat16, "as configured")
    if device.type == "cpu":
        flag = next((flag for flag in _CPU_FLAGS if flag in _cpu_flags()), None)
        if flag:
            return Precision(torch.bfloat16, f"this CPU has {flag}")
        return Precision(torch.float32, "this CPU has no bfloat16 instructions")
    return Precision(torch.float32, f"bfloat16 is untested on {device.type}")


@cache
def _cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags; empty where the system does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


class BF16DataParallel(ReplicatedDataParallel):
    """Data parallel with float32 master weights and a bfloat16 copy for forward and backward."""

    accumulates_grad = False

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        super().__init__(model, world)
        self.module = self.bf16_copy = copy.deepcopy(model).train()
        for parameter in self.bf16_copy.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = None
        self._master_params: list[Tensor] = list(model.parameters())
        self._bf16_params: list[Tensor] = list(self.bf16_copy.parameters())
        self._bf16_trainable = [
            parameter for parameter in self.bf16_copy.parameters() if parameter.requires_grad
        ]

    def wrap_task(self, task: Task) -> Task:
        """Return the task with the master weights copied to bfloat16 before each forward pass."""
        return _BF16Task(task, self)

    @torch.no_grad()
    def update_bf16_copy(self) -> None:
        """Round the master weights as they are now into the compute copy."""
        torch._foreach_copy_(self._bf16_params, self._master_params)

    def backward(self, loss: Loss) -> None:
        """Leave float32 gradients on the master weights, reusing existing tensors."""
        try:
            loss.total.backward()  # type: ignore[no-untyped-call]
            self._copy_grads_to_master()
        finally:
            for parameter in self._bf16_trainable:
                parameter.grad = None

    @torch.no_grad()
    def _copy_grads_to_master(self) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for parameter, bf16_parameter in zip(self._parameters, self._bf16_trainable, strict=True):
            if bf16_parameter.grad is None:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            else:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                targets.append(parameter.grad)
                sources.append(bf16_parameter.grad)
        torch._foreach_copy_(targets, sources)


class _BF16Task:
    """A task whose forward pass starts from the current master weights."""

    def __init__(self, task: Task, parallel: BF16DataParallel) -> None:
        self._task, self._parallel = task, parallel

    def loss(self, model: nn.Module, batch: TensorBatch) -> Loss:
        """Copy the weights and compute the loss."""
        self._parallel.update_bf16_copy()
        return self._task.loss(model, batch)


def should_use_bf16_weights(
    config: TrainConfig, model: nn.Module, precision: Precision, device: torch.device
) -> bool:
    """Whether to train with a bfloat16 compute copy, according to `train.param_dtype`.

    `auto` does so on a GPU if every block allows it. A model with buffers that training changes,
    such as the running means of batch normalization, never has a copy: the copy's changes would be
    lost.
    """
    if (
        precision.dtype != torch.bfloat16
        or config.param_dtype == "float32"
        or any(p.dtype != torch.float32 for p in model.parameters())
    ):
        return False
    parameters = dict(model.named_parameters())
    if any(name not in parameters for name in named_weights(model)):
        return False
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return config.param_dtype == "bfloat16" or (
        device.type == "cuda"
        and bool(blocks)
        and all(block.bf16_params_by_default for block in blocks)
    )
