"""Compiling the forward pass, where that pays, and going on without where it fails."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dragoman.config import TrainConfig
from dragoman.training.memory import is_out_of_memory

log = logging.getLogger(__name__)

# A shape takes half a minute or so to compile, cold, and there are up to 24, so a short run would be over before it gains.
LEAST_UPDATES, LEAST_SECONDS = 20_000, 3600.0
MOST_VARIANTS = 256  # shapes, with and without masks, in training and evaluation; torch gives up quietly past its own 8


class Compiling(NamedTuple):
    """Whether to compile, and why."""

    wanted: bool
    reason: str


def choose_compiling(config: TrainConfig, device: torch.device, *, sharded: bool = False) -> Compiling:
    """Follow `train.compile`; `auto` compiles long runs on a GPU."""
    if sharded:
        return Compiling(False, "ranks that share out the weights meet within a pass")
    if config.compile != "auto":
        return Compiling(config.compile == "on", "as configured")
    if device.type != "cuda":
        return Compiling(False, f"on {device.type} it gains little")
    if config.deterministic:
        return Compiling(False, "compiled kernels round differently")
    if config.budget and config.budget < LEAST_SECONDS:
        return Compiling(False, f"a budget of {config.budget:.0f} s is too short")
    if config.steps < LEAST_UPDATES:
        return Compiling(False, f"{config.steps:,} updates are too few")
    return Compiling(True, f"{config.steps:,} updates on {device.type}")


def choose_replaying(config: TrainConfig, device: torch.device) -> bool:
    """Follow `train.replay` where there is a GPU, the only device that can."""
    return device.type == "cuda" and config.replay != "off"


class Compiled:
    """A function that torch compiles at its first call, for each shape anew; should that fail, the plain function takes over."""

    def __init__(self, function: Callable[..., Any]) -> None:
        limits: Any = torch._dynamo.config  # torch 2.11 has no public switch for it
        limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
        self._plain = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        """Call the compiled form while it works."""
        if self._compiled is not None:
            try:
                return self._compiled(*arguments)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                found = " ".join(str(error).split())[:200]
                log.warning("compiling failed and training goes on without it (%s: %s); set train.compile=off", type(error).__name__, found)
                self._compiled = None
        return self._plain(*arguments)


def prepare_device(device: torch.device, *, deterministic: bool) -> None:
    """Set what is set once a process: how a GPU multiplies float32, and whether it must repeat its bits."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision("high")  # what autocast leaves in float32 may use the tensor cores
    torch.backends.cuda.enable_cudnn_sdp(False)  # half a second for the plan of each shape, on an H200 with torch 2.11
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses; read at cuBLAS's first use
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
