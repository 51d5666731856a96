"""Where a model runs: what `auto` means, and what is used where a device is missing, too old or full."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from dragoman.config.engine_options import check_device
from dragoman.errors import ConfigError
from dragoman.runtime.memory import is_out_of_memory, release_memory

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
_Made = TypeVar("_Made")
_warned = set[
    str
]()  # a command may ask for its device several times, and a person wants to read once that it is not there


def choose_device(name: str | torch.device = "auto", *, strict: bool = False) -> torch.device:
    """Take the named device, or with `auto` a GPU where there is one and else the CPU.

    A GPU that cannot be used costs one line, and the CPU computes the same. With `strict` it is refused: where several processes
    train together, one that went elsewhere alone would keep the others waiting.
    """
    device = _parse_device(name)
    if device.type == "cpu":
        return device
    reason = (
        _mps_problem() if device.type == "mps" else _cuda_problem(device, is_auto=name == "auto")
    )
    if reason is None:
        return CPU
    if reason and strict:
        raise ConfigError(
            [
                f"every process of a run must have its device; found {reason}; add --device cpu to all of them"
            ]
        )
    if reason:
        _warn_once(f"{reason}: the CPU is used, which takes longer, and the result is the same")
        return CPU
    if device.type == "cuda":
        # cuDNN's attention builds a plan for every shape it meets, half a second each on an H200 with torch 2.11, and a
        # decoder meets a new shape at every step. PyTorch's own fused kernels take all shapes as they come.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def run_with_cpu_fallback(device: torch.device, make: Callable[[torch.device], _Made]) -> _Made:
    """Make something on a device, or on the CPU where the device's memory has no room for it."""
    try:
        return make(device)
    except (RuntimeError, MemoryError) as error:
        if device.type == "cpu" or not is_out_of_memory(error):
            raise
    release_memory()
    _warn_once(
        f"the model does not fit into the memory of {device}: the CPU is used, which takes longer, and the result is the same"
    )
    return make(CPU)


def _parse_device(name: str | torch.device) -> torch.device:
    """Read a device's name."""
    check_device(str(name))
    return torch.device("cuda" if name == "auto" else name)


def _mps_problem() -> str:
    """Say why Apple's GPU cannot be used; empty where it can."""
    return "" if torch.backends.mps.is_available() else "there is no mps here"


def _cuda_problem(device: torch.device, *, is_auto: bool) -> str | None:
    """Say why a GPU cannot be used, by using it; empty where it can, None where there is none and nobody wanted it (`said`)."""
    with warnings.catch_warnings(
        record=True
    ) as caught:  # torch says in many lines what we say in one
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            troubles = [_first_line(each.message) for each in caught if "CUDA" in str(each.message)]
            if troubles:
                return f"the GPU cannot be used ({troubles[0]})"
            return (
                None
                if is_auto
                else f"torch {'' if torch.version.cuda else 'is built for CPUs alone and '}sees no GPU here"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            return f"torch sees {torch.cuda.device_count()} GPU{'' if torch.cuda.device_count() == 1 else 's'} and no {device}"
        try:
            torch.ones(8, device=device).sum().item()
        except RuntimeError as error:
            return _describe_failure(device, error)
    return ""


def _describe_failure(device: torch.device, error: RuntimeError) -> str:
    """Put what a GPU answered to its first task into a few words."""
    name = torch.cuda.get_device_name(device)
    if is_out_of_memory(error):
        return f"the memory of {name} is full"
    if "no kernel image" in str(error):
        major, minor = torch.cuda.get_device_capability(device)
        built = ", ".join(each for each in torch.cuda.get_arch_list() if each.startswith("sm_"))
        return f"{name} (sm_{major}{minor}) is too old for this torch, which is built for {built}"
    return f"{name} cannot be used ({_first_line(error)})"


def _first_line(message: object) -> str:
    """Cut what another library says to what matters."""
    return next(iter(str(message).strip().splitlines()), type(message).__name__)[:160].rstrip(" .")


def _warn_once(line: str) -> None:
    """Say something once a process."""
    if line not in _warned:
        _warned.add(line)
        logger.warning(line)


def select_train_device(wanted: str) -> torch.device:
    """Choose the device; under torchrun each process takes a GPU of its own."""
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    device = choose_device(wanted, strict=not alone)
    if device.type == "cuda" and device.index is None:
        number, gpus = local_rank(), torch.cuda.device_count()
        if number >= gpus:
            raise ConfigError(
                [
                    f"each process needs a GPU of its own; found {gpus} for process {number + 1}; start fewer with torchrun"
                ]
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    return device


def describe_hardware(device: torch.device, ranks: int) -> str:
    """Name the hardware, for people."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        name = f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores ({platform.machine()})"
    else:
        name = device.type
    return name if ranks == 1 else f"{ranks} processes, each on {name}"


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Say which of this machine's processes we are: the number of the GPU to take."""
    return parse_rank_variable(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0


def parse_rank_variable(environment: Mapping[str, str], name: str) -> int:
    """Return a whole number from an environment variable that torchrun sets; raise ConfigError for anything else."""
    text = environment[name]
    if not text.isdecimal():
        raise ConfigError(
            [
                f"{name} must be a whole number; found {text!r}; start several processes with torchrun"
            ]
        )
    return int(text)
