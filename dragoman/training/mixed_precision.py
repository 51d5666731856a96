"""Mixed precision: autocast, and a bfloat16 compute copy of float32 master weights."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.config import TrainConfig
from dragoman.data.batches import Batch
from dragoman.models.block import Block
from dragoman.training.distributed.data_parallel import ReplicatedDataParallel, named_weights
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.task import Loss, Task

_CPU_FLAGS = (
    "amx_bf16",
    "avx512_bf16",
)  # with either, products ran 1.3 to 1.7 times as fast as in float32 (docs/log.md)


class Precision(NamedTuple):
    """A number format for products, and why it was chosen."""

    dtype: torch.dtype
    reason: str

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Make the context that a forward pass runs in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    @property
    def name(self) -> str:
        """Name the format as the configuration does."""
        return str(self.dtype).removeprefix("torch.")


def choose_precision(wanted: str, device: torch.device) -> Precision:
    """Follow `train.precision`; `auto` asks the hardware and never the clock, so that a rerun decides alike."""
    if wanted == "float32":
        return Precision(torch.float32, "as configured")
    if wanted == "bfloat16" and (
        device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return Precision(torch.bfloat16, "as configured")
    if (
        device.type == "cuda"
    ):  # one without bfloat16 would emulate it, slower than float32 and no more exact
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision(torch.bfloat16, f"{torch.cuda.get_device_name(device)} multiplies it")
        return Precision(
            torch.float32, f"{torch.cuda.get_device_name(device)} does not multiply bfloat16"
        )
    if device.type == "cpu":
        flag = next((flag for flag in _CPU_FLAGS if flag in _cpu_flags()), None)
        if flag:
            return Precision(torch.bfloat16, f"this CPU has {flag}")
        return Precision(torch.float32, "this CPU does not multiply bfloat16")
    return Precision(torch.float32, f"bfloat16 was not tried on {device.type}")


@cache
def _cpu_flags() -> frozenset[str]:
    """Read what the processor can do; empty where the system does not say, which leads to float32."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


class BF16DataParallel(ReplicatedDataParallel):
    """Every rank holds the whole model, and a rounded copy that its passes go through."""

    accumulates_grad = False

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        super().__init__(model, world)
        self.bf16_copy = copy.deepcopy(model).train()
        for parameter in self.bf16_copy.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = None
        self._master_params: list[Tensor] = list(model.parameters())
        self._bf16_params: list[Tensor] = list(self.bf16_copy.parameters())
        self._bf16_trainable = [
            parameter for parameter in self.bf16_copy.parameters() if parameter.requires_grad
        ]

    def loss(self, task: Task, batch: Batch) -> Loss:
        """Round the weights as they are now, and compute a batch's loss with them."""
        with torch.no_grad():
            torch._foreach_copy_(self._bf16_params, self._master_params)
        return task.loss(self.bf16_copy, batch)

    def backward(self, loss: Loss) -> None:
        """Leave the loss's gradients on the trained weights, in the tensors that are there or in new ones."""
        try:
            loss.total.backward()  # type: ignore[no-untyped-call]
            self._copy_grads_to_master()
        finally:
            for bf16_copy in self._bf16_trainable:
                bf16_copy.grad = None

    @torch.no_grad()
    def _copy_grads_to_master(self) -> None:
        places: list[Tensor] = []
        found: list[Tensor] = []
        for parameter, bf16_copy in zip(self._parameters, self._bf16_trainable, strict=True):
            if bf16_copy.grad is None:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            else:
                parameter.grad = (
                    torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                )
                places.append(parameter.grad)
                found.append(bf16_copy.grad)
        torch._foreach_copy_(places, found)


def should_use_bf16_weights(
    config: TrainConfig, model: nn.Module, precision: Precision, device: torch.device
) -> bool:
    """Follow `train.param_dtype`; `auto` rounds on a GPU where every block allows it, and nothing does where a pass changes the model."""
    if (
        precision.dtype != torch.bfloat16
        or config.param_dtype == "float32"
        or any(p.dtype != torch.float32 for p in model.parameters())
    ):
        return False
    parameters = dict(model.named_parameters())
    if any(
        name not in parameters for name in named_weights(model)
    ):  # running means: the copy's would be lost
        return False
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    return config.param_dtype == "bfloat16" or (
        device.type == "cuda"
        and bool(blocks)
        and all(block.bf16_params_by_default for block in blocks)
    )
