"""Device selection: what `auto` means, and the fallback to the CPU."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from dragoman.config.device_engine_and_precision_names import check_device
from dragoman.errors import ConfigError
from dragoman.runtime.out_of_memory import is_out_of_memory, release_memory

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
_Made = TypeVar("_Made")
_warned = set[str]()  # a command may choose its device several times; warn once


def choose_device(name: str | torch.device = "auto", *, strict: bool = False) -> torch.device:
    """Return the named device; `auto` is a GPU if there is one, else the CPU.

    For a GPU that cannot be used a warning is logged and the CPU is returned. With `strict` it is
    an error instead: in distributed training a single rank on the CPU would keep the others
    waiting.
    """
    device = _parse_device(name)
    if device.type == "cpu":
        return device
    reason = (
        _mps_problem() if device.type == "mps" else cuda_problem(device, is_auto=name == "auto")
    )
    if reason is None:
        return CPU
    if reason and strict:
        raise ConfigError(
            [
                f"every process of a run must have its device; found {reason}; add --device cpu "
                "to all of them"
            ]
        )
    if reason:
        _warn_once(f"{reason}: falling back to the CPU, which is slower; the result is the same")
        return CPU
    if device.type == "cuda":
        # cuDNN's attention builds a plan for each new shape, half a second each on an H200 with
        # torch 2.11, and decoding has a new shape at every step. PyTorch's own fused kernels need
        # no plan.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def cuda_problem(device: torch.device, *, is_auto: bool) -> str | None:
    """Return why a GPU cannot be used, after trying it; "" if it can.

    None means that there is no GPU and `auto` did not require one.
    """
    with warnings.catch_warnings(record=True) as caught:  # torch's warnings are replaced by our own
        warnings.simplefilter("always")
        if not torch.cuda.is_available():
            troubles = [_first_line(each.message) for each in caught if "CUDA" in str(each.message)]
            if troubles:
                return f"the GPU cannot be used ({troubles[0]})"
            return (
                None
                if is_auto
                else f"torch {'' if torch.version.cuda else 'is built for CPUs only and '}sees no "
                "GPU here"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            return (
                f"torch sees {torch.cuda.device_count()} "
                f"GPU{'' if torch.cuda.device_count() == 1 else 's'} and no {device}"
            )
        try:
            torch.ones(8, device=device).sum().item()
        except RuntimeError as error:
            return _describe_failure(device, error)
    return ""


def run_with_cpu_fallback(device: torch.device, make: Callable[[torch.device], _Made]) -> _Made:
    """Return make(device), or make(cpu) if the device is out of memory."""
    try:
        return make(device)
    except (RuntimeError, MemoryError) as error:
        if device.type == "cpu" or not is_out_of_memory(error):
            raise
    release_memory()
    warn_cpu_fallback(device)
    return make(CPU)


def warn_cpu_fallback(device: torch.device) -> None:
    """Warn that the CPU is used because the device is out of memory."""
    _warn_once(
        f"the model does not fit into the memory of {device}: falling back to the CPU, which is "
        "slower; the result is the same"
    )


def _parse_device(name: str | torch.device) -> torch.device:
    """Return the torch device of a name."""
    check_device(str(name))
    return torch.device("cuda" if name == "auto" else name)


def _mps_problem() -> str:
    """Return why the Apple GPU cannot be used; "" if it can."""
    return "" if torch.backends.mps.is_available() else "no MPS device is available"


def _describe_failure(device: torch.device, error: RuntimeError) -> str:
    """Return a short description of a GPU's first error."""
    name = torch.cuda.get_device_name(device)
    if is_out_of_memory(error):
        return f"the memory of {name} is full"
    if "no kernel image" in str(error):
        major, minor = torch.cuda.get_device_capability(device)
        built = ", ".join(each for each in torch.cuda.get_arch_list() if each.startswith("sm_"))
        return f"{name} (sm_{major}{minor}) is too old for this torch, which is built for {built}"
    return f"{name} cannot be used ({_first_line(error)})"


def _first_line(message: object) -> str:
    """Return the first line of another library's message, shortened."""
    return next(iter(str(message).strip().splitlines()), type(message).__name__)[:160].rstrip(" .")


def _warn_once(line: str) -> None:
    """Log a warning once per process."""
    if line not in _warned:
        _warned.add(line)
        logger.warning(line)


def select_train_device(wanted: str) -> torch.device:
    """Return the training device; under torchrun each rank takes its own GPU."""
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    device = choose_device(wanted, strict=not alone)
    if device.type == "cuda" and device.index is None:
        number, gpus = local_rank(), torch.cuda.device_count()
        if number >= gpus:
            raise ConfigError(
                [
                    f"each process needs a GPU of its own; found {gpus} for process {number + 1}; "
                    "start fewer with torchrun"
                ]
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    return device


def describe_hardware(device: torch.device, ranks: int) -> str:
    """Return a description of the hardware, for logs."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        name = f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores ({platform.machine()})"
    else:
        name = device.type
    return name if ranks == 1 else f"{ranks} processes, each on {name}"


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the rank of this process on its machine, which is the index of its GPU."""
    return parse_rank_variable(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0


def parse_rank_variable(environment: Mapping[str, str], name: str) -> int:
    """Return an integer environment variable of torchrun; raise ConfigError if it is none."""
    text = environment[name]
    if not text.isdecimal():
        raise ConfigError(
            [f"{name} must be an integer; found {text!r}; start several processes with torchrun"]
        )
    return int(text)
